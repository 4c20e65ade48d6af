"""Answers as JSON: one document at the end, or a line for each event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from kvcli.api import End, Event, Live, Read, Text, Thought, Turn, turn_of
from kvcli.commands.common.output import print_json
from kvcli.models.text import decode
from kvcli.schemas.turn import EndEvent, ModelFacts, ReadEvent, Run, Score, Start, StatsEvent, TextEvent, TurnDocument
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.text_session import TextSession
    from kvcli.engine.model_info import ModelInfo
    from kvcli.engine.stats import Stats
    from kvcli.environment import Environment
    from kvcli.settings.profile import Profile

EVERY = 0.5  # seconds between two stats lines


def run_of(profile: Profile, session: TextSession, notes: Sequence[str] = ()) -> Run:
    """Return the settings of a turn of the session."""
    method = profile.spec.method
    spell = lambda token: decode(session.tokenizer, [token])  # noqa: E731
    words = profile.name, method, profile.hash, session.promise
    return Run(*words, cautions=session.cautions, notes=notes, spell=spell)


def print_turn(world: Environment, events: Iterable[Event], info: ModelInfo, run: Run) -> Turn:
    """Print one document when the turn has ended."""
    turn = turn_of(events)
    print_json(world, TurnDocument.of(turn, info, run))
    return turn


def print_events(world: Environment, events: Iterable[Event], info: ModelInfo, run: Run) -> Turn:
    """Print a line for each event, `start` first and `end` with the whole document last."""
    model = ModelFacts.from_attributes(info)
    print_json(world, Start(event="start", kvcli=__version__, model=model, profile=run.profile))
    stats: Stats | None = None
    last, tokens = world.clock(), 0
    for event in events:
        if isinstance(event, Read):
            print_json(world, ReadEvent.from_attributes(event, event="read"))
        elif isinstance(event, Text | Thought):
            tokens += len(event.ids)
            kind: Literal["text", "thinking"] = "thinking" if isinstance(event, Thought) else "text"
            scores = [Score.of(score, run.spell) for score in event.scores]
            print_json(world, TextEvent(event=kind, text=event.text, tokens=tokens, scores=scores))
            if stats is not None and world.clock() - last >= EVERY:
                last = world.clock()
                print_json(world, StatsEvent.of(stats))
        elif isinstance(event, Live):
            stats = event.stats  # one object, updated in place
        elif isinstance(event, End):
            print_json(world, EndEvent(event="end", turn=TurnDocument.of(event.turn, info, run)))
            return event.turn
    raise AssertionError("a stream ends with End")
