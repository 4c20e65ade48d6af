"""Tokens that stayed behind come back (LazyLLM's Aux Cache): each once, each seeing what is older, drafts or not."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

from kvcli.engine.drafting.drafter import Drafter
from kvcli.engine.engine import generate_together, iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows, run_until_cancelled
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession, commit
from kvcli.kv.slots import Slots, Window
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.views.borrowing import PositionMaskedCache
from kvcli.methods.prune.aux_cache import AuxCache
from kvcli.methods.prune.chunked import Chunked
from kvcli.methods.prune.lazy import LazyLLM
from tests import drafters, families, make
from tests.covering import covering, marked
from tests.test_prune import breaking

torch.set_num_threads(1)
N, LAYERS = 45, 8
DEFAULT = {f: getattr(LazyLLM(), f) for f in ("revive_interval", "revive_max", "revive_min_mass", "idle_complete")}


@cache
def lm(name: str = "llama", dtype: torch.dtype = torch.float64) -> LM:
    more: dict[str, Any] = {"num_hidden_layers": LAYERS}
    if name == "gemma3":
        more["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    model = make.model(name, dtype, **more)
    if dtype == torch.bfloat16:
        install_kernels(model)
    return model


def lazy(**changes: Any) -> LazyLLM:
    """Hard enough that much stays behind, and comes back."""
    cuts = {"start_prune_layer": 0.2, "end_prune_layer": 0.5, "num_prune": 3, "recent": 3, "sinks": 1, "min_prompt": 8}
    keep = {"start_keep_ratio": 0.5, "end_keep_ratio": 0.2}
    back = {"scope": "prefill+decode", "revive_interval": 4, "revive_max": 4, "revive_min_mass": 0.0}
    return LazyLLM(**{**cuts, **keep, **back, **changes})


class Once(Dense):
    """Counts who is stored where, and refuses what is there already."""

    def __init__(self, model: LM) -> None:
        """Windows give back what they hide, as soon as they can."""
        sizes = {i: w for i, w in enumerate(model.windows) if w is not None}
        super().__init__(model.shapes, model.dtype, step=1, windows={i: Window(w, back=1) for i, w in sizes.items()})
        self.stored = [Counter[int]() for _ in range(model.n_layers)]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        for p in range(start, start + k.shape[1]):
            self.stored[layer][p] += 1
            assert self.stored[layer][p] == 1, f"token {p} was in layer {layer} before"
        super().append(layer, k, v, start)

    def take(self, layer: int, slots: Slots) -> None:
        """As they are stored with gaps."""
        self.stored[layer].update(slots.pos[0].tolist())
        assert max(self.stored[layer].values()) == 1
        super().take(layer, slots)


def session(model: LM, pruning: LazyLLM | None, drafter: Drafter | None = None, chunk: int = 16) -> GenerationSession:
    return make.session(model, Once(model), drafter, chunk=chunk, pruning=pruning)


def read(s: GenerationSession, ids: list[int], sampler: Sampler | None = None) -> GenerationSession:
    s.start_answer(ids, sampler or Sampler())
    while run_to_end(s.prefill_chunk(ids)):
        pass
    return s


def aux(s: GenerationSession) -> AuxCache:
    found = s.find(AuxCache)
    assert found is not None
    return found


def agrees(s: GenerationSession) -> None:
    """The invariants: a prefix of the layers, and a vector for each that has not got to the last."""
    depth = aux(s).depth
    for layer in range(s.lm.n_layers):
        held = sorted(s.cache.slots(layer).pos[0].tolist())
        assert held == [p for p in range(s.committed) if layer < depth.get(p, s.lm.n_layers)]
    for p, layer in depth.items():
        assert 0 < layer < s.lm.n_layers
        assert aux(s).hidden(layer, [p]).shape == (1, s.lm.model.config.hidden_size)


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(n, marks=pytest.mark.slow) for n in range(60, 200))])
def test_a_token_has_a_prefix_of_the_layers_and_each_once(seed: int) -> None:
    """Schedules, caps, chunks, turns and completions by lot."""
    dice = Random(seed)
    first, last = sorted(dice.uniform(0.05, 0.6) for _ in range(2))
    low, high = sorted(dice.uniform(0.05, 1.0) for _ in range(2))
    kind = dice.choice([lazy, lazy, lambda **more: Chunked(**{f: getattr(lazy(**more), f) for f in vars(lazy())})])
    pruning = kind(
        start_prune_layer=first,
        end_prune_layer=last,
        num_prune=dice.randint(1, 4),
        start_keep_ratio=high,
        end_keep_ratio=low,
        ratio_of=dice.choice(["prompt", "current"]),
        mass=dice.choice([0.0, 0.5]),
        revive_max=dice.choice([0, 1, 5, 99]),
        revive_min_mass=dice.choice([0.0, 0.02, 0.2]),
        revive_interval=dice.randint(1, 5),
        idle_complete=dice.random() < 0.3,
    )
    s = session(lm(), pruning, chunk=dice.choice([7, 16, 99]))
    ids = families.prompt(dice.randint(10, N), seed=seed)
    for turn in range(3):
        read(s, ids)
        agrees(s)
        for _ in range(dice.randint(1, 9)):
            run_to_end(s.step())
            agrees(s)
        ids = [*s.ids, *families.prompt(dice.randint(2, 20), seed=seed + 1000 * turn)]
    run_to_end(aux(s).revive_all(s.cache, s.ids))
    agrees(s)
    assert not aux(s)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_together_or_one_by_one_they_become_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for at_once in (1, 5, 256):
        monkeypatch.setattr("kvcli.methods.prune.aux_cache.AT_ONCE", at_once)
        s = read(session(lm(name), lazy()), families.prompt(N + 1))
        assert len(aux(s)) > 5
        run_to_end(aux(s).revive_all(s.cache, s.ids))
        found.append([sorted_by_position(s, layer) for layer in range(LAYERS)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def sorted_by_position(s: GenerationSession, layer: int) -> torch.Tensor:
    slots = s.cache.slots(layer)
    assert slots.pos[0].sort().values.tolist() == list(range(s.committed))
    return slots.v[:, slots.pos[0].argsort()]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_pass_in_which_nobody_comes_back_is_a_plain_one(name: str) -> None:
    ids = families.prompt(N)
    steps = []
    for pruning in (lazy(revive_max=0, revive_interval=1), lazy(scope="prefill", **DEFAULT)):
        s = read(session(lm(name), pruning), ids)
        steps.append([run_to_end(s.step()) for _ in range(6)])
    for a, b in zip(*steps, strict=True):
        assert a.new == b.new
        torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_with_all_kept_nothing_changes(name: str) -> None:
    ids, found = families.prompt(N), []
    for pruning in (lazy(start_keep_ratio=1.0, end_keep_ratio=1.0), None):
        s = read(session(lm(name), pruning), ids)
        list(iterate_events(s.stream(20)))
        found.append(read(s, [*s.ids, *families.prompt(30, seed=4)]))
        list(iterate_events(s.stream(20)))
    assert found[0].ids == found[1].ids


def test_who_is_looked_at_changes_the_answer() -> None:
    """Or the tests above would compare passes in which it does not matter."""
    ids = families.prompt(N)
    some, none = (read(session(lm(), lazy(revive_interval=1, revive_max=n)), ids) for n in (8, 0))
    a, b = ([run_to_end(s.step()).logits for _ in range(2)][1] for s in (some, none))  # they came back after the first
    assert (a - b).abs().max() > 1e-3
    assert len(aux(some)) < len(aux(none))


def test_the_caps_hold() -> None:
    ids = families.prompt(N)
    for n in (1, 3):
        s, most = read(session(lm(), lazy(revive_interval=1, revive_max=n)), ids), 0
        for _ in range(8):
            before = [s.cache.n_slots(layer) for layer in range(LAYERS)]
            run_to_end(s.step())
            grown = [s.cache.n_slots(layer) - was for layer, was in enumerate(before)]
            assert max(grown) <= n + 1
            most = max(most, *grown)
        assert most == n + 1, "as many come back as may"
    s = read(session(lm(), lazy(revive_interval=1, revive_min_mass=1.0)), ids)
    n_behind = len(aux(s))
    run_to_end(s.step())
    assert len(aux(s)) == n_behind


def test_the_next_prompt_finds_all_of_them_or_those_that_came_back() -> None:
    ids = families.prompt(N)
    for completes in (True, False):
        s = read(session(lm(), lazy(idle_complete=completes, min_prompt=30)), ids)
        list(iterate_events(s.stream(5)))
        read(s, [*s.ids, *families.prompt(9, seed=8)])
        assert bool(aux(s)) is not completes
        agrees(s)


def test_while_nobody_asks_they_go_on_until_somebody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """And end as if nobody had come between."""
    monkeypatch.setattr("kvcli.methods.prune.aux_cache.AT_ONCE", 5)
    left, found = [], []
    for n_passes in (0, 3, 10_000):
        s = read(session(lm(), lazy()), families.prompt(N))
        told = iter(range(n_passes))
        run_to_end(run_until_cancelled(s.complete(), lambda told=told: next(told, None) is None))  # type: ignore[misc]
        agrees(s)
        left.append(len(aux(s)))
        run_to_end(s.complete())
        found.append(torch.stack([sorted_by_position(s, layer) for layer in range(LAYERS)]))
    assert left[0] > left[1] > left[2] == 0
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_windows_keep_what_those_who_come_back_will_see() -> None:
    """They stand in the middle of the prompt, and their windows open before them, long after its end was read."""
    model, ids = lm("gemma3"), families.prompt(200)  # windows give back whole blocks of 64
    how = lazy(revive_interval=1, revive_max=8)
    whole = make.session(model, chunk=16, pruning=how)
    short = session(model, how)
    said = []
    for s in (whole, short):
        read(s, ids)
        said.append(torch.stack([run_to_end(s.step()).logits[0] for _ in range(6)]))
        assert aux(s)
    torch.testing.assert_close(said[1], said[0], rtol=0, atol=1e-9)


def test_a_pass_that_breaks_ends_in_a_text_that_is_read_anew() -> None:
    """What came back lies among the rest: a store that has it in some layers alone cannot be mended."""
    ids = families.prompt(N)
    s = read(session(lm(), lazy(revive_interval=1)), ids)
    with breaking(s.cache, LAYERS + 2), pytest.raises(MemoryError):
        run_to_end(s.step())
    assert s.rewind(len(s.ids)) == 0
    assert not aux(s)
    assert not any(s.cache.n_slots(layer) for layer in range(LAYERS))


def test_a_text_takes_along_who_waits_behind() -> None:
    ids, model = families.prompt(N), lm()
    s, other = read(session(model, lazy()), ids), session(model, lazy())
    other.take_over(s.fork())
    assert aux(other).depth == aux(s).depth
    for each in (s, other):
        list(iterate_events(each.stream(20)))
    assert s.ids == other.ids


def test_beside_other_texts_they_come_back_as_alone() -> None:
    ids, alone = families.prompt(N), read(session(lm(), lazy()), families.prompt(N))
    list(iterate_events(alone.stream(20)))
    run_to_end(aux(alone).revive_all(alone.cache, alone.ids))
    many = [session(lm(), lazy()), session(lm(), None), session(lm(), lazy(revive_interval=3))]

    def work(s: GenerationSession, ids: list[int]):  # type: ignore[no-untyped-def]
        yield from s.read(ids)
        yield from s.stream(20)
        yield from aux(s).revive_all(s.cache, s.ids)

    generate_together(*(work(s, text) for s, text in zip(many, [ids, families.prompt(12, seed=5), ids], strict=True)))
    assert many[0].ids == alone.ids
    for layer in range(LAYERS):
        torch.testing.assert_close(many[0].cache.slots(layer).k, alone.cache.slots(layer).k, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_row_of_any_age_sees_what_is_older(name: str) -> None:
    """Read in another order than they stand in the text, tokens give what they give in order."""
    model, ids = lm(name) if name != "gpt_oss" else make.model(name, torch.float64), families.prompt(30)
    whole, gap, rows = make.dense(model), make.dense(model), Rows.chain(ids, 0)
    (made,) = run([ForwardRequest(model, rows, whole)])
    commit(whole, rows, made, range(30))
    commit(gap, rows, made, [*range(20, 30), *range(10)])
    (again,) = run([ForwardRequest(model, Rows.chain(ids[10:20], 10), PositionMaskedCache(gap))])  # type: ignore[arg-type]
    for layer in range(model.n_layers):
        torch.testing.assert_close(again.fresh[layer].k, whole.slots(layer).k[:, 10:20], rtol=0, atol=1e-12)
        torch.testing.assert_close(again.fresh[layer].v, whole.slots(layer).v[:, 10:20], rtol=0, atol=1e-12)


SAMPLERS = {
    "greedy": Sampler(),
    "sampled": Sampler(temperature=0.9, top_k=40, top_p=0.95, seed=3),
    "penalty": Sampler(temperature=0.7, repetition_penalty=1.3, seed=11),
}


@cache
def plain(dtype: torch.dtype, every: int, sampler: str) -> GenerationSession:
    s = read(session(lm(dtype=dtype), lazy(revive_interval=every)), families.prompt(N), SAMPLERS[sampler])
    begun = len(aux(s))
    list(iterate_events(s.stream(40)))
    assert len(aux(s)) < begun, "somebody came back"
    return s


# any three columns meet, but in float64, which the slow form adds
DRAFTED = [*product((torch.float64, torch.float32, torch.bfloat16), (2, 4, 16), SAMPLERS, drafters.ADVERSARIES)]
SHORT = covering([row for row in DRAFTED if row[0] != torch.float64])


@pytest.mark.parametrize(
    ("dtype", "every", "sampler", "drafter"),
    marked(DRAFTED, SHORT),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_drafts_change_nothing(dtype: torch.dtype, every: int, sampler: str, drafter: type) -> None:
    """Of the text, of who waits behind, or a bit of what is stored."""
    alone = plain(dtype, every, sampler)
    guesses = drafter(alone.ids, 97, 96)
    s = read(session(lm(dtype=dtype), lazy(revive_interval=every), guesses), families.prompt(N), SAMPLERS[sampler])
    list(iterate_events(s.stream(40)))
    assert s.ids == alone.ids
    assert aux(s).depth == aux(alone).depth
    if drafter is drafters.Right and every > 2:
        assert sum(step.n_accepted for step in guesses.steps) > 10
    for layer in range(LAYERS):
        a, b = alone.cache.slots(layer), s.cache.slots(layer)
        assert torch.equal(a.pos, b.pos)
        if dtype == torch.bfloat16:
            assert torch.equal(a.k, b.k)
            assert torch.equal(a.v, b.v)
        else:  # whose kernels know how many rows a pass has
            torch.testing.assert_close(a.k, b.k, rtol=0, atol=1e-3 if dtype == torch.float32 else 1e-10)
