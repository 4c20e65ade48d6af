"""Whatever a drafter drafts from, the text is that of plain decoding: sources, views, windows, ends, caps, garbage.

`exact/test_table.py` crosses storages, policies and samplers; here the drafters' own settings are crossed.
"""

from __future__ import annotations

from functools import cache
from itertools import chain, combinations
from typing import Any

import pytest
import torch

from kvcli.assemble import compact_view
from kvcli.drafts.tree.tree_drafter import TreeDrafter
from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import Draft, ForwardRequest, LookaheadRows, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.policy.policy import PerLayerPolicy
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import Step
from kvcli.methods.drafts.lookahead import Lookahead
from kvcli.methods.drafts.mix import Mix
from kvcli.methods.drafts.off import Off
from tests import families, make
from tests.policies import Ragged

GREEDY, SAMPLED = Sampler(), Sampler(temperature=0.9, top_k=40, seed=3)
PENALTY = Sampler(temperature=0.7, repetition_penalty=1.3, seed=11)
SOURCES = ("prompt-lookup", "lookahead", "token-recycling", "stand")
MIXES = list(chain.from_iterable(combinations(SOURCES, n) for n in range(1, 5)))
NEW = 48


@cache
def lm(dtype: torch.dtype = torch.float64) -> LM:
    return make.model("llama", dtype)


def prompt() -> list[int]:
    phrase = families.prompt(9)
    return families.prompt(17, seed=2) + phrase + families.prompt(5, seed=3) + phrase[:6]


def decode(drafter: Any, sampler: Sampler = GREEDY, new: int = NEW, stop: frozenset[int] = frozenset(), **more: Any):
    model = lm()
    session = make.session(model, drafter=drafter, sampler=sampler, chunk=13, **more)
    run_to_end(session.read(prompt()))
    steps = list(iterate_events(session.stream(new, stop)))
    return session.ids, steps


@cache
def plain(sampler: Sampler = GREEDY, new: int = NEW, stop: frozenset[int] = frozenset()) -> list[int]:
    return decode(Off(), sampler, new, stop)[0]


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED, PENALTY], ids=["greedy", "sampled", "penalty"])
@pytest.mark.parametrize("sources", MIXES, ids="+".join)
def test_every_mix_of_sources(sources: tuple[str, ...], sampler: Sampler) -> None:
    assert decode(Mix(adaptive=False, sources=sources).drafter(), sampler)[0] == plain(sampler)


VIEWS = [
    {"view": "stream", "sinks": 0, "recent": 1, "refresh": 1},
    {"view": "stream", "sinks": 4, "recent": 1, "refresh": 2},
    {"view": "stream", "sinks": 2, "recent": 9, "refresh": 5},  # wraps several times in the answer
    {"view": "stream", "sinks": 0, "recent": 4096, "refresh": 4096},  # all of it
    {"view": "quest", "page": 1, "pages": 1, "sinks": 0, "recent": 1, "refresh": 1},
    {"view": "quest", "page": 4, "pages": 2, "sinks": 2, "recent": 3, "refresh": 3},
    {"view": "quest", "page": 64, "pages": 64, "sinks": 0, "recent": 8, "refresh": 7},
]


@pytest.mark.parametrize("settings", VIEWS, ids=str)
def test_every_view(settings: dict[str, Any]) -> None:
    for sampler in (GREEDY, SAMPLED):
        assert decode(Lookahead(adaptive=False, **settings).drafter(), sampler)[0] == plain(sampler)


@pytest.mark.parametrize("window", [1, 2, 7])
@pytest.mark.parametrize("ngram", [3, 5, 9])
def test_every_size_of_window(window: int, ngram: int) -> None:
    config = Lookahead(adaptive=False, window=window, ngram=ngram, view="stream", sinks=2, recent=9)
    ids, steps = decode(config.drafter())
    assert ids == plain()
    assert max(step.rows.n_rows - step.rows.tree for step in steps) == window * (ngram - 1) - 1


def test_a_view_that_shows_nothing() -> None:
    class Blind(PerLayerPolicy):
        def mask(self, s, at):
            return torch.zeros_like(s.pos, dtype=torch.bool)

    model = lm()
    kv = make.dense(model)
    blind = compact_view(model, kv, Blind(), 4)
    session = make.session(model, kv, Lookahead(adaptive=False).drafter(), view=blind, chunk=13)
    run_to_end(session.read(prompt()))
    list(iterate_events(session.stream(NEW)))
    assert session.ids == plain()


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_end_inside_a_draft(sampler: Sampler) -> None:
    """Every token of the answer in turn is what ends it."""
    inside = 0
    for token in dict.fromkeys(plain(sampler)[len(prompt()) :]):
        stop = frozenset({token})
        for config in (Mix(adaptive=False, view="stream", sinks=1, recent=8), Lookahead(adaptive=False)):
            ids, steps = decode(config.drafter(stop), sampler, stop=stop)
            assert ids == plain(sampler, NEW, stop)
            inside += steps[-1].n_accepted > 0
    assert inside or sampler.temperature  # a drafted token did end a text


def test_a_cap_inside_a_draft() -> None:
    capped = 0
    for new in range(1, 20):
        ids, steps = decode(Mix(adaptive=False).drafter(), new=new)
        assert ids == plain(new=new)
        assert len(ids) == len(prompt()) + new
        capped += steps[-1].n_accepted > 0
    assert capped


@pytest.mark.parametrize("every", [1, 2, 5, 16])
def test_no_draft_crosses_a_compression_point(every: int) -> None:
    want = decode(Off(), policy=Ragged(), every=every)[0]
    got, steps = decode(Mix(adaptive=False, view="stream", sinks=1, recent=8).drafter(), policy=Ragged(), every=every)
    assert got == want
    if every == 1:
        assert all(step.n_drafted == 0 for step in steps)


def test_garbage_in_the_pool_changes_the_speed_only() -> None:
    def poisoned(right: bool) -> TreeDrafter:
        drafter = Lookahead(adaptive=False, key_max=1).drafter()
        assert drafter._pool is not None
        for a, *after in zip(*(plain()[i:] for i in range(5)), strict=False):
            drafter._pool.put([a], after if right else [(t + 1) % 97 for t in after])
        return drafter

    good, with_truth = decode(poisoned(right=True))
    bad, with_garbage = decode(poisoned(right=False))
    assert good == bad == plain()
    assert len(with_truth) < len(with_garbage)


@pytest.mark.parametrize(
    "shown", [{"view": "stream", "sinks": 2, "recent": 9}, {"view": "quest", "page": 3, "pages": 2}]
)
@pytest.mark.parametrize("policy", [None, Ragged()], ids=["whole", "ragged"])
def test_what_a_row_must_not_see_is_poisoned(shown: dict[str, Any], policy: Any) -> None:
    """Huge keys and values in all spare room of the store and of the view, before each step: FAFO's released code,
    which lets rows attend ten empty slots, would not survive it."""
    model = lm()
    kv = make.dense(model)
    drafter = Lookahead(adaptive=False, refresh=4, **shown).drafter()
    kept: dict[str, Any] = {"policy": policy, "every": 16 if policy else None}
    session = make.session(model, kv, drafter, chunk=13, **kept)
    run_to_end(session.read(prompt()))
    want, poisoned = decode(Off(), **kept)[0], 0
    while len(session.ids) < len(want):
        with torch.inference_mode():
            for slab in [*kv._slabs.values(), *session.view._copy._slabs.values()]:
                slab.positions()  # which notes those that nobody asked for so far
                # spare room, and holes of heads that hold less
                empty = (slab.pos < 0).repeat(len(slab.k) // max(1, len(slab.pos)))
                slab.k[empty] = slab.v[empty] = 1e6
                poisoned += int(empty.sum())
        run_to_end(session.step(most=len(want) - len(session.ids)))
    assert session.ids == want
    assert poisoned


def test_tree_rows_see_neither_lookahead_rows_nor_other_branches() -> None:
    model = lm()
    kv = make.dense(model)
    session = make.session(model, kv, chunk=13)
    run_to_end(session.read(prompt()))
    sees = torch.ones(3, 3, dtype=torch.bool).tril()

    def logits(left: int, right: int, scouts: list[int]) -> torch.Tensor:
        draft = Draft([left, 8, right, 9], [-1, 0, -1, 2], LookaheadRows(scouts, [1, 2, 3], sees, []))
        rows = Rows.build(session.ids[-1], session.committed, draft)
        return run([ForwardRequest(model, rows, kv, want=rows.want)])[0].logits

    one, other = logits(5, 6, [1, 2, 3]), logits(5, 7, [50, 60, 70])
    torch.testing.assert_close(one[[0, 1, 2]], other[[0, 1, 2]], rtol=0, atol=1e-12)
    assert (one[[3, 4]] - other[[3, 4]]).abs().max() > 1e-6


class Chance:
    """Drafts of the same shape as another drafter's, and other tokens."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, ids: Any, room: int, past: object) -> Draft:
        draft = self.drafter.propose(ids, room, past)
        return Draft([(5 * token + 3) % 97 for token in draft.ids], draft.parent, draft.lookahead)


def accepted(steps: list[Step]) -> int:
    return sum(step.n_accepted for step in steps)


def test_drafts_come_true() -> None:
    """Or none of the above says anything."""
    for config in (
        Lookahead(adaptive=False),
        Lookahead(adaptive=False, view="stream", sinks=4, recent=24),
        Mix(adaptive=False),
    ):
        _, steps = decode(config.drafter(), new=200)
        _, chance = decode(Chance(config.drafter()), new=200)
        assert accepted(steps) > 5 + 2 * accepted(chance), config


@pytest.mark.parametrize("alone", [True, False])
def test_lookahead_rows_stay_behind_when_drafts_are_to_be_timed(alone: bool, monkeypatch) -> None:
    monkeypatch.setattr("kvcli.drafts.pacing.draft_controller.SourcePayoff.due", lambda *_: True)
    monkeypatch.setattr("kvcli.drafts.pacing.draft_controller.DraftController.wants_alone", lambda *_: alone)
    ids, steps = decode(Mix(min_speedup=0.0).drafter())
    assert ids == plain()
    assert any(step.rows.n_rows > step.rows.tree for step in steps) is not alone


def test_drafts_are_ranked_with_the_noise_that_tokens_are_drawn_with() -> None:
    """A drafter that is not told how tokens are drawn drafts the likeliest ones, and is right less often."""

    class Untold(TreeDrafter):
        def start(self, ids: Any, sampler: Any = None) -> None:
            super().start(ids)

    def accepted(kind: type[TreeDrafter], seed: int) -> int:
        sampler = Sampler(temperature=1.0, top_k=4, seed=seed)
        drafter = Mix(adaptive=False, sources=("stand",), branches=1).drafter()
        drafter.__class__ = kind
        ids, steps = decode(drafter, sampler, new=150)
        assert ids == plain(sampler, new=150)
        return sum(step.n_accepted for step in steps)

    seeds = range(6)
    assert sum(accepted(TreeDrafter, s) for s in seeds) > 1.3 * sum(accepted(Untold, s) for s in seeds)


@pytest.mark.parametrize("runs", [500, pytest.param(1500, marks=pytest.mark.slow)])
def test_the_text_of_a_seed_has_the_distribution_of_the_model(runs: int) -> None:
    """End to end: three tokens, many seeds, drafts on; chi-square against the exact joint law."""
    sampler, model = Sampler(temperature=1.0, top_k=3), lm(torch.float32)
    start = prompt()

    def session(drafter: Any, seed: int) -> GenerationSession:
        return make.session(model, drafter=drafter, sampler=Sampler(temperature=1.0, top_k=3, seed=seed), chunk=64)

    def law(text: list[int], depth: int) -> dict[tuple[int, ...], float]:
        if not depth:
            return {(): 1.0}
        plain = session(Off(), 0)
        run_to_end(plain.read(text))
        ids, logp = sampler.warp(run_to_end(plain.step()).logits[:1].float())
        return {
            (token, *rest): p * q
            for token, p in zip(ids[0].tolist(), logp[0].exp().tolist(), strict=True)
            for rest, q in law([*text, token], depth - 1).items()
        }

    want = law(start, 3)
    seen, accepted = dict.fromkeys(want, 0), 0
    base = session(Mix(adaptive=False, window=2, ngram=3).drafter(), 0)
    for seed in range(runs, runs + 30):  # the drafter hears what may follow, or it has nothing to draft
        base.resume(start)
        base.sampler = Sampler(temperature=1.0, top_k=3, seed=seed)
        run_to_end(base.read(start[len(base.ids) :]))
        list(iterate_events(base.stream(3)))
    base.resume(start)
    run_to_end(base.read(start[len(base.ids) :]))
    for seed in range(runs):
        one = base.fork()
        one.sampler = Sampler(temperature=1.0, top_k=3, seed=seed)
        one.drafter.start(one.ids, one.sampler)
        accepted += sum(step.n_accepted for step in iterate_events(one.stream(3)))
        seen[tuple(one.ids[len(start) :])] += 1
    assert accepted > runs // 10  # or it was plain decoding that was tested
    large = {text: p for text, p in want.items() if p * runs >= 5}
    expected = [*(p * runs for p in large.values()), (1 - sum(large.values())) * runs]
    observed = [*(seen[text] for text in large), runs - sum(seen[text] for text in large)]
    chi = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e > 1)
    cells = sum(e > 1 for e in expected)
    # the 99.9 % point of chi-square, by Wilson and Hilferty
    df = cells - 1
    assert chi < df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3
