"""A second model drafts: what it reads, stores and forgets, and what it does to the text, which is nothing."""

from __future__ import annotations

import math
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from kvcli.drafts import sibling
from kvcli.drafts.chain import Chain
from kvcli.drafts.model import Model
from kvcli.drafts.off import Off
from kvcli.drafts.sibling import Sibling
from kvcli.engine import engine
from kvcli.engine.drafter import Drafter, Pair
from kvcli.engine.engine import drive, events, together
from kvcli.engine.lm import LM
from kvcli.engine.sample import Sampler
from kvcli.engine.session import Session
from kvcli.engine.stats import Stats
from kvcli.errors import BadConfig
from kvcli.kv.dense import Dense
from kvcli.kv.slots import Slots
from tests import families

NEW = 48
SAMPLERS = {
    "greedy": Sampler(),
    "drawn": Sampler(temperature=0.9, top_k=24, top_p=0.95, min_p=0.01, seed=3),
    "penalty": Sampler(temperature=0.7, top_k=24, repetition_penalty=1.3, seed=11),
}


@cache
def lm(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> LM:
    return LM.of(families.build(family, dtype, **changes))


def drafter(draft: LM, **settings: Any) -> Drafter:
    return Model(**{"adaptive": False, "depth": 5, "copies": False, **settings}).drafter(pair=Pair(lm(), draft))


def opened(drafter: Drafter, sampler: Sampler = SAMPLERS["greedy"]) -> Session:
    return Session(lm(), Dense(lm().shapes, lm().dtype), drafter, sampler, chunk=13)


def text(drafter: Drafter, sampler: Sampler = SAMPLERS["greedy"], n: int = 60) -> tuple[list[int], Stats]:
    session, stats = opened(drafter, sampler), Stats()
    drive(session.read(families.prompt(n)))
    for step in events(session.stream(NEW)):
        stats.fold(step)
    return session.ids, stats


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("prefill", ["lazy", "full"])
def test_a_model_that_drafts_for_itself_is_always_right(prefill: str, sampler: str) -> None:
    got, stats = text(drafter(lm(), working=0, branches=1, prefill=prefill), SAMPLERS[sampler])
    assert got == text(Off(), SAMPLERS[sampler])[0]
    assert stats.accepted_tokens == stats.draft_tokens > 0
    assert stats.passes == math.ceil(NEW / 6)


@pytest.mark.parametrize("positions", ["original", "contiguous"])
def test_what_stays_of_a_text_that_is_short_enough_is_all_of_it(positions: str) -> None:
    """With as many working tokens as the text has, drafts are those of a cache that keeps everything."""
    wide = text(drafter(lm(), working=256, branches=1, positions=positions))[1]
    assert wide.accepted_tokens == wide.draft_tokens > 0


class Reader:
    """A sibling, and the text that it was told of."""

    def __init__(self, working: int, sinks: int, *, closes: bool, dtype: torch.dtype = torch.float64) -> None:
        self.lm = lm("llama", dtype)
        self.it = Sibling(self.lm, working, sinks, closes=closes)
        self.ids = families.prompt(70)
        self.it.start(self.ids)

    def slots(self, layer: int = 1) -> Slots:
        return self.it._kv.slots(layer)


@pytest.mark.parametrize("closes", [False, True])
def test_after_any_accepted_length_it_stores_what_a_fresh_reading_would(closes: bool) -> None:
    """A thousand rounds: guesses of any depth, of which any number come true."""
    random, at = Random(5), Reader(0, 0, closes=closes)
    drive(at.it.study(None))
    for n in range(1000):
        drive(at.it.read())
        guesses = [random.randrange(97) for _ in range(random.randrange(6))]
        for guess in guesses:
            drive(at.it.go_on(guess))
        right = random.randint(0, len(guesses))
        new = [*guesses[:right], random.randrange(97)]
        at.ids += new
        if len(at.ids) > 400:
            at.ids = at.ids[: random.randrange(40, 90)]
            at.it.start(at.ids)
        else:
            at.it.extend(new)
        assert at.it.missing >= 1
        if n % 50 == 0 or len(at.ids) < 90:
            fresh = Reader(0, 0, closes=closes)
            fresh.it.start([*at.ids, 0])
            drive(fresh.it.study(0))
            drive(at.it.read())
            s, want = at.slots(), fresh.slots()
            assert torch.equal(s.pos, want.pos)
            assert torch.allclose(s.k, want.k, atol=1e-12)
            assert torch.allclose(s.v, want.v, atol=1e-12)


@pytest.mark.parametrize("sees", [None, 0, 31])
def test_of_a_text_the_first_tokens_and_the_newest_stay(sees: int | None) -> None:
    at = Reader(23, 3, closes=False)
    drive(at.it.study(sees))
    assert at.slots().pos[0].tolist() == [0, 1, 2, *range(50 if sees is None else 49, 69)]  # room for the last one
    for n in range(40):
        drive(at.it.read())
        drive(at.it.go_on(n))
        held = at.slots().pos[0].tolist()
        assert held[:3] == [0, 1, 2]
        assert held[3:] == list(range(held[-1] - len(held) + 4, len(at.ids) + 1))
        assert 20 <= len(held) <= 24
        at.ids += [n, 5]
        at.it.extend([n, 5])


@pytest.mark.parametrize("sees", [None, 0, 31])
def test_closed_up_it_is_the_text_without_what_went(sees: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that were turned are those of a text in which the tokens between never stood; values know no positions."""
    at = Reader(23, 3, closes=True)
    drive(at.it.study(sees))
    s = at.slots(0)  # of the first layer, where a token's key depends on nothing before it
    stays = [*at.ids[:3], *at.ids[50 if sees is None else 49 : 69]]
    fresh = Reader(0, 0, closes=True)
    fresh.it.start([*stays, 0])
    drive(fresh.it.study(0))
    want = fresh.slots(0)
    assert torch.equal(s.pos, want.pos)
    assert torch.allclose(s.k, want.k, atol=1e-6)  # angles are taken in float32
    assert torch.allclose(s.v, want.v, atol=1e-12)
    monkeypatch.setattr(sibling, "CHUNK", 5)
    for n in range(300):  # five times as long as the model was made for, were positions those of the text
        drive(at.it.read())
        assert int(at.slots().pos.max()) < 23
        new = [n % 97] * (19 if n % 3 else 2)
        at.ids += new
        at.it.extend(new)
    assert at.it.room > 400


def test_positions_of_the_text_end_where_the_model_does() -> None:
    short = lm("llama", max_position_embeddings=80)
    got, stats = text(made := drafter(short, working=20))
    assert got == text(Off())[0]
    assert 0 < stats.drafted_passes < stats.passes
    assert (report := made.report()) is not None
    assert report.paused
    assert report.reason == "model, which drafts, was made for 80 tokens"
    closed = text(drafter(short, working=20, positions="contiguous"))[1]
    assert closed.drafted_passes >= closed.passes - 1
    session, stats = opened(drafter(short, working=20, positions="contiguous")), Stats()
    drive(session.read(families.prompt(200)))  # more than the model was made for, before anything was read
    for step in events(session.stream(NEW)):
        stats.fold(step)
    assert stats.drafted_passes >= stats.passes - 1
    with pytest.raises(BadConfig, match=r"spec.working = 100 is more than model"):
        drafter(short, working=100, positions="contiguous")


@pytest.mark.parametrize("working", [6, 20, 70, 0])
def test_a_look_is_at_no_more_than_stays(working: int) -> None:
    chain = Chain(Sibling(lm(), working, 4 if working else 0), depth=4, sees=None, vocab=97, share=0.1)
    chain.start(families.prompt(90))
    drive(chain._take_a_look(0.0))
    assert chain.sibling.missing == 0
    assert chain.mean != Chain(chain.sibling, depth=4, sees=None, vocab=97, share=0.1).mean


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", ["constant", "fewer words", "numbers that are none"])
def test_whatever_a_model_says_the_text_stays(kind: str, sampler: str) -> None:
    bad = families.build("gemma3", torch.float32, seed=4, vocab_size=64 if kind == "fewer words" else 97)
    with torch.no_grad():
        if kind == "constant":
            bad.lm_head.weight.zero_()
            bad.lm_head.weight[7] = 1.0
        elif kind != "fewer words":
            bad.model.norm.weight.fill_(math.nan)
    got, stats = text(drafter(LM.of(bad), working=20, prefill="window:26"), SAMPLERS[sampler])
    assert got == text(Off(), SAMPLERS[sampler])[0]
    assert stats.drafted_passes > 0 or kind == "numbers that are none"  # of what is no number a sampler chooses none


def test_a_model_that_runs_out_of_memory_says_so_and_leaves_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, n = drafter(lm("qwen2")), 0

    def attend(*args: Any, **more: Any) -> Any:
        nonlocal n
        n += 1
        if n > 50:
            raise MemoryError("no room")
        return held(*args, **more)

    store = made._chain.sibling._kv  # type: ignore[attr-defined]
    held = store.attend
    monkeypatch.setattr(store, "attend", attend)
    got, stats = text(made)
    assert got == text(Off())[0]
    assert 0 < stats.drafted_passes < stats.passes
    assert (report := made.report()) is not None
    assert report.reason == "no memory for model, which drafts"


def test_passes_of_texts_side_by_side_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, n = lm(), lm("qwen2"), dict.fromkeys(("target", "draft"), 0)
    ran = engine._run

    def counted(of: LM, feeds: Any) -> Any:
        n["target" if of is target else "draft"] += 1
        return ran(of, feeds)

    monkeypatch.setattr(engine, "_run", counted)

    def written() -> Any:
        session = opened(drafter(draft))
        yield from session.read(families.prompt(60))
        yield from session.stream(NEW)
        return session.ids

    alone = drive(written())
    before = dict(n)
    both = together(written(), written())
    assert [ticket.result() for ticket in both] == [alone, alone]
    assert n == {name: 2 * count for name, count in before.items()}
    assert before["draft"] > 2 * before["target"]


def test_a_copy_of_a_text_shares_the_weights_and_not_what_was_read() -> None:
    session = opened(drafter(lm("qwen2")))
    drive(session.read(families.prompt(60)))
    list(events(session.stream(9)))
    other = session.fork()
    mine, its = (s.drafter._chain.sibling for s in (session, other))  # type: ignore[attr-defined]
    assert its.lm is mine.lm
    assert its._kv is not mine._kv
    for of in (session, other):
        list(events(of.stream(9)))
    assert session.ids == other.ids


def test_it_needs_a_model() -> None:
    with pytest.raises(BadConfig, match="needs a model that drafts") as found:
        _ = Model().second
    assert found.value.try_[0] == "--draft MODEL"
    with pytest.raises(ValueError, match="leaves nothing"):
        Model(working=4)
    with pytest.raises(ValueError, match="reads no farther than working = 1024"):
        Model(prefill="window:512")
