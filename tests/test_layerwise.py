"""Prompts read layer by layer: chunk by chunk in another order, in passes between which anything may happen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import Engine, iterate_events, run, run_to_end
from kvcli.engine.forward import ForwardPass
from kvcli.engine.forward_request import ForwardRequest, ForwardResult, Rows
from kvcli.engine.hf.layer_gates import Gate
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels
from kvcli.engine.prefill.layer_by_layer import LayerByLayer
from kvcli.engine.prefill.layerwise import ActiveRows, LayerwisePrefill
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession, commit
from kvcli.kernels.attend.reference import attend
from kvcli.kv.slots import AttentionParams, KVCache, LayerShape, Window, layer_groups, windows_of
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.dense_layer import DenseLayer
from kvcli.methods.prune.lazy import LazyLLM
from tests import families, make

torch.set_num_threads(1)
N = 45
LAZY = LazyLLM(start_prune_layer=0.4, end_prune_layer=0.7, num_prune=2, recent=3, sinks=1, min_prompt=8)


@cache
def lm(name: str) -> LM:
    return make.model(name, torch.float64)


def store(model: LM, n: int) -> Dense:
    """A KV cache of n tokens."""
    kv, rows = make.dense(model), Rows.chain(families.prompt(n, seed=7), 0)
    if n:
        commit(kv, rows, *run([ForwardRequest(model, rows, kv)]), range(n))
    return kv


def session(model: LM, chunk: int = 16, by_layers: bool = True, **more: Any) -> GenerationSession:
    windows = {at: Window(of.size, back=1) for at, of in windows_of(model.shapes, model.attention_params).items()}
    kv = make.dense(model, windows=windows, step=8)
    return make.session(model, kv, chunk=chunk, by_layers=by_layers, **more)


def held(kv: KVCache, n_layers: int) -> list[Any]:
    """Copies of keys, values and positions."""
    return [t.clone() for layer in range(n_layers) for t in (kv.slots(layer).k, kv.slots(layer).v, kv.slots(layer).pos)]


def are_equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def said(s: GenerationSession, ids: list[int], n: int = 12) -> list[int]:
    s.start_answer(ids, Sampler())
    return finished(s, ids, n)


def finished(s: GenerationSession, ids: list[int], n: int = 12) -> list[int]:
    """From wherever it is."""
    while run_to_end(s.prefill_chunk(ids)):
        pass
    list(iterate_events(s.stream(n)))
    return s.ids[len(ids) :]


# ---- the same numbers ----


def by_layers(model: LM, rows: Rows, kv: KVCache, part: int, hear: Sequence[int] = ()) -> LayerwisePrefill:
    """Rows read so to their end."""
    prompt = LayerwisePrefill(model, kv, rows, part, hear)
    while not prompt.is_over:
        run_to_end(prompt.step())
    return prompt


@pytest.mark.parametrize("past", [0, 20])
@pytest.mark.parametrize("part", [1, 7, 44, 100])
@pytest.mark.parametrize("name", families.GATED)
def test_layer_by_layer_is_chunk_by_chunk(name: str, part: int, past: int) -> None:
    """To the bit, whatever kernels do with rows of a pass: the passes are the same."""
    model, ids = lm(name), families.prompt(N)
    chunks, layers = store(model, past), store(model, past)
    rows, hear, heard = Rows.chain(ids, past), [3, 40], list[Sequence[torch.Tensor]]()
    for a in range(0, N, part):
        one = rows.only(range(a, min(a + part, N)))
        (made,) = run(
            [
                ForwardRequest(
                    model, one, chunks, record_queries=[row - a for row in hear if a <= row < a + part], is_prompt=True
                )
            ]
        )
        commit(chunks, one, made, range(one.n_rows))
        heard += [made.queries] if made.queries else []
    prompt = by_layers(model, rows, layers, part, hear)
    assert prompt.n_done == N
    for layer in range(model.n_layers):
        a, b = chunks.slots(layer), layers.slots(layer)
        assert torch.equal(a.pos, b.pos)
        assert torch.equal(a.k, b.k)
        assert torch.equal(a.v, b.v)
        assert torch.equal(torch.cat([queries[layer] for queries in heard], 1), prompt.queries[layer])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_way_straight_through_the_layers_goes_from_one_to_the_next(name: str) -> None:
    model = make.model(name, torch.bfloat16)
    install_kernels(model)
    assert model.is_row_invariant
    whole, parts, rows = store(model, 0), store(model, 0), Rows.chain(families.prompt(N), 0)
    commit(whole, rows, *run([ForwardRequest(model, rows, whole)]), range(N))
    by_layers(model, rows, parts, 16)
    assert (model.direct_forward is not None) == (name != "gemma3")  # which scales its embeddings
    assert any(isinstance(part.forward, Gate) for part in model.model.modules()) == (model.direct_forward is None)
    for layer in range(model.n_layers):
        assert torch.equal(whole.slots(layer).k, parts.slots(layer).k)
        assert torch.equal(whole.slots(layer).v, parts.slots(layer).v)


def test_layers_that_share_slots_go_together() -> None:
    one = LayerShape(2, 8, 8)
    shared = [one, one, LayerShape(2, 8, 8, shared_from=1), one, LayerShape(2, 8, 8, shared_from=1), one]
    assert layer_groups([one] * 3) == [range(0, 1), range(1, 2), range(2, 3)]
    assert layer_groups(shared) == [range(0, 1), range(1, 5), range(5, 6)]


H = 4  # query heads
SHARING = (LayerShape(2, 8, 8), LayerShape(1, 16, 4), LayerShape(1, 16, 4, shared_from=1), LayerShape(2, 5, 5))


def test_layers_that_share_slots_are_passed_together_and_see_no_later_part() -> None:
    """Three parts against one attention over all that each row sees."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    n, kv = 13, Dense(SHARING, torch.float64)
    q = [random(H, n, s.k_dim) for s in SHARING]
    k, v = [random(s.n_kv_heads, n, s.k_dim) for s in SHARING], [random(s.n_kv_heads, n, s.v_dim) for s in SHARING]
    own = [layer for layer, of in enumerate(SHARING) if of.shared_from is None]
    model: Any = SimpleNamespace(
        shapes=SHARING,
        n_layers=len(SHARING),
        storing=own,
        sliding=(),
        latents={},
        dtype=torch.float64,
        is_row_invariant=True,
    )
    prompt, outs = LayerwisePrefill(model, kv, Rows.chain([0] * n, 0), 5), list[list[torch.Tensor]]([] for _ in SHARING)
    while not prompt.is_over:
        asks = prompt.step()
        feed = next(asks)
        assert feed.layers in (range(0, 1), range(1, 3), range(3, 4))
        one, at = ForwardPass(feed), list(feed.rows.pos)
        for layer in feed.layers:
            outs[layer].append(
                one.attend(layer, q[layer][:, at], k[layer][:, at], v[layer][:, at], AttentionParams(0.3), None)
            )
        with pytest.raises(StopIteration):
            asks.send(ForwardResult(None, None, None, one.fresh, (), random(len(at), 3)))  # type: ignore[arg-type]
    sees = torch.ones(n, n, dtype=torch.bool).tril()
    for layer, shape in enumerate(SHARING):
        source = layer if shape.shared_from is None else shape.shared_from
        out, _ = attend(q[layer], k[source], v[source], 0.3, 0.0, sees, n)
        torch.testing.assert_close(torch.cat(outs[layer], 1), out)


# ---- between passes ----


@pytest.mark.parametrize(("chunk", "parts"), [(16, 3), (45, 1), (1, 44)])
def test_each_part_of_each_layer_is_a_step_forward(chunk: int, parts: int) -> None:
    model = lm("llama")
    s = session(model, chunk)
    seen = list(iterate_events(s.read(families.prompt(N))))
    assert len(seen) == model.n_layers * parts
    assert seen == sorted(seen)
    assert seen[-1] == s.committed == N - 1
    assert seen[parts - 1] == (N - 1) // model.n_layers  # when the first layer is through
    assert len(set(seen)) >= min(len(seen), N // 2)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("pruning", [None, LAZY], ids=["whole", "pruned"])
@pytest.mark.parametrize("after", [1, 4, 7])
def test_what_is_interrupted_did_not_happen(name: str, pruning: LazyLLM | None, after: int) -> None:
    """The text ends where it did before, and goes on from there; what a window had given back is read again."""
    model, first = lm(name), families.prompt(30, seed=4)
    one, other = session(model, 7), session(model, 7)
    for s in (one, other):
        said(s, first, 5)
        if pruning is not None:  # of what comes now
            pruner = pruning.companion(ModelPair(model, model))
            s.companions = [pruner if type(one) is LayerByLayer else one for one in s.companions]
    before, committed, text = held(one.cache, model.n_layers), one.committed, list(one.ids)
    turn = [*text, *families.prompt(N, seed=5)]
    one.start_answer(turn, Sampler())
    for _ in range(after):
        assert run_to_end(one.prefill_chunk(turn))
    assert one.committed == committed < one.progress
    whole = one.fork()
    kept = one.rewind(len(text))
    assert (kept, one.progress) == ((committed, committed) if kept else (0, 0))
    if kept:
        assert are_equal(held(one.cache, model.n_layers), before)
    assert kept or name == "gemma3"
    want = said(other, turn)
    assert finished(whole, turn) == want, "who was not interrupted"
    if kept or pruning is None:  # what is pruned now is otherwise the whole text
        assert said(one, turn) == want


def test_a_pass_that_breaks_ends_what_was_under_way() -> None:
    model = lm("llama")
    s, ids, calls = session(model, 7), families.prompt(N), 0
    whole = s.cache.attend

    def attend(*args: Any) -> Any:
        nonlocal calls
        if (calls := calls + 1) == 9:
            raise MemoryError
        return whole(*args)

    s.cache.attend = attend  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        run_to_end(s.read(ids))
    assert (s.committed, s.progress, s.ids) == (0, 0, [])
    assert not any(s.cache.n_slots(layer) for layer in range(model.n_layers))
    assert said(s, ids) == said(session(model, 7, by_layers=False), ids)


def test_others_write_meanwhile() -> None:
    model, ids = lm("llama"), families.prompt(N)
    reader, writer = session(model, 7), session(model)

    def work(s: GenerationSession, ids: list[int], new: int) -> Iterator[Any]:
        yield from s.read(ids)
        yield from s.stream(new)

    engine = Engine()
    short = families.prompt(5, seed=5)
    engine.add(work(writer, short, 30))
    for _ in range(2 * model.n_layers):
        engine.step()
    at = len(writer.ids)
    engine.add(work(reader, ids, 10))
    while reader.committed < N - 1:
        assert engine.step()
    assert len(writer.ids) - at >= model.n_layers * 7  # a token for each part of each layer
    while engine.step():
        pass
    assert reader.ids[N:] == said(session(model, 7, by_layers=False), ids, 10)
    assert writer.ids[5:] == said(session(model, by_layers=False), short, 30)


def test_two_prompts_side_by_side_are_read_as_alone() -> None:
    model = lm("gemma3")
    texts, engine = [families.prompt(N, seed=seed) for seed in (1, 2, 3)], Engine()
    of = [session(model, 7), session(model, 7, pruning=LAZY), session(model, 9)]
    for s, ids in zip(of, texts, strict=True):
        engine.add(s.read(ids))
    while engine.step():
        pass
    alone = [session(model, 7), session(model, 7, pruning=LAZY), session(model, 9)]
    for s, other, ids in zip(of, alone, texts, strict=True):
        run_to_end(other.read(ids))
        for a, b in zip(held(s.cache, 3), held(other.cache, 3), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 2])
def test_what_waits_between_layers_is_one_copy(cut: int) -> None:
    """And a part, in any layer, whoever goes on."""
    model, part, n = lm("llama"), 7, 100
    width = model.model.config.hidden_size * model.dtype.itemsize
    most = list[int]()

    def pruner(layer: int, live: ActiveRows) -> Sequence[int] | None:
        return list(live.rows)[: 3 * len(live.rows) // 4] if layer >= cut else None

    prompt = LayerwisePrefill(model, store(model, 0), Rows.chain(families.prompt(n), 0), part, pruner=pruner)
    for _ in iter(lambda: prompt.is_over, True):
        run_to_end(prompt.step())
        parts = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*prompt._inputs, *prompt._outputs)}
        most.append(sum(t.nbytes() for t in parts.values()))
    assert n * width <= max(most) <= (n + 2 * part) * width


@pytest.mark.parametrize("pruning", [None, LAZY], ids=["whole", "pruned"])
def test_a_layer_makes_room_once(pruning: LazyLLM | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lays, lay = list[int](), DenseLayer._lay
    monkeypatch.setattr(DenseLayer, "_lay", lambda self, to: (lays.append(to.total), lay(self, to))[1])
    model = lm("llama")
    s = session(model, 7, pruning=pruning)
    run_to_end(s.read(families.prompt(100)))
    assert len(lays) == model.n_layers
    assert s.cache.slots(0).k.shape[1] == 99


def test_a_text_can_be_copied_and_handed_over_while_it_is_read() -> None:
    model, ids = lm("llama"), families.prompt(N)
    s = session(model, 7)
    s.start_answer(ids, Sampler())
    for _ in range(9):
        run_to_end(s.prefill_chunk(ids))
    fork, other = s.fork(), session(model, 7)
    other.take_over(s)
    assert (other.committed, s.committed) == (0, 0)
    assert finished(fork, ids) == said(other, ids) == said(session(model, 7, by_layers=False), ids)
