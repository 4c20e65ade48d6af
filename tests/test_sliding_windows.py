"""Sliding layers keep their window: what no row sees goes, no number changes, and texts know how far they go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.sequence.session import GenerationSession
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.cache.tiered_cache import TieredCache
from kvcli.kv.slots import AttentionParams, KVCache, LayerShape, Window, windows_of
from kvcli.kv.tiers.dense import Dense
from tests import drafters, families, make
from tests.policies import KeepAll, Ragged

torch.set_num_threads(1)
SIZE = families.WINDOW
TEXT = families.prompt(200, seed=4)
BACK = 20
MODEL = wrap_lm(families.build("gemma3").double())  # layers 0 and 2 slide
NARROW = wrap_lm(families.build("gemma3").bfloat16())


def windows(model: LM, back: int = BACK) -> dict[int, Window]:
    return {
        layer: Window(window.size, back) for layer, window in windows_of(model.shapes, model.attention_params).items()
    }


def dense(model: LM, back: int | None = BACK) -> Dense:
    return make.dense(model, step=16, windows=None if back is None else windows(model, back))


def ladder(model: LM, back: int | None = BACK, bits: int = 8) -> TieredCache:
    """A few slots in full, older ones in few bits."""
    below = make.quantized(model, (bits, bits), group=8)
    return TieredCache(dense(model, back), [TierLevel(below, group=8)], holds=16, group=8, sinks=2)


def opened(model: LM, kv: KVCache, **options: Any) -> GenerationSession:
    return make.session(model, kv, **{"chunk": 31, **options})


def written(session: GenerationSession, text: Sequence[int] = TEXT, new: int = 30) -> list[int]:
    run_to_end(session.read(text[len(session.ids) :]))
    list(iterate_events(session.stream(new)))
    return session.ids


def first(kv: KVCache, layer: int) -> int:
    pos = kv.slots(layer).pos
    return int(pos[pos >= 0].min())


@pytest.mark.parametrize("store", [dense, ladder])
@pytest.mark.parametrize("model", [MODEL, NARROW], ids=["fp64", "bf16"])
def test_sliding_layers_keep_their_window_and_say_the_same(model: LM, store: Any) -> None:
    kept, whole = opened(model, store(model)), opened(model, store(model, None))
    assert written(kept) == written(whole)
    assert kept.cache.n_slots(1) == whole.cache.n_slots(1) == kept.committed
    for layer in (0, 2):
        # from where the answer began: its window, what may be undone, and what does not make a whole block
        assert kept.cache.n_slots(layer) < 30 + SIZE + 2 * BACK + 64 < whole.cache.n_slots(layer)
        assert kept.cache.slots(layer).n_slots == kept.cache.n_slots(layer)
    held, had = (sum(use.nbytes for use in s.cache.usage() if use.layer == 0) for s in (kept, whole))
    assert held < had
    assert not kept.approximations - whole.approximations


@pytest.mark.parametrize("policy", [KeepAll(), Ragged()])
def test_a_policy_that_evicts_from_sliding_layers_too(policy: Any) -> None:
    """Heads that hold different slots, and places that are not positions."""
    texts = []
    for back in (BACK, None):
        session = opened(MODEL, dense(MODEL, back), policy=policy, every=16)
        texts.append(written(session))
    assert texts[0] == texts[1] or isinstance(policy, Ragged)  # which picks by what it is shown
    again = opened(MODEL, dense(MODEL), policy=policy, every=16)
    assert written(again) == written(opened(MODEL, dense(MODEL), policy=policy, every=16))


@pytest.mark.parametrize("model", [MODEL, NARROW], ids=["fp64", "bf16"])
@pytest.mark.parametrize("chunk", [1, 64, 65, 512])
def test_what_goes_depends_on_the_text_and_not_on_its_chunks(model: LM, chunk: int) -> None:
    one, other = opened(model, dense(model), chunk=chunk), opened(model, dense(model))
    assert written(one) == written(other)
    assert [first(one.cache, layer) for layer in (0, 2)] == [first(other.cache, layer) for layer in (0, 2)]


def test_what_a_chunk_hides_makes_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So sliding layers never hold a window and a chunk at once."""
    most, append = dict[int, int](), Dense.append

    def noted(kv: Dense, layer: int, *stored: Any) -> None:
        append(kv, layer, *stored)
        most[layer] = max(most.get(layer, 0), kv.n_slots(layer))

    monkeypatch.setattr(Dense, "append", noted)
    for by_layers in (False, True):
        most.clear()
        run_to_end(opened(MODEL, dense(MODEL), chunk=128, by_layers=by_layers).read(families.prompt(512)))
        assert max(most[0], most[2]) < 128 + 64, "the chunk, and what is left of a block"
        assert most[1] == 511


def test_a_chunk_that_finds_no_room_leaves_no_kv_cache_with_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would have made room for it is what its rows see once it is read again."""
    want, session, append = opened(MODEL, dense(MODEL), chunk=128), opened(MODEL, dense(MODEL), chunk=128), Dense.append
    ids = families.prompt(384)
    run_to_end(want.read(ids))
    run_to_end(session.prefill_chunk(ids))
    run_to_end(session.prefill_chunk(ids))

    def breaks(kv: Dense, layer: int, *stored: Any) -> None:
        if layer == 1:
            raise MemoryError("as an allocator says it")
        append(kv, layer, *stored)

    monkeypatch.setattr(Dense, "append", breaks)
    with pytest.raises(MemoryError):
        run_to_end(session.prefill_chunk(ids))
    monkeypatch.undo()
    session.rewind(session.committed + 1)
    while run_to_end(session.prefill_chunk(ids)):
        pass
    for layer in range(MODEL.n_layers):
        assert torch.equal(session.cache.slots(layer).k, want.cache.slots(layer).k)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_stays_in_few_bits_is_not_rounded_again(bits: int) -> None:
    kept, whole = opened(MODEL, ladder(MODEL, bits=bits)), opened(MODEL, ladder(MODEL, None, bits))
    for session in (kept, whole):
        run_to_end(session.read(TEXT))
    stays, was = kept.cache.slots(0), whole.cache.slots(0)
    assert stays.n_slots < was.n_slots
    there = torch.isin(was.pos[0], stays.pos[0])
    for a, b in ((was.k, stays.k), (was.v, stays.v)):
        order, mine = was.pos[0, there].argsort(), stays.pos[0].argsort()
        assert torch.equal(a[:, there][:, order], b[:, mine])


@pytest.mark.parametrize("store", [dense, ladder])
@pytest.mark.parametrize("model", [MODEL, NARROW], ids=["fp64", "bf16"])
def test_drafts_change_nothing(model: LM, store: Any) -> None:
    want = written(opened(model, store(model), every=16))
    drafter = drafters.Moody(want, 97, -1)
    session = make.session(model, store(model), drafter, chunk=31, every=16)
    assert written(session) == want


@pytest.mark.parametrize("store", [dense, ladder])
def test_an_answer_is_asked_again_without_reading(store: Any) -> None:
    session = opened(MODEL, store(MODEL), every=16)  # compression points while answering, too
    said = written(session)
    assert session.resume(TEXT) == len(TEXT) - 1
    if store is dense:  # an undo leaves what was rounded rounded
        assert written(session) == said


@pytest.mark.parametrize("store", [dense, ladder])
def test_a_text_that_goes_back_behind_its_window_is_read_again(store: Any) -> None:
    session = opened(MODEL, store(MODEL))
    written(session)
    assert not session.cache.reaches(100)
    assert session.resume(TEXT[:101]) == 0
    assert session.cache.n_slots(0) == session.cache.n_slots(1) == 0
    assert written(session, TEXT[:101]) == written(opened(MODEL, store(MODEL)), TEXT[:101])


@pytest.mark.parametrize("back", [1, 20, 256])
def test_so_many_tokens_can_always_be_undone(back: int) -> None:
    session = opened(MODEL, dense(MODEL, back))
    run_to_end(session.read(TEXT))
    n = session.committed - min(back, session.committed)
    assert session.cache.reaches(n)
    assert session.rewind(n + 1) == n
    want = written(opened(MODEL, dense(MODEL, None)))
    assert written(session) == want


def test_a_fork_goes_back_by_itself() -> None:
    session = opened(MODEL, dense(MODEL))
    run_to_end(session.read(TEXT))
    fork = session.fork()
    assert written(fork, [*TEXT, *families.prompt(90, seed=9)])
    assert fork.cache.n_slots(0) < fork.committed
    assert written(session) == written(opened(MODEL, dense(MODEL, None)))


def test_a_kv_cache_that_moves_to_another_knows_what_it_lacks() -> None:
    from kvcli.chat.turn import move

    session = opened(MODEL, dense(MODEL))
    written(session)
    new = ladder(MODEL)
    move(session.cache, new, MODEL.storing)
    session.stored_kv.replace(new)
    assert not new.reaches(100)
    assert session.rewind(101) == 0


def test_shared_slots_stay_as_long_as_any_layer_sees_them() -> None:
    shapes = [
        LayerShape(1, 4, 4),
        LayerShape(1, 4, 4),
        LayerShape(1, 4, 4, shared_from=0),
        LayerShape(1, 4, 4, shared_from=1),
    ]
    attention_params = [AttentionParams(1.0, window=size) for size in (5, 5, 9, None)]
    assert windows_of(shapes, attention_params) == {0: Window(9)}
    kv = Dense(shapes, torch.float32, windows=windows_of(shapes, attention_params))
    for layer in (0, 1):
        kv.append(layer, torch.randn(1, 900, 4), torch.randn(1, 900, 4), 0)
    kv.compress((), 900)
    assert [kv.n_slots(layer) for layer in range(4)] == [900 - 640, 900, 900 - 640, 900]
