"""What is read again of runs that are taken over: all of it is plain reading, none of it is PIE, and more is nearer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvcli
from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.errors import BadModel
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.native import native
from kvcli.kv.cache.tiered_cache import TierLevel
from kvcli.kv.slots import AttentionParams, KVCache, alike
from kvcli.kv.tiers.quantized import QuantizedTier
from kvcli.methods.reuse.cacheblend import CacheBlend
from kvcli.methods.reuse.pie import Pie
from kvcli.methods.reuse.selective_recompute import First, KVOverlay
from kvcli.settings.profile import Profile
from tests import all_families, families, make
from tests.covering import pinned

LEAST = 16
A, B, C = (families.prompt(n, seed=n) for n in (90, 130, 70))
OLD, NEW = [*A, *B, *C, 11], [*families.prompt(9, seed=9), *C, 5, *B, *families.prompt(8, seed=8), *A, 12]


def lm_of(name: str, dtype: torch.dtype = torch.float32, **changes: int) -> LM:
    more = {"max_position_embeddings": 2048, "num_hidden_layers": 5, **changes}
    if name in ("gemma3", "gpt_oss"):
        more |= {"layer_types": ["full_attention", "sliding_attention"] * 3, "num_hidden_layers": 6}
    return make.model(name, dtype, **more, kernels=True)


def read(
    lm: LM, how: Pie | None, old: Sequence[int] = OLD, new: Sequence[int] = NEW, **more: object
) -> GenerationSession:
    """A text that was read, and another one behind it."""
    kv: KVCache = more.pop("kv", None) or make.dense(lm)  # type: ignore[assignment]
    session = make.session(lm, kv, chunk=50, reusing=how, **more)  # type: ignore[arg-type]
    run_to_end(session.read(old))
    session.start_answer(new, Sampler())
    while run_to_end(session.prefill_chunk(new)):
        pass
    return session


def logits(session: GenerationSession) -> torch.Tensor:
    return run_to_end(session.step()).logits[0].double()


def same(a: GenerationSession, b: GenerationSession, **near: float) -> bool:
    """Whether they have stored the same, to the bit where no tolerance is given."""
    for layer, shape in enumerate(a.lm.shapes):
        if shape.shared_from is None:
            s, t = a.cache.slots(layer), b.cache.slots(layer)
            close = [torch.allclose(x, y, **near) if near else torch.equal(x, y) for x, y in ((s.k, t.k), (s.v, t.v))]
            if not (torch.equal(s.pos, t.pos) and all(close)):
                return False
    return True


def off(a: GenerationSession, b: GenerationSession) -> float:
    """How far values of one are from those of the other."""
    own = [layer for layer, shape in enumerate(a.lm.shapes) if shape.shared_from is None]
    return sum(float((a.cache.slots(i).v - b.cache.slots(i).v).double().square().sum()) for i in own)


@pytest.mark.parametrize("select", ["kv", "hidden"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3"])
def test_all_of_it_read_again_is_plain_reading(name: str, select: str) -> None:
    lm = lm_of(name)
    again = read(lm, CacheBlend(LEAST, 1.0, select))  # type: ignore[arg-type]
    assert "reused" in again.approximations
    near = {} if lm.is_row_invariant and lm.direct_forward is not None else {"rtol": 1e-4, "atol": 1e-4}
    assert same(again, read(lm, None), **near)


@pytest.mark.skipif(native() is None, reason="rows of 16 bits are independent in native kernels alone")
def test_in_16_bits_too_to_the_bit() -> None:
    lm = lm_of("llama", torch.bfloat16)
    assert lm.is_row_invariant
    assert same(read(lm, CacheBlend(LEAST, 1.0)), read(lm, None))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_none_of_it_read_again_is_pie(name: str) -> None:
    lm = lm_of(name)
    assert same(read(lm, CacheBlend(LEAST, 0.0)), read(lm, Pie(LEAST)))
    assert not same(read(lm, CacheBlend(LEAST, 0.2)), read(lm, Pie(LEAST)))


SOME = product(("kv", "hidden"), ("llama", "gemma3", "gpt_oss"))


@pytest.mark.parametrize(("select", "name"), pinned(SOME, ("hidden", "llama")))
def test_some_of_it_reads_what_is_older_in_every_layer(select: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By position, as it is stored in the end: the same with one plain softmax over all of it."""
    lm, how = lm_of(name), CacheBlend(LEAST, 0.3, select)  # type: ignore[arg-type]
    mixed, plain, turned = (read(lm, one) for one in (how, None, Pie(LEAST)))
    monkeypatch.setattr("kvcli.methods.reuse.selective_recompute.KVOverlay", Softmax)
    assert same(mixed, read(lm, how), rtol=1e-3, atol=1e-3)
    assert off(mixed, plain) < off(turned, plain)


class Softmax(KVOverlay):
    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        assert own is not None
        s, at = self._store.slots(layer), self._shapes[layer].shared_from
        k, v = self._extra[layer if at is None else at]
        k, v = torch.cat([s.k, k, own.k], 1), torch.cat([s.v, v, own.v], 1)
        there, rows = torch.tensor([*s.pos[0].tolist(), *self._pos, *pos]), torch.tensor(pos).view(-1, 1)
        sees = (there <= rows) & (there > rows - (params.window or 1 << 30))
        return NewRows(k, v, there.tolist(), sees, sees, own.sink).parts(q, params.scale, params.softcap)


@pytest.fixture(scope="module")
def demo():
    base = Profile.load("exact").replace(exactness="approx", load={"dtype": "fp32"})
    with kvcli.load("demo", profile=base) as model:
        yield model


@pytest.mark.parametrize("select", ["kv", "hidden"])
def test_the_more_is_read_again_the_nearer_are_logits(demo, select: str) -> None:
    """Three documents in another order; on the bundled model, in fp32."""
    page = demo.tokenizer.encode((Path(kvcli.__file__).parent / "demo" / "report.md").read_text())
    a, b, c = page[:500], page[700:1200], page[1500:2000]
    old, new = [*a, *b, *c, 11], [*b, *c, *a[1:], 11]
    plain = read(demo.lm, None, old, new)
    sides = [CacheBlend(64, share, select) for share in (0, 0.15, 0.5, 0.85, 1)]  # type: ignore[arg-type]
    texts = [read(demo.lm, how, old, new) for how in sides]
    values = [off(text, plain) for text in texts]
    want = logits(plain)
    said = [float((logits(text) - want).norm()) for text in texts]
    assert all(more < less for less, more in pairwise(values)), values
    assert all(more < less for less, more in pairwise(said)), said
    assert said[-1] == 0 or not demo.lm.is_row_invariant


@pytest.mark.parametrize("tier", ["packed", "turned"])
def test_kv_caches_that_hold_it_otherwise_are_read_as_they_are(tier: str) -> None:
    lm = lm_of("llama")
    shape = lm.n_layers, lm.n_kv_heads, lm.head_dim

    def kv() -> KVCache:
        rotate = "hadamard" if tier == "turned" else "none"
        packed = QuantizedTier(alike(*shape), lm.dtype, lm.device, k_bits=8, v_bits=8, group=8, rotate=rotate)  # type: ignore[arg-type]
        return make.tiered(lm, TierLevel(packed), holds=16, group=8, sinks=2)

    plain, mixed, turned = (read(lm, how, kv=kv()) for how in (None, CacheBlend(LEAST, 0.5), Pie(LEAST)))
    assert off(mixed, plain) < off(turned, plain)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_held_as_no_number_is_read_again(bad: float) -> None:
    """Before all that differs by a number: else it would stay, and make nothing of all that is read behind it."""
    lm = lm_of("llama")
    session = make.session(lm, chunk=50, reusing=CacheBlend(LEAST, 0.15, "kv"))
    run_to_end(session.read(OLD))
    with torch.inference_mode():
        for layer in range(1, lm.n_layers):
            session.cache.slots(layer).k[:, len(A) + 40] = bad
    session.start_answer(NEW, Sampler())
    while run_to_end(session.prefill_chunk(NEW)):
        pass
    for layer in range(lm.n_layers):
        s = session.cache.slots(layer)
        assert s.k.isfinite().all()
        assert s.v.isfinite().all()


def test_windows_that_moved_on_leave_it_to_be_read() -> None:
    lm = lm_of("gemma3")
    old, new = families.prompt(700), [3, *families.prompt(700)]
    kv = [make.dense(lm, windows=make.windows(lm)) for _ in range(2)]
    mine, plain = (read(lm, how, old, new, kv=one) for how, one in zip((CacheBlend(LEAST), None), kv, strict=True))
    assert "reused" not in mine.approximations
    assert same(mine, plain)


def test_the_old_text_goes_through_its_first_layer_once_and_back_again() -> None:
    lm = lm_of("llama")
    first, kv = First(lm, OLD, lm.dtype, range(1)), make.dense(lm)
    (made,) = run([ForwardRequest(lm, Rows.chain(OLD, 0), kv, layers=range(1))])
    for start, n in ((40, 30), (70, 5), (200, 60), (0, 20), (33, 40)):
        assert torch.equal(run_to_end(first.gave(start, n)), made.hidden[start : start + n])


@pytest.mark.parametrize("select", ["kv", "hidden"])
def test_what_breaks_on_the_way_is_made_again(select: str) -> None:
    lm, how = lm_of("llama"), CacheBlend(LEAST, 0.3, select)  # type: ignore[arg-type]
    want = read(lm, how)
    for at in range(3):
        session = make.session(lm, chunk=50, reusing=how)
        run_to_end(session.read(OLD))
        session.start_answer(NEW, Sampler())
        n, stored = 0, session.committed
        while True:
            work = session.prefill_chunk(NEW)
            try:
                feed = next(work)
                for _ in range(at):
                    feed = work.send(run([feed])[0])
                with pytest.raises(MemoryError):
                    work.throw(MemoryError())
            except StopIteration:
                pass
            else:
                assert session.committed == stored
            if not run_to_end(session.prefill_chunk(NEW)):
                break
            stored, n = session.committed, n + 1
            assert [session.cache.n_slots(i) for i in range(lm.n_layers)] == [stored] * lm.n_layers
        assert n > 5
        assert same(session, want)


def test_models_whose_keys_turn_by_no_table_are_refused_when_a_text_is_opened() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    lm = make.model("llama", rope_parameters=rope)
    for how in (CacheBlend(), Pie()):
        with pytest.raises(BadModel, match="dynamic"):
            make.session(lm, reusing=how)


def test_models_whose_rows_cannot_be_stopped_are_refused_where_that_is_needed() -> None:
    lm = wrap_lm(all_families.build(all_families.config_of("gemma3n_text")))
    with pytest.raises(BadModel, match="cannot stop tokens"):
        make.session(lm, reusing=CacheBlend())
    assert "reused" in read(lm, Pie(LEAST)).approximations


@pytest.mark.parametrize(
    ("key", "value"),
    [("recompute", 1.5), ("recompute", -0.1), ("recompute", float("nan")), ("select", "v"), ("min_span", 7)],
)
def test_values_that_mean_nothing_are_refused(key: str, value: object) -> None:
    with pytest.raises(kvcli.KvcliError):
        Profile.load("exact").replace(exactness="approx", reuse={"method": "blend", key: value})


def test_an_exact_profile_refuses_it() -> None:
    with pytest.raises(kvcli.KvcliError) as error:
        Profile.load("exact").replace(reuse={"method": "blend"})
    assert any("reuse.method" in line for line in error.value.lines)


def test_answers_say_so(demo) -> None:
    profile = demo.profile.replace(reuse={"method": "blend", "min_span": LEAST})
    ids = families.prompt(300, vocab=200)
    with demo.open(profile) as text:
        assert not text.generate([*ids, 11], max_new_tokens=4).stats.approx
        turn = text.generate([7, 8, *ids[50:], 11], max_new_tokens=4)
        assert turn.stats.reused == 250
        assert "spans of 16 tokens or more from other texts, 15 % of them" in turn.stats.approx
