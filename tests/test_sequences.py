"""Several texts over one model: each writes what it writes alone, whatever becomes of the others, in one thread or in
the tasks of an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing
from functools import cache
from typing import Any

import pytest

import kvcli
from kvcli.api import End, Event, Live, Read, Text, Turn
from kvcli.chat.model import Model
from kvcli.chat.text_session import TextSession
from kvcli.engine.engine import Engine, iterate_events, run
from kvcli.engine.forward_request import ForwardRequest, ForwardResult
from kvcli.errors import BadConfig, BadInput, ContextOverflow, DoesNotFit
from kvcli.kv.slots import nbytes

PROFILES = ["exact", "ngram", "fafo", "lean", "streaming", "ngram", "snap", "exact"]
REPORT = kvcli.read_document("demo:report").text


@cache
def demo() -> Model:
    """In fp32: in 16 bits a row beside others rounds otherwise."""
    return kvcli.load("demo", set={"load.dtype": "fp32"})


def asked(i: int) -> tuple[str, dict[str, Any]]:
    """A question of its own for each text, some of them sampled, of unlike lengths."""
    part = REPORT[700 * i : 700 * i + 500 + 377 * i]
    sample = {"temperature": 0.7, "seed": i} if i % 3 == 2 else {}
    return f"{part}\nWhat is said of well {i}?", {"max_new_tokens": 18 + 3 * i, "ignore_eos": True, **sample}


@cache
def alone(i: int) -> Turn:
    question, options = asked(i)
    with demo().open(PROFILES[i]) as text:
        return text.generate(question, **options)


@pytest.fixture
def texts() -> Iterator[list[TextSession]]:
    opened = [demo().open(name) for name in PROFILES]
    yield opened
    for text in opened:
        text.close()


def test_eight_texts_side_by_side_write_what_each_writes_alone(texts: list[TextSession]) -> None:
    works = [text.answer(question, **options) for i, text in enumerate(texts) for question, options in [asked(i)]]
    for i, ticket in enumerate(kvcli.generate_together(*works)):
        turn = ticket.result()
        assert (turn.ids, turn.text) == (alone(i).ids, alone(i).text), PROFILES[i]
    assert len({turn.ids for turn in map(alone, range(8))}) == 8


def test_one_is_cancelled_and_one_lacks_memory_and_the_others_never_notice(texts: list[TextSession]) -> None:
    texts[2] = demo().open("fafo", set={"prefill.chunk": 64, "memory.device": "1536KiB", "memory.on_oom": "fail"})
    many, seen = Engine(), list[Event]()
    tickets = []
    for i, text in enumerate(texts):
        question, options = asked(i)
        tickets.append(many.add(text.answer(question, **options), seen.append if i == 5 else lambda event: None))
    while many.step():
        if sum(isinstance(event, Text) for event in seen) == 3:
            tickets[5].cancel()
    for i, ticket in enumerate(tickets):
        if i == 2:
            with pytest.raises(DoesNotFit, match="do not fit"):
                ticket.result()
        elif i == 5:
            with pytest.raises(CancelledError):
                ticket.result()
        else:
            assert ticket.result().ids == alone(i).ids
    assert not any(isinstance(event, End) for event in seen)
    question, options = asked(5)
    again = texts[5].generate(question, **options)
    assert again.ids == alone(5).ids
    assert again.stats.cached > 0, "what it had read stays"


def test_a_declared_step_is_taken_by_the_text_that_lacks_memory(texts: list[TextSession]) -> None:
    short = demo().open(
        set={
            "exactness": "approx",
            "prefill.chunk": 64,
            "memory.device": "2MiB",
            "memory.fallbacks": ["memory.disk=1GiB"],
        }
    )
    (question, options), (other, others) = asked(7), asked(3)
    short_, other_ = kvcli.generate_together(short.answer(question, **options), texts[3].answer(other, **others))
    assert short_.result().ids == alone(7).ids
    assert "memory.disk=1GiB" in short_.result().stats.shortages[0]
    assert short.profile.memory.disk == "1GiB"
    assert demo().profile.memory.disk != "1GiB", "of this text alone"
    assert (other_.result().ids, other_.result().stats.shortages) == (alone(3).ids, [])


def test_of_two_answers_in_one_text_the_first_says_that_it_was_overtaken() -> None:
    with demo().open() as text:
        question, options = asked(0)
        first, second = kvcli.generate_together(text.answer("Hello"), text.answer(question, **options))
        with pytest.raises(BadInput, match="another answer began"):
            first.result()
        assert second.result().ids == alone(0).ids


def test_an_outbox_may_cancel_others() -> None:
    many, first, tickets = Engine(), demo().open(), list[Any]()
    tickets.append(many.add(first.answer("Hello"), lambda event: [ticket.cancel() for ticket in tickets[1:]]))
    tickets += [many.add(demo().open().answer("Hello")) for _ in range(2)]
    while many.step():
        pass
    assert tickets[0].result().text == demo().generate("Hello").text
    for ticket in tickets[1:]:
        with pytest.raises(CancelledError):
            ticket.result()


def test_an_open_text_has_a_profile_of_its_own_and_the_weights_of_all() -> None:
    with demo().open("exact") as a, demo().open(profile="ngram", set={"sample.temperature": 0.5}) as b:
        assert a.session.lm is b.session.lm is demo().lm
        assert (a.profile.spec.method, b.profile.spec.method, b.profile.sample.temperature) == ("off", "ngram", 0.5)
        assert b.profile.load == demo().profile.load, "a name says nothing about loading"
        a.generate("Hello", 4)
        assert not b.session.ids
    assert not sum(nbytes(a.session.cache).values())
    with pytest.raises(BadConfig) as found:
        demo().open(profile="cpu")
    assert found.value.code == "needs_reload"


def test_tokens_that_the_model_has_not_are_refused() -> None:
    with demo().open("exact") as text:
        for ids in ([demo().lm.vocab], [5, -1]):
            with pytest.raises(BadInput) as found:
                text.generate(ids, 4)
            assert found.value.code == "no_such_token"


def test_a_model_under_another_profile_has_a_text_of_its_own() -> None:
    own = demo().text_session
    changed = demo().with_profile(demo().profile.replace(sample={"temperature": 0.5}))
    assert changed.text_session is not own
    assert changed.text_session.profile.sample.temperature == 0.5
    assert demo().text_session is own


def test_closing_a_text_ends_its_answer() -> None:
    text = demo().open()
    stream = text.stream("Hello")
    next(stream)
    text.close()
    with pytest.raises(BadInput):
        list(stream)
    assert text.session.ids == []


@pytest.mark.parametrize("act", [TextSession.close, lambda text: text.generate("Thank you!")])
def test_nothing_ends_an_answer_from_its_own_cancel_but_the_cancel(act: Callable[[TextSession], object]) -> None:
    with demo().open() as text:
        with pytest.raises(BadInput, match="still generating") as error:
            text.generate("Hello", cancel=lambda: bool(act(text)))
        assert error.value.try_ == ("return True from cancel",)
        assert text.generate("Hello", 4).ids == demo().generate("Hello", 4).ids


# in an event loop


async def turn_of(stream: AsyncIterator[Event]) -> Turn:
    async for event in stream:
        if isinstance(event, End):
            return event.turn
    raise AssertionError("a stream ends with End")


def test_tasks_of_an_event_loop_share_passes_and_hear_of_their_own_texts(
    texts: list[TextSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = [alone(i).ids for i in range(8)]
    shared, real = list[tuple[int, int]](), kvcli.engine.engine.run

    def noted(feeds: Sequence[ForwardRequest], *more: Any) -> list[ForwardResult]:
        shared.append((len(feeds), threading.get_ident()))
        return real(feeds, *more)

    monkeypatch.setattr(kvcli.engine.engine, "run", noted)

    async def ask() -> list[Turn]:
        streams = [
            text.astream(question, **options) for i, text in enumerate(texts) for question, options in [asked(i)]
        ]
        return await asyncio.gather(*map(turn_of, streams))

    found = asyncio.run(ask())
    assert [turn.ids for turn in found] == want
    assert max(n for n, _ in shared) == 8
    (thread,) = {ident for _, ident in shared}
    assert thread != threading.get_ident()


def test_events_come_in_order() -> None:
    async def listen() -> list[type]:
        return [type(event) async for event in demo().open().astream("Hello")]

    kinds = asyncio.run(listen())
    assert kinds == [Live, Read, Read, *[Text] * (len(kinds) - 4), End]


def test_what_ends_a_text_reaches_the_task_that_asked_it(texts: list[TextSession]) -> None:
    short = demo().open(set={"prefill.chunk": 64, "memory.device": "1536KiB", "memory.on_oom": "fail"})

    async def ask() -> list[Turn | BaseException]:
        streams = [text.astream(*asked(i)[:1], **asked(i)[1]) for i, text in ((0, texts[0]), (7, short), (4, texts[4]))]
        return await asyncio.gather(*map(turn_of, streams), return_exceptions=True)

    first, lack, last = asyncio.run(ask())
    assert isinstance(lack, DoesNotFit)
    assert isinstance(first, Turn)
    assert isinstance(last, Turn)
    assert (first.ids, last.ids) == (alone(0).ids, alone(4).ids)
    with pytest.raises(ContextOverflow):  # before anything is read
        short.astream([5] * 10**5)


def stops_when_cancelled(text: TextSession) -> Callable[[], Any]:
    async def ask() -> None:
        task = asyncio.create_task(turn_of(text.astream("Hello", ignore_eos=True, max_new_tokens=900)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    return ask


def stops_when_closed(text: TextSession) -> Callable[[], Any]:
    async def ask() -> None:
        async with aclosing(text.astream("Hello", ignore_eos=True, max_new_tokens=900)) as stream:
            async for event in stream:
                if isinstance(event, Text):
                    break

    return ask


def stops_when_left(text: TextSession) -> Callable[[], Any]:
    async def ask() -> None:
        async for event in text.astream("Hello", ignore_eos=True, max_new_tokens=900):
            if isinstance(event, Text):
                break
        text.close()

    return ask


@pytest.mark.parametrize("ends", [stops_when_cancelled, stops_when_closed, stops_when_left])
def test_who_leaves_ends_the_answer_and_the_text_is_free(ends: Callable[[TextSession], Callable[[], Any]]) -> None:
    text = demo().open()
    asyncio.run(ends(text)())
    assert len(text.session.ids) < 900
    at = list(text.session.ids)
    time.sleep(0.05)
    assert text.session.ids == at, "nobody writes on"
    question, options = asked(1)
    assert text.generate(question, **options).ids == demo().open().generate(question, **options).ids


def test_a_slow_task_holds_up_nobody(texts: list[TextSession]) -> None:
    async def ask() -> tuple[Turn, Turn]:
        slow = texts[0].astream(asked(0)[0], **asked(0)[1])
        await anext(slow)  # and then nothing, until the other is over
        other = await turn_of(texts[3].astream(asked(3)[0], **asked(3)[1]))
        return await turn_of(slow), other

    slow, other = asyncio.run(ask())
    assert (slow.ids, other.ids) == (alone(0).ids, alone(3).ids)


def test_the_next_event_loop_finds_the_model_as_the_last_one_left_it(texts: list[TextSession]) -> None:
    for _ in range(2):
        assert asyncio.run(turn_of(texts[0].astream(asked(0)[0], **asked(0)[1]))).ids == alone(0).ids
    assert (
        list(iterate_events(texts[0].answer("Hello")))[-1].turn.text == demo().generate("Hello").text
    )  # and none at all


def test_the_thread_of_a_model_ends_with_it() -> None:
    model = kvcli.load("demo")
    asyncio.run(turn_of(model.open().astream("Hello", max_new_tokens=2)))
    (thread,) = model.engine._pool._threads  # type: ignore[union-attr]
    assert thread.is_alive()
    del model
    while gc.collect() or thread.is_alive():  # it may be in its last action, which refers to the model
        thread.join(0.1)


def test_an_answer_asked_elsewhere_ends_the_one_that_a_task_waits_for() -> None:
    text = demo().open()

    async def ask() -> None:
        stream = text.astream("Hello", ignore_eos=True, max_new_tokens=900)
        await anext(stream)
        there = await asyncio.to_thread(text.generate, asked(0)[0], **asked(0)[1])
        assert there.ids == alone(0).ids
        with pytest.raises(BadInput, match="another answer began"):
            await turn_of(stream)

    asyncio.run(ask())


def test_who_ends_an_answer_elsewhere_waits_for_the_pass_that_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    text, in_pass, goes_on = demo().open(), threading.Event(), threading.Event()

    def held(feeds: Sequence[ForwardRequest], *more: Any) -> list[ForwardResult]:
        in_pass.set()
        assert goes_on.wait(60)
        return run(feeds, *more)

    async def ask() -> None:
        stream = text.astream("Hello")
        await anext(stream)
        await asyncio.to_thread(in_pass.wait, 60)
        closing = asyncio.ensure_future(asyncio.to_thread(text.close))
        done, _ = await asyncio.wait([closing], timeout=0.3)
        goes_on.set()
        await closing
        assert not done, "its rows were being computed"
        with pytest.raises(BadInput, match="was closed"):
            await turn_of(stream)

    monkeypatch.setattr("kvcli.engine.engine.run", held)
    asyncio.run(ask())


def test_what_is_free_is_for_as_many_texts_as_are_said() -> None:
    fit = {"exactness": "approx", "policy.name": "budget", "memory.budget": "fit"}
    model = kvcli.load("demo", set={"load.dtype": "fp32", **fit})
    first, second, other = model.open(), model.open(), model.open("exact")
    for text in (first, other):
        text.generate("How deep?", max_new_tokens=2)
    with pytest.raises(DoesNotFit, match=r"memory\.sequences"):
        second.generate("How deep?", max_new_tokens=2)
    with model.open(set={"memory.sequences": 2}) as third:
        third.generate("How deep?", max_new_tokens=2)
    first.close()
    assert second.generate("How deep?", max_new_tokens=2).text
    assert first.take_cache(second)
    assert first.generate("How deep?", max_new_tokens=2).text
    first.close()
    for _ in range(2):  # the one that came first goes on
        begun = first.answer("How deep?", max_new_tokens=2)  # and has read nothing when the other asks
        with pytest.raises(DoesNotFit, match="and 1 are open"):
            second.answer("How deep?", max_new_tokens=2)
        assert any(isinstance(event, End) for event in iterate_events(begun))


@pytest.mark.parametrize("way", ["close", "aclose", "async with"])
def test_closing_in_a_coroutine_does_not_hold_the_loop(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass of another text goes on meanwhile, and so do the other tasks."""
    busy, text = demo().open(), demo().open()
    held, entered, released, left = (threading.Event() for _ in range(4))
    plain = demo().engine._engine.step

    def slow() -> bool:
        if held.is_set():
            entered.set()
            released.wait(5)
            left.set()
        return plain()

    monkeypatch.setattr(demo().engine._engine, "step", slow)

    async def ask() -> bool:
        task = asyncio.create_task(turn_of(busy.astream("Hello", ignore_eos=True, max_new_tokens=40)))
        await turn_of(text.astream("Hello", max_new_tokens=2))
        held.set()
        while not entered.is_set():
            await asyncio.sleep(0.001)
        if way == "close":
            text.close()
            assert not left.is_set()
            closing = asyncio.ensure_future(asyncio.sleep(0.02))
        elif way == "aclose":
            closing = asyncio.ensure_future(text.aclose())
        else:
            closing = asyncio.ensure_future(text.__aexit__(None, None, None))
        turns = 0
        while not closing.done():
            await asyncio.sleep(0.001)
            turns += 1
            if turns > 5:  # the round ends when others have had their turns
                released.set()
        await closing
        has_waited = released.is_set()
        released.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return has_waited or way == "close"

    assert asyncio.run(ask())
    assert text.session.committed == 0


def test_a_text_that_no_loop_asked_is_closed_in_a_coroutine_as_well() -> None:
    async def ask() -> TextSession:
        async with demo().open() as text:
            text.generate("Hello", max_new_tokens=2)
        return text

    assert asyncio.run(ask()).session.committed == 0
