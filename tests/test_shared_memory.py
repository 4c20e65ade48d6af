"""Answers of event loops share one pool of memory: who begins when, and what a lack of memory does to whom."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import kvcli
from kvcli.api import End, Event, Text, Turn, Waiting
from kvcli.chat import engine_thread
from kvcli.chat.admission import AdmissionQueue, Claim, EngineLimits
from kvcli.chat.model import Model
from kvcli.chat.text_session import TextSession
from kvcli.chat.warm_sessions import WarmSessions
from kvcli.engine import engine
from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, ForwardResult
from kvcli.engine.sequence.sampler import Sampler
from kvcli.errors import Busy, DoesNotFit
from kvcli.kv.out_of_memory import CacheFull
from kvcli.prefix_cache.prefix_cache import PrefixCache
from tests import families
from tests.bench import stress_sequences

NEW = 14
SAMPLED = {"temperature": 0.8, "seed": 5}
PROFILES = ["exact", "ngram", "streaming", "lean"]
SMALL = {"prefill.chunk": 32}  # so that prompts of the tests have several chunks
# they evict, quantize and draft within these short texts
TIGHT: dict[str, dict[str, Any]] = {
    "streaming": {"policy.window": 40, "policy.compression_interval": 8},
    "lean": {"kv.residual": 16, "kv.group": 16},
}


@cache
def demo() -> Model:
    """In fp32: in 16 bits a row beside others rounds otherwise."""
    return kvcli.load("demo", set={"load.dtype": "fp32"})


def opened(i: int) -> TextSession:
    name = PROFILES[i % len(PROFILES)]
    return demo().open(name, set={**SMALL, **TIGHT.get(name, {})})


def asked(i: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt for each text, every second one sampled."""
    sampled = SAMPLED if i // len(PROFILES) % 2 else {}
    return families.prompt(70 + 11 * i, demo().lm.vocab, i), {"max_new_tokens": NEW, "ignore_eos": True, **sampled}


@cache
def alone(i: int) -> tuple[Turn, dict[str, Any]]:
    """The answer, and all KV and decisions behind it."""
    ids, options = asked(i)
    with opened(i) as text:
        turn = text.generate(ids, **options)
        return turn, dict(leaves(copy.deepcopy(text.session.state())))


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, f"{name}.{key}")
    else:
        yield name, state.contiguous().numpy().tobytes() if isinstance(state, Tensor) else state


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    yield
    demo().engine.limits = EngineLimits()
    for text in [*demo().engine._sessions]:  # nothing is shared with the next test
        text.close()


async def turn_of(text: TextSession, i: int, events: list[Event] | None = None, **options: Any) -> Turn:
    ids, usual = asked(i)
    return await last(text.astream(ids, **{**usual, **options}), events)


async def last(stream: AsyncIterator[Event], events: list[Event] | None = None) -> Turn:
    events = [] if events is None else events
    async for event in stream:
        events.append(event)
    (turn,) = (event.turn for event in events if isinstance(event, End))
    return turn


async def together(texts: dict[int, TextSession]) -> dict[int, list[Event]]:
    """Ask each text for its answer, all before the first pass; return the events before the answers."""
    shared, gate, events = demo().engine, threading.Event(), {i: list[Event]() for i in texts}
    shared._pool = shared._pool or ThreadPoolExecutor(1)
    shared._pool.submit(gate.wait, 60)
    tasks = [asyncio.create_task(turn_of(text, i, events[i])) for i, text in texts.items()]
    await asyncio.sleep(0)  # each begins, and its request waits for the gate
    gate.set()
    for i, turn in zip(texts, await asyncio.gather(*tasks), strict=True):
        want, its_state = alone(i)
        assert (turn.ids, turn.text) == (want.ids, want.text), texts[i].profile.name
        assert turn.stats.shortages == [], "no profile is degraded"
        if texts[i].nbytes:  # it has not made room for another
            assert dict(leaves(texts[i].session.state())) == its_state, texts[i].profile.name
    return events


# --- the order in which answers begin


def claim(need: int, client: str = "") -> Claim:
    return Claim(iter(()), None, None, need, client)  # type: ignore[arg-type]


def begun(queue: AdmissionQueue, left: int, skips: int = 2) -> list[int]:
    """Admit all that fits into `left` bytes; return their needs."""
    found = list[int]()
    while (one := queue.next(lambda claim: sum(found) + claim.need <= left, skips)) is not None:
        found.append(one.need)
    return found


def test_clients_take_turns_and_each_is_served_in_order() -> None:
    queue = AdmissionQueue()
    for need, client in ((1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "c"), (6, "b")):
        queue.add(claim(need, client))
    assert begun(queue, 100) == [1, 4, 5, 2, 6, 3]
    assert len(queue) == 0


def test_small_answers_pass_a_large_one_so_often_and_no_more() -> None:
    queue = AdmissionQueue()
    for need in (50, 1, 2, 3):
        queue.add(claim(need))
    assert begun(queue, 10) == [1, 2]
    assert begun(queue, 10) == [], "the large one waits for memory, and all others for it"
    assert begun(queue, 60) == [50, 3]


def test_an_answer_waits_until_its_memory_is_free() -> None:
    demo().engine.limits = EngineLimits(pool_bytes=2 << 20)  # for one answer

    async def ask() -> None:
        texts = {i: opened(i) for i in (0, 1, 4)}
        events = await together(texts)
        waits = [[event.ahead for event in each if isinstance(event, Waiting)] for each in events.values()]
        assert waits == [[], [0], [1, 0]]
        assert [text.nbytes > 0 for text in texts.values()] == [False, False, True], "idle KV made room"

    asyncio.run(ask())


def test_what_never_fits_is_refused_with_the_number_and_who_finds_the_queue_full_too() -> None:
    async def ask() -> None:
        demo().engine.limits = EngineLimits(pool_bytes=1 << 20)
        with pytest.raises(DoesNotFit, match="84 tokens need") as error:
            await turn_of(opened(0), 0)
        assert (error.value.code, error.value.detail["pool"]) == ("no_room", 1 << 20)
        demo().engine.limits = EngineLimits(pool_bytes=2 << 20, queue=1)
        texts, events = [opened(0), opened(1), opened(4)], list[Event]()
        running = [asyncio.create_task(turn_of(text, 0)) for text in texts[:2]]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="the queue is full: 1") as full:
            await turn_of(texts[2], 0, events)
        assert (full.value.code, events) == ("queue_full", [])
        assert full.value.retry_after >= 1  # seconds that an answer took, smoothed
        assert [len((await task).ids) for task in running] == [NEW, NEW]

    asyncio.run(ask())


def test_one_who_leaves_the_queue_is_not_served() -> None:
    demo().engine.limits = EngineLimits(pool_bytes=2 << 20)

    async def ask() -> None:
        first, second, third = (demo().open("exact", set=SMALL) for _ in range(3))
        running = asyncio.create_task(turn_of(first, 0))
        await asyncio.sleep(0)
        async with aclosing(second.astream(asked(4)[0], max_new_tokens=9)) as stream:
            assert await anext(stream) == Waiting(0)
            assert demo().engine.snapshot().waiting == 1
        assert (await turn_of(third, 8)).ids == alone(8)[0].ids
        assert (await running).ids == alone(0)[0].ids
        assert not second.session.ids

    asyncio.run(ask())


# --- prefixes are shared


def test_a_prompt_is_prefilled_once_and_copied_by_all_that_share_its_beginning() -> None:
    ids, rest = families.prompt(150, demo().lm.vocab, 1), families.prompt(40, demo().lm.vocab, 2)
    prompts = [ids, ids, [*ids[:101], *rest], rest]
    with demo().open("exact", set=SMALL) as text:
        want = [text.generate(each, max_new_tokens=9, ignore_eos=True) for each in prompts if not text.close()]

    async def ask() -> None:
        texts = [demo().open(name, set=SMALL) for name in ("exact", "ngram", "exact", "exact")]
        streams = (
            text.astream(each, max_new_tokens=9, ignore_eos=True) for text, each in zip(texts, prompts, strict=True)
        )
        turns = await asyncio.gather(*map(last, streams))
        assert [turn.ids for turn in turns] == [turn.ids for turn in want]
        assert [turn.stats.cached for turn in turns] == [0, 149, 101, 0]
        assert (await last(texts[0].astream(prompts[2], max_new_tokens=9))).stats.cached == 140
        assert demo().engine.snapshot().reused["copy"] >= 149 + 101 + 39

    asyncio.run(ask())


def test_a_session_of_another_profile_gives_nothing() -> None:
    async def ask() -> None:
        texts = [opened(i) for i in (3, 2, 0)]
        for text in texts:
            assert (await last(text.astream(asked(0)[0], max_new_tokens=2))).stats.cached == 0

    asyncio.run(ask())


# --- saved KV is loaded while others write


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Saved KV of the first prompt, which is loaded in as many pieces as possible: the passes run before each piece."""
    pieces, passes, load, _ = list[int](), list[object](), PrefixCache.load_by_layer, [alone(0), alone(4)]
    monkeypatch.setattr(demo(), "prefix_cache", PrefixCache(tmp_path, 1 << 30, demo().lm, min_work=0))
    monkeypatch.setattr(engine_thread, "PIECE", -1.0)
    with demo().open("exact", set=SMALL) as text:
        text.session.start_answer(asked(0)[0], Sampler())
        run_to_end(text.session.read(asked(0)[0]))
        assert text.keep().nbytes

    def counted(*given: Any) -> Iterator[None]:
        for _ in load(*given):
            pieces.append(len(passes))
            yield

    monkeypatch.setattr(engine, "run", lambda requests: passes.append(requests) or run(requests))  # type: ignore[func-returns-value]
    monkeypatch.setattr(PrefixCache, "load_by_layer", counted)
    return pieces


async def beside(load: AsyncIterator[Event], older: TextSession) -> tuple[Turn, Turn]:
    """An answer that loads its prompt while another one, which is much longer, is written."""
    long = {**asked(4)[1], "max_new_tokens": 60}
    events = list[Event]()
    running = asyncio.create_task(last(older.astream(asked(4)[0], **long), events))
    while not any(isinstance(event, Text) for event in events):
        await asyncio.sleep(0.001)
    return await last(load), await running


def test_others_take_a_step_between_two_pieces_of_saved_kv(shelf: list[int]) -> None:
    async def ask() -> None:
        text, older = (demo().open("exact", set=SMALL) for _ in range(2))
        turn, other = await beside(text.astream(asked(0)[0], **asked(0)[1]), older)
        assert turn.ids == alone(0)[0].ids
        assert turn.stats.cached == len(asked(0)[0]) - 1
        assert other.ids[:NEW] == alone(4)[0].ids
        assert len(shelf) == 2 * len(demo().lm.storing), "layers are made, then filled"
        assert [now - before for before, now in pairwise(shelf)] == [1] * (len(shelf) - 1)

    asyncio.run(ask())


def test_who_leaves_between_two_pieces_keeps_nothing_of_them(shelf: list[int]) -> None:
    async def ask() -> None:
        text, older = (demo().open("exact", set=SMALL) for _ in range(2))

        async def leaving() -> AsyncIterator[Event]:
            stream = text.astream(asked(0)[0], **asked(0)[1])
            first = asyncio.ensure_future(anext(stream))
            while len(shelf) < 2:
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert (text.session.committed, text.session.cache.n_slots(0)) == (0, 0)
            shelf.clear()
            async for event in text.astream(asked(0)[0], **asked(0)[1]):
                yield event

        turn, _ = await beside(leaving(), older)
        assert turn.ids == alone(0)[0].ids
        assert turn.stats.cached == len(asked(0)[0]) - 1

    asyncio.run(ask())


def test_who_is_preempted_between_two_pieces_prefills_the_prompt(
    shelf: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        text, older = (demo().open("exact", set=SMALL) for _ in range(2))
        real, before = engine.run, demo().engine.snapshot().preempted

        def failing(requests: Sequence[ForwardRequest], *more: Any) -> list[ForwardResult]:
            if len(shelf) == 2:
                shelf.append(0)
                raise CacheFull("injected")
            return real(requests, *more)

        monkeypatch.setattr(engine, "run", failing)
        turn, other = await beside(text.astream(asked(0)[0], **asked(0)[1]), older)
        assert (turn.ids, turn.stats.cached) == (alone(0)[0].ids, 0)
        assert other.ids[:NEW] == alone(4)[0].ids
        assert other.stats.shortages == []
        assert demo().engine.snapshot().preempted == before + 1

    asyncio.run(ask())


# --- memory runs out


def lacks(at: dict[TextSession, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory run out once for each text, at this pass of it, in whatever company it is."""
    passes, due, real = dict.fromkeys(at, 0), set[TextSession](), run

    def failing(requests: Sequence[ForwardRequest], *more: Any) -> list[ForwardResult]:
        running = [text for text in at if any(one.states is text.session.states for one in requests)]
        for text in running:
            passes[text] += text not in due
            due.update([text] if passes[text] == at[text] else [])
        if lacking := due & {*running}:
            if len(requests) == 1:  # the engine runs them again, by halves, until one is alone
                due.difference_update(lacking)
                passes[running[0]] += 1
            raise CacheFull("injected")
        return real(requests, *more)

    monkeypatch.setattr(engine, "run", failing)


# a pass of decoding, and one of the prompt
@pytest.mark.parametrize(("failing", "at"), [(0, 9), (3, 3)])
def test_a_lack_of_memory_changes_no_answer(failing: int, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that began last computes its KV again, with its policy's decisions; no profile is degraded."""

    async def ask() -> None:
        texts = {i: opened(i) for i in range(4)}
        lacks({texts[failing]: at}, monkeypatch)
        before = demo().engine.snapshot().preempted
        await together(texts)
        assert demo().engine.snapshot().preempted - before == (failing == 0)
        for text in texts.values():
            await text.aclose()

    asyncio.run(ask())


CHURN = [(5, 0), *(pytest.param(16, shift, marks=pytest.mark.slow) for shift in range(4))]


@pytest.mark.parametrize(("n", "shift"), CHURN)
def test_answers_among_joins_cuts_and_preemptions_are_those_alone(
    n: int, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shift`: of which profile the answer is that began last."""
    demo().engine.limits = EngineLimits(pool_bytes=(n - 2) * (3 << 19))  # some wait first

    async def ask() -> None:
        texts = {i: opened(i) for i in range(shift, shift + n)}
        lacks({text: 2 + 5 * i % 17 for i, text in texts.items() if i % 2 == shift % 2}, monkeypatch)
        cut = demo().open("exact", set=SMALL)
        leaver = asyncio.create_task(last(cut.astream(asked(3)[0], ignore_eos=True, max_new_tokens=900)))
        await together(texts)
        leaver.cancel()
        assert demo().engine.snapshot().preempted > before
        for text in texts.values():
            await text.aclose()

    before = demo().engine.snapshot().preempted
    asyncio.run(ask())


@pytest.mark.parametrize("is_known", [True, False])
def test_kv_that_would_become_another_is_not_dropped_and_the_answer_that_lacks_memory_waits(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second turn under a policy continues what the first one kept, which is computed again if it is known how."""

    async def turns(text: TextSession, other: TextSession | None) -> tuple[Turn, ...]:
        first = await turn_of(text, 2)
        text.session.prefills = text.session.prefills if is_known else []
        stream = text.astream([*asked(2)[0], *first.ids, *asked(1)[0]], ignore_eos=True, max_new_tokens=NEW)
        if other is None:
            return (await last(stream),)
        older = asyncio.create_task(turn_of(other, 0, events))
        await asyncio.sleep(0)
        return await asyncio.gather(last(stream), older)

    async def ask() -> None:
        (want,) = await turns(opened(2), None)
        text, other = opened(2), opened(0)
        lacks({other: 9}, monkeypatch)
        second, older = await turns(text, other)
        assert second.stats.cached > len(asked(2)[0])
        assert (second.ids, older.ids) == (want.ids, alone(0)[0].ids)
        assert demo().engine.snapshot().preempted == before + is_known
        assert is_known or any(isinstance(event, Waiting) for event in events)

    events, before = list[Event](), demo().engine.snapshot().preempted
    asyncio.run(ask())


def test_an_answer_that_is_alone_takes_its_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    text = demo().open(set={**SMALL, "memory.fallbacks": ["prefill.chunk=16"]})
    idle = demo().open("exact")

    async def ask() -> None:
        await turn_of(idle, 4)
        lacks({text: 4}, monkeypatch)
        assert (await turn_of(text, 0)).stats.shortages == []
        assert not idle.nbytes, "idle sessions lose their KV first"
        await text.aclose()
        lacks({text: 4}, monkeypatch)
        turn = await turn_of(text, 0)
        assert "prefill.chunk=16" in turn.stats.shortages[0]
        assert turn.ids == alone(0)[0].ids

    asyncio.run(ask())


def test_an_answer_that_waits_while_its_session_makes_room_is_of_that_session() -> None:
    ids, options = asked(0)
    longer, scored = [*ids, *alone(0)[0].ids, *ids], {**options, "prompt_logprobs": True}
    with demo().open("exact", set=SMALL) as text:
        want = text.generate(longer, **scored)
        waits = text.answer(longer, **scored)
        text.drop()
        assert not text.nbytes
        (task,) = kvcli.generate_together(waits)
        assert task.result().prompt_scores == want.prompt_scores
        assert text.has_read(longer), "its KV is counted"


# --- sessions of a server


async def answer(warm: WarmSessions, ids: list[int], profile: str, seed: int | None = None) -> Turn:
    sampled = {"temperature": 0.8, "seed": seed} if seed is not None else {}
    async with warm.session(ids, profile, SMALL) as session:
        return await last(session.astream(ids, max_new_tokens=9, ignore_eos=True, **sampled))


@pytest.mark.parametrize(("profile", "is_shared"), [("exact", True), ("streaming", False)])
def test_alone_copied_and_warm_are_one_answer(profile: str, is_shared: bool) -> None:
    ids = families.prompt(120, demo().lm.vocab, 3)
    with demo().open(profile, set=SMALL) as text:
        first = text.generate(ids, max_new_tokens=9, ignore_eos=True)
        longer = [*ids, *first.ids, *ids[:7]]
        text.close()
        want = text.generate(longer, max_new_tokens=9, ignore_eos=True, temperature=0.8, seed=4)

    async def ask() -> None:
        warm = WarmSessions(demo(), idle_bytes=1 << 30)
        assert (await answer(warm, ids, profile)).ids == first.ids
        turns = await asyncio.gather(answer(warm, longer, profile, 4), answer(warm, longer, profile, 4))
        assert {turn.ids for turn in turns} == {want.ids}
        assert [turn.stats.cached > 120 for turn in turns] == [is_shared] * 2
        assert demo().engine.snapshot().idle == 2 * is_shared
        await warm.aclose()
        assert demo().engine.snapshot().idle == 0

    asyncio.run(ask())


def test_idle_sessions_are_closed_beyond_a_bound_and_a_short_beginning_takes_none() -> None:
    prompts = [families.prompt(90, demo().lm.vocab, i) for i in range(3)]

    async def ask() -> None:
        warm = WarmSessions(demo(), idle_bytes=4 << 20)  # of two sessions
        for ids in prompts:
            await answer(warm, ids, "exact")
        assert demo().engine.snapshot().idle == 2
        assert (await answer(warm, [*prompts[2][:40], 9, *prompts[1]], "exact")).stats.cached == 40
        assert [(await answer(warm, prompts[i], "exact")).stats.cached for i in (2, 1, 0)] == [89, 0, 0]

    asyncio.run(ask())


def test_answers_of_a_storm_are_those_alone() -> None:
    found = stress_sequences.storm(3, models=("llama",), dtypes=("fp32",))
    assert (found["tried"], found["bad"]) == (3, 0)
    assert found["answers"] > 25


@pytest.mark.slow
def test_answers_of_a_hundred_storms_are_those_alone() -> None:
    found = stress_sequences.storm(100, seed=1000)
    assert (found["tried"], found["bad"]) == (100, 0)
