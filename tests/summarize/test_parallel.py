"""Parts and documents that are answered together: the summaries of one after the other, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import kvcli
from kvcli.api import End
from kvcli.engine.engine import Engine
from kvcli.errors import ContextOverflow
from kvcli.summarize.ahead import Ahead
from kvcli.summarize.cache import Cache
from kvcli.summarize.events import Done, Event, PartBegan, PartEnded, PointReady, Stopped
from kvcli.summarize.plan import PlanWindow, make_plan
from kvcli.summarize.request import Request
from kvcli.summarize.run import asked_parts, summarize
from kvcli.summarize.wording import wording_of
from tests.summarize.scribe import Scribe, first_sentences
from tests.summarize.test_run import SMALL, TEN, began


def planned(model: Any, document: Any, request: Request) -> Any:
    return make_plan([document], request, PlanWindow.of(model), wording_of(model.info))


def outcome(events: Iterator[Event]) -> list[Any]:
    """All that does not depend on the time."""
    found = list[Any]()
    for event in events:
        if isinstance(event, PartEnded):
            found.append((event.part.number, event.points, event.answered.turn.ids, event.answered.is_cached))
        elif isinstance(event, PartBegan | PointReady):
            found.append(event)
        elif isinstance(event, Done):
            found.append((event.summary.points, event.summary.notes))
    return found


def test_parts_of_two_documents_are_answered_together(tmp_path: Path) -> None:
    with kvcli.load("demo", profile="ngram") as model:
        pages = kvcli.read_document("demo:pdf", pages="5-11"), kvcli.read_document("demo:pdf", pages="18-20")
        plans = [planned(model, document, Request(mode="parts", chunk=700)) for document in pages]
        want = [outcome(summarize(model, [d], plan=p)) for d, p in zip(pages, plans, strict=True)]
        cache, at_once = Cache(tmp_path, "model", "profile"), list[int]()
        never = lambda: False  # noqa: E731
        sessions = [model.open() for _ in range(3)]
        prompts = (asked_parts(sessions[0], [d], cache, never, p) for d, p in zip(pages, plans, strict=True))
        ahead = Ahead(
            sessions, chain.from_iterable(prompts), never, lambda session, turn: at_once.append(ahead.n_running)
        )
        how = {"cache": cache, "ahead": ahead}
        found = [outcome(summarize(sessions[0], [d], plan=p, **how)) for d, p in zip(pages, plans, strict=True)]
        assert found == want
        assert max(at_once) == 3
        assert len(at_once) == sum(len(plan.parts) for plan in plans)
        again = list(summarize(model, [pages[0]], plan=plans[0], cache=cache))
        assert {is_cached for _, is_cached in began(again)} == {True}


class Clerk:
    """A session of a scribe."""

    new_engine = Engine

    def __init__(self, scribe: Scribe) -> None:
        self.scribe = scribe

    def answer(self, ids: list[int], **options: Any) -> Any:
        for event in self.scribe.stream(ids, **options):
            yield event
        assert isinstance(event, End)
        return event.turn


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_answered_before_ctrl_c_is_saved(tmp_path: Path, n: int) -> None:
    model, cache = Scribe(first_sentences), Cache(tmp_path / "c", "model", "profile")
    cancel = lambda: len(model.asked) >= 3  # noqa: E731
    plan = planned(model, TEN, SMALL)
    ahead = Ahead([Clerk(model)] * n, asked_parts(model, [TEN], cache, cancel, plan), cancel)
    events = list(summarize(model, [TEN], plan=plan, cache=cache, cancel=cancel, ahead=ahead))
    assert events[-1] == Stopped(2, 5, True)
    again = list(summarize(Scribe(first_sentences), [TEN], plan=plan, cache=cache))
    assert began(again) == [(1, True), (2, True), (3, False), (4, False), (5, False)]


def test_an_error_is_that_of_its_part(tmp_path: Path) -> None:
    """The answers before and behind it are saved, and its session goes on."""

    def fails(prompt: str) -> str:
        if "cobalt" in prompt:
            raise ContextOverflow("x")
        return first_sentences(prompt)

    model, cache = Scribe(fails), Cache(tmp_path / "c", "model", "profile")
    plan, never = planned(model, TEN, SMALL), lambda: False
    ahead = Ahead([Clerk(model)], asked_parts(model, [TEN], cache, never, plan), never)
    ended = list[Event]()
    with pytest.raises(ContextOverflow):
        ended += summarize(model, [TEN], plan=plan, cache=cache, ahead=ahead)
    again = list(summarize(Scribe(first_sentences), [TEN], plan=plan, cache=cache))
    assert began(again) == [(1, True), (2, False), (3, True), (4, True), (5, True)]
