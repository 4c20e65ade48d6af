"""What an answer is made of: events of a stream, and the finished turn. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvcli.engine.sequence.repetition import Repetition
    from kvcli.engine.stats import Stats

Finish = Literal["stop", "length", "interrupted", "loop"]


@dataclass(frozen=True, slots=True)
class Read:
    """Progress of reading the prompt, after each chunk."""

    done: int  # tokens, cached ones included
    total: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer, whole characters only; `ids` are the tokens that came since the piece before."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Thought:
    """The same of what a model thinks, or writes for others than the user, before its answer or in it."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Live:
    """The turn's stats so far: one object that keeps counting, safe to read from another thread."""

    stats: Stats


@dataclass(frozen=True, slots=True)
class End:
    """The finished turn, last event of every stream."""

    turn: Turn


Event = Read | Text | Thought | Live | End


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer."""

    text: str
    ids: tuple[int, ...]  # tokens of the answer, the stop token included if one ended it
    finish: Finish
    stats: Stats
    loop: Repetition | None = None  # in which it ended, where finish is "loop"
    thinking: str = ""  # no part of the text


Cancel = Callable[[], bool]  # asked between passes; True ends the turn and keeps the text
Prompt = str | Sequence[int]
Events = Iterator[Event]


def turn_of(events: Iterable[Event]) -> Turn:
    """The answer that a stream comes to, all at once."""
    for event in events:
        if isinstance(event, End):
            return event.turn
    raise AssertionError("a stream ends with End")
