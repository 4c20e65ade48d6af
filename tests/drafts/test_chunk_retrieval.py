"""A second model that keeps what the model that writes looks at: what is stored, which chunks, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli.drafts.draft_models.chunk_retrieval import (
    Adaptive,
    ChunkRetrievalModel,
    Query,
    Trigger,
    best,
    relevance,
    scored_layers,
    trigger,
)
from kvcli.drafts.draft_models.separate_model import SeparateDraftModel
from kvcli.engine.drafting.drafter import Drafter, ModelPair
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import Stats
from kvcli.kv.slots import Slots
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.drafts.model import SeparateModelDraft
from kvcli.methods.drafts.off import Off
from tests import families, make

NEW = 60


@cache
def lm(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> LM:
    return make.model(family, dtype, **changes)


def drafter(draft: LM | None = None, **settings: Any) -> Drafter:
    usual = {"adaptive": False, "depth": 4, "copies": False, "working": 40, "sinks": 3, "recent": 6, "chunk": 4}
    usual |= {"retrieval": "every:2"}
    return SeparateModelDraft(**{**usual, **settings}).drafter(pair=ModelPair(lm(), draft or lm()))


def opened(drafter: Drafter, kv: Any = None) -> GenerationSession:
    kv = kv or make.dense(lm())
    return make.session(lm(), kv, drafter, Sampler(temperature=0.9, top_k=24, seed=3), chunk=13)


def text(drafter: Drafter, n: int = 130) -> tuple[list[int], Stats]:
    session, stats = opened(drafter), Stats()
    run_to_end(session.read(families.prompt(n)))
    for step in iterate_events(session.stream(NEW)):
        stats.add_step(step)
    return session.ids, stats


def guesser(drafter: Drafter) -> ChunkRetrievalModel:
    found: ChunkRetrievalModel = drafter._chain.draft_model  # type: ignore[attr-defined]
    return found


class Told:
    """One that is told by hand what is looked at."""

    def __init__(self, *, sees: int | None = 0, closes: bool = False, far: bool = False, working: int = 40) -> None:
        self.lm = lm()
        attention_params = scored_layers(self.lm, 1)
        more: dict[str, Any] = {
            "size": 4,
            "recent": 6,
            "attention_params": attention_params,
            "trigger": partial(Trigger, 1),
            "is_far": far,
        }
        self.it = ChunkRetrievalModel(self.lm, working, 3, sees=sees, closes=closes, **more)
        self.ids = families.prompt(120)
        self.it.start(self.ids)

    def look_at(self, *chunks: int) -> None:
        left = [True]  # once
        self.it._score = [0.01 + (at in chunks) for at in range(len(self.ids))]
        self.it._looks = lambda: left.pop() if left and self.it._n > 3 else False  # type: ignore[method-assign]

    def add(self, new: Sequence[int]) -> None:
        self.ids += new
        self.it.extend(new)

    @property
    def places(self) -> list[int]:
        """Of what is stored, in the text."""
        it = self.it
        held = [3 + 4 * chunk + i for chunk in sorted(it._held) for i in range(4)]
        return [*range(3), *held, *range(it._solid, it._n)]

    def slots(self, layer: int) -> Slots:
        return self.it._kv.slots(layer)


@pytest.mark.parametrize("far", [False, True])
def test_what_comes_back_is_what_was_read(far: bool) -> None:
    at = Told(far=far)
    run_to_end(at.it.prefill())
    run_to_end(at.it.catch_up())
    at.look_at(5, 6, 11)
    at.add([7])
    at.look_at(5, 6, 11)
    run_to_end(at.it.catch_up())
    assert {5, 6, 11} <= {*at.it._held}
    s = at.slots(0)
    assert s.pos[0].tolist() == at.places
    fresh = SeparateDraftModel(lm(), 0, 0, sees=0)
    fresh.start([*at.ids, 0])
    run_to_end(fresh.prefill())
    want = fresh._kv.slots(0)
    assert torch.allclose(s.k, want.k[:, at.places], atol=1e-12)
    assert torch.allclose(s.v, want.v[:, at.places], atol=1e-12)


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("sees", [None, 0, 60])
def test_after_any_accepted_length_it_stores_what_it_says(sees: int | None, closes: bool) -> None:
    """A thousand rounds: drafts of any depth, of which any number come true; looks, undoing, long pauses."""
    random, at = Random(7), Told(sees=sees, closes=closes)
    it, n_checked = at.it, 0
    run_to_end(it.prefill())
    for n in range(170):  # six times
        if random.random() < 0.5:
            at.look_at(*(random.randrange(len(at.ids) // 4) for _ in range(6)))
        run_to_end(it.catch_up())
        s, places = at.slots(0), at.places
        assert it._n == len(at.ids)
        assert s.n_slots <= 40
        assert s.pos[0, -1] == len(at.ids) - 1 - it._gap
        if n % 3 == 0 and len(places) == s.n_slots:  # else some stay for a while of what was stored before a pause
            n_checked += 1
            fresh = SeparateDraftModel(lm(), 0, 0, sees=0)
            fresh.start([*(at.ids[i] for i in places), 0])
            run_to_end(fresh.prefill())
            want = fresh._kv.slots(0)  # of the first layer: a token's value there depends on nothing before it
            assert torch.allclose(s.v, want.v, atol=1e-12)
            assert s.pos[0].tolist() == ([*range(len(places))] if closes else places)
            assert not closes or torch.allclose(s.k, want.k, atol=1e-6)
        guesses = [random.randrange(97) for _ in range(random.randrange(6))]
        for i, guess in enumerate(guesses):
            run_to_end(it.continue_from([guess], [i - 1]))
        right = random.randint(0, len(guesses))
        new = [*guesses[:right], random.randrange(97)]
        if n % 40 == 39:
            new += [random.randrange(97) for _ in range(random.randrange(100))]  # it was not asked for a while
        if len(at.ids) > 450 or n % 25 == 24:
            at.ids = at.ids[: random.randrange(90, len(at.ids))]
            it.start(at.ids)
        else:
            at.add(new)
    assert n_checked > 40


def test_what_is_looked_at_is_the_attention_of_one_row() -> None:
    """Against a dense softmax over everything; of heads that hold different slots, and of what a window hides, too."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(n, s, 8, generator=generator, dtype=torch.float64) for n, s in ((6, 1), (2, 47)))
    kv = Dense([*lm().shapes[:0], *[type(lm().shapes[0])(2, 8, 8)] * 2], torch.float64)
    for layer in range(2):
        kv.append(layer, k + layer, k, 0)
    keep = torch.ones(2, 47, dtype=torch.bool)
    keep[1, 11:29] = False
    kv.evict_except(0, keep)
    sight = type(lm().attention_params[0])
    attention_params = {0: sight(0.3, softcap=2.0), 1: sight(0.3, window=20)}
    got = relevance(kv, attention_params, Query({0: q, 1: q}, 45), 3, 5)
    total = torch.zeros(47, dtype=torch.float64)
    for layer, of in attention_params.items():
        score = torch.einsum("hd,hsd->hs", q[:, 0], (k + layer).repeat_interleave(3, 0)) * of.scale
        score = of.softcap * torch.tanh(score / of.softcap) if of.softcap else score
        at = torch.arange(47)
        hidden = (at > 45).expand(6, -1).clone()
        hidden |= at <= 45 - of.window if of.window else ~keep.repeat_interleave(3, 0)
        total += score.masked_fill(hidden, -math.inf).softmax(-1).sum(0) / 3  # query heads of a KV head
    assert len(got) == 8
    assert torch.allclose(torch.tensor(got).double(), total[3:43].view(8, 5).sum(1))


def test_a_chunk_is_not_let_go_for_one_that_is_hardly_more_looked_at() -> None:
    assert best([0.0, 1.0, 1.09, 1.2], range(4), [1], 2) == [3, 1]
    assert best([0.0, 1.0, 1.11, 1.2], range(4), [1], 2) == [3, 2]
    assert best([], range(5), [0], 2) == [4, 3]  # nobody has looked yet: as in a window


def test_a_set_that_is_all_but_the_same_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    at, laid = Told(working=83), []
    run_to_end(at.it.prefill())
    monkeypatch.setattr(
        at.it, "_lay", lambda chosen, first: (laid.append(chosen), ChunkRetrievalModel._lay(at.it, chosen, first))
    )
    for wanted, copied in ((range(14), 1), (range(14), 0), (range(1, 15), 0), (range(5, 19), 1)):
        laid.clear()
        at.add([3])
        at.look_at(*wanted)
        run_to_end(at.it.catch_up())
        assert len(laid) == copied


def test_no_pass_makes_anything_as_large_as_rows_by_heads_by_context() -> None:
    class Largest(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            for t in found if isinstance(found, tuple | list) else [found]:
                if isinstance(t, torch.Tensor):
                    self.made = max(self.made, t.numel())
            return found

    made = drafter(depth=40, retrieval="every:1")
    session, n = opened(made), 450
    run_to_end(session.read(families.prompt(n)))
    run_to_end(session.step())
    with Largest() as largest:
        run_to_end(made.propose(session.ids, 40, session))  # type: ignore[arg-type]
    assert guesser(made)._score != ()
    assert 0 < largest.made < 41 * lm().n_heads * n / 2
    q = torch.zeros(lm().n_heads, 41, lm().head_dim, dtype=torch.float64)
    with Largest() as dense:  # what it would see
        q @ session.cache.slots(2).k.repeat_interleave(lm().n_heads // lm().n_kv_heads, 0).transpose(1, 2)
    assert dense.made >= 41 * lm().n_heads * n


@pytest.mark.parametrize("retrieval", ["off", "every:1", "adaptive"])
def test_with_room_for_the_whole_text_drafts_are_those_of_the_whole(retrieval: str) -> None:
    got, stats = text(drafter(working=256, branches=1, retrieval=retrieval))
    assert got == text(Off())[0]
    assert stats.accepted_tokens == stats.draft_tokens > 0


def test_texts_that_are_left_copied_or_taken_over_take_nothing_along() -> None:
    session = opened(drafter())
    run_to_end(session.read(families.prompt(130)))
    list(iterate_events(session.stream(9)))
    other = session.fork()
    mine, its = guesser(session.drafter), guesser(other.drafter)
    assert its._chunks is not mine._chunks
    assert its.lm is mine.lm
    for of in (session, other):
        list(iterate_events(of.stream(9)))
    assert session.ids == other.ids
    assert mine._score == its._score != ()
    ids = families.prompt(150, seed=4)
    session.start_answer(ids, Sampler())
    run_to_end(session.read(ids[len(session.ids) :]))
    assert mine._score == ()  # nobody has looked at this text
    list(iterate_events(session.stream(20)))
    fresh = opened(Off())
    fresh.start_answer(ids, Sampler())
    run_to_end(fresh.read(ids))
    list(iterate_events(fresh.stream(20)))
    assert session.ids == fresh.ids
    whole = [*other.ids]
    session.take_over(other)
    session.start_answer(whole[:-7], other.sampler)
    list(iterate_events(session.stream(7)))
    assert session.ids == whole


def test_what_it_missed_while_it_was_not_asked_is_there_when_it_is() -> None:
    at = Told()
    run_to_end(at.it.prefill())
    run_to_end(at.it.catch_up())
    at.add([n % 97 for n in range(90)])  # more than stays
    run_to_end(at.it.catch_up())
    assert at.places[-30:] == [*range(180, 210)]
    at.add([5])
    at.look_at(2, 30)  # one that lay ready, and one that was passed over
    run_to_end(at.it.catch_up())
    assert {2, 30} <= {*at.it._held}


def test_looks_come_by_the_number_of_rounds() -> None:
    every = Trigger(4)
    due = []
    for _ in range(10):
        due.append(every.is_due)
        if every.is_due:
            every.looked()
        near = every.is_near
        every.observe(True)
        assert near == every.is_due
    assert due == [True, False, False, False] * 2 + [True, False]


def test_what_is_asked_for_is_what_is_set() -> None:
    assert rounds(trigger("every:5"), [True] * 11) == [0, 5, 10]
    assert [*guesser(drafter(scored_layers=2))._attention_params] == [lm().n_layers - 2, lm().n_layers - 1]
    near, far = (guesser(drafter(chunk_device=shelf)) for shelf in ("device", "host"))
    assert (near._is_far, far._is_far) == (False, True)


def test_attention_counts_of_the_last_layers_that_see_a_whole_text() -> None:
    sliding = lm("gemma3")
    whole = [layer for layer, window in enumerate(sliding.windows) if window is None]
    assert 0 < len(whole) < sliding.n_layers
    assert [*scored_layers(sliding, sliding.n_layers)] == whole
    assert [*scored_layers(lm(), 1)] == [lm().n_layers - 1]


class Ear:
    """A trigger that keeps what it is told and has looks when it is told to."""

    is_near = is_due = False

    def __init__(self) -> None:
        self.heard, self.sure = list[bool | None](), list[float]()

    def think(self, sure: float) -> None:
        self.sure.append(sure)

    def observe(self, was_right: bool | None) -> None:
        self.heard.append(was_right)

    def looked(self) -> None:
        self.is_due = False


def test_a_trigger_knows_whether_the_first_draft_was_accepted_and_how_sure_the_next_is() -> None:
    at, ear = Told(), Ear()
    at.it._trigger = ear
    for drafted, accepted in ((0, 0), (3, 0), (3, 2)):
        at.it.observe(SimpleNamespace(path=[0], queries=None, n_drafted=drafted, n_accepted=accepted))  # type: ignore[arg-type]
    assert ear.heard == [None, False, True]
    (row,) = run_to_end(at.it.catch_up())
    scores = torch.tensor(row[len(row) // 2 :])
    assert ear.sure == [pytest.approx(float(scores.softmax(0)[0]))]
    assert not at.it.needs.queries
    ear.is_near = True
    assert at.it.needs.queries
    at.it.start(at.ids[:40])
    at.it._trigger = ear
    assert not at.it.needs.queries, "all of such a text is kept"


def test_only_the_last_accepted_token_is_looked_with() -> None:
    made = drafter(retrieval="every:1", working=120)
    session, it, accepted = opened(made), guesser(made), 0
    run_to_end(session.read(families.prompt(130)))
    for _ in range(6):
        accepted += run_to_end(session.step()).n_accepted
        assert it._query is not None
        assert it._query.at == len(session.ids) - 2
    assert accepted > 0
    query = it._query
    it._trigger, it._context = Trigger(1), session
    it._query = replace(query, at=query.at - 1)
    assert not it._looks()
    it._query = query
    assert it._looks()
    assert not it._looks(), "once"


def test_where_it_is_at_a_loss_it_looks_before_it_drafts() -> None:
    at, due = Told(), [False, True]
    run_to_end(at.it.prefill())
    run_to_end(at.it.catch_up())
    at.add([7])
    at.look_at(5, 6, 11)
    at.it._looks = lambda: due.pop(0)  # type: ignore[method-assign]
    run_to_end(at.it.catch_up())
    assert {5, 6, 11} <= {*at.it._held}


def test_of_chunks_the_newest_tokens_leave_room_for_so_many_stay() -> None:
    at = Told()
    run_to_end(at.it.prefill())
    run_to_end(at.it.catch_up())
    at.add([7])
    at.look_at(*range(1, 20))
    run_to_end(at.it.catch_up())
    assert len(at.it._held) == at.it._most == 4
    assert at.it._n - at.it._solid >= 6


def test_a_chunk_that_was_never_read_is_read_behind_what_stands_before_it() -> None:
    """A few at once; as near the beginning as here, behind all of it."""
    at = Told(sees=None, working=83)
    run_to_end(at.it.prefill())
    run_to_end(at.it.catch_up())
    at.add([7])
    at.look_at(1, 3, 5, 7, 9, 11)
    run_to_end(at.it.catch_up())
    ready = [chunk for chunk in range(10) if chunk in at.it._chunks]  # what stands behind them was read at first
    assert ready == [3, 5, 7, 9]
    fresh = SeparateDraftModel(lm(), 0, 0, sees=0)
    fresh.start([*at.ids, 0])
    run_to_end(fresh.prefill())
    where = slice(3 + 4 * ready[-1], 7 + 4 * ready[-1])
    for layer, (k, v) in enumerate(at.it._chunks.of(ready[-1:], lm().device)):
        want = fresh._kv.slots(layer)
        assert torch.allclose(k, want.k[:, where], atol=1e-12)
        assert torch.allclose(v, want.v[:, where], atol=1e-12)


def test_an_undone_text_goes_on_from_the_chunks_before_its_end() -> None:
    at = Told()
    run_to_end(at.it.prefill())
    run_to_end(at.it.catch_up())
    at.add([7])
    at.look_at(1, 2)
    run_to_end(at.it.catch_up())
    at.ids = at.ids[:61]
    at.it.start(at.ids)
    assert at.it._solid == at.it._n == 3 + 4 * 14, "nothing is read again but what is less than a chunk"
    assert at.it._score == ()
    assert at.it._query is None
    assert at.slots(0).pos[0].tolist() == at.places
    assert {12, 13} <= {*at.it._held}


@pytest.mark.parametrize("far", [False, True])
def test_of_a_text_that_is_no_more_no_chunk_is_held(far: bool) -> None:
    """Chosen again in the next one they are stored again: what has their number is not what was held."""
    at = Told(far=far)
    run_to_end(at.it.prefill())
    run_to_end(at.it.catch_up())
    at.look_at(5, 6, 11)
    at.add([7])
    run_to_end(at.it.catch_up())
    assert {5, 6, 11} <= {*at.it._held}
    at.ids = families.prompt(120, seed=5)
    assert at.ids[:3] != at.it._text[:3]
    at.it.start(at.ids)
    assert list(at.it._held) == []
    run_to_end(at.it.prefill())
    run_to_end(at.it.catch_up())
    at.look_at(5, 6, 11)
    at.add([7])
    run_to_end(at.it.catch_up())
    assert {5, 6, 11} <= {*at.it._held}
    s = at.slots(0)
    assert s.pos[0].tolist() == at.places
    fresh = SeparateDraftModel(lm(), 0, 0, sees=0)
    fresh.start([*at.ids, 0])
    run_to_end(fresh.prefill())
    want = fresh._kv.slots(0)
    assert torch.allclose(s.k, want.k[:, at.places], atol=1e-12)
    assert torch.allclose(s.v, want.v[:, at.places], atol=1e-12)


def rounds(of: Trigger, right: Sequence[bool], sure: float = 0.9) -> list[int]:
    """Behind which rounds it looked."""
    found = []
    for n, was_right in enumerate(right):
        if of.is_due:
            of.looked()
            found.append(n)
        of.think(sure)
        of.observe(was_right)
    return found


def test_two_failures_in_a_row_are_enough_where_drafts_rarely_come_true() -> None:
    of = Adaptive()
    of.observe(False)
    of.looked()
    due = []
    for was_right in (True, False, False):
        of.observe(was_right)
        due.append(of.is_due)
    assert due == [False, False, True]


@pytest.mark.parametrize(
    ("after", "helps"),
    [("100", True), ("000", False), (7 * "0" + "100", True), (8 * "0" + "100", False), (32 * "0", True)],
)
def test_a_look_is_vain_where_no_more_drafts_come_true_soon_after(after: str, helps: bool) -> None:
    """Within eight rounds. One that nobody asked for, after 32, is never vain; three vain ones are enough."""
    of = Adaptive()
    of.observe(False)
    for _ in range(4):
        of.looked()
        for at in after:
            of.observe(at == "1")
    of.looked()
    of.observe(False)
    of.observe(False)
    assert of.is_due == helps


def test_whoever_may_look_behind_the_coming_round_has_its_queries() -> None:
    random, of = Random(3), Adaptive()
    for _ in range(400):
        near = of.is_near
        of.think(random.random())
        of.observe(random.choice([True, True, False, None]))
        assert near or not of.is_due
        if of.is_due:
            of.looked()


def test_looks_come_where_drafts_begin_to_fail() -> None:
    assert rounds(Adaptive(), [True] * 40) == [0, 32]
    assert rounds(Adaptive(), [*[True] * 40, *[False] * 4, *[True] * 20])[:4] == [0, 32, 41, 43]
    vain = rounds(Adaptive(), [*[True] * 20, *[False] * 200])
    assert len(vain) < 20  # where looks change nothing there are few
    lost = trigger("adaptive")
    assert rounds(lost, [True] * 9) == [0]
    lost.think(0.1)
    assert lost.is_due
