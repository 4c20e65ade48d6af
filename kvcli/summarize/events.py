"""What happens while a summary is made, in order. Live, Read and Text of a turn come between its two ends."""

from __future__ import annotations

from dataclasses import dataclass

from kvcli.api import Live, Read, Text, Thought
from kvcli.summarize.parts import Part
from kvcli.summarize.plan import Plan
from kvcli.summarize.result import Answered, Point, Summary


@dataclass(frozen=True, slots=True)
class Planned:
    """First of all, before anything is read."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PartBegan:
    part: Part
    of: int
    prompt: int  # tokens
    is_cached: bool  # from an earlier run: nothing is read


@dataclass(frozen=True, slots=True)
class PartEnded:
    part: Part
    of: int
    points: tuple[Point, ...]
    answered: Answered
    seconds: float  # of this run; next to none for a part from the cache


@dataclass(frozen=True, slots=True)
class MergeBegan:
    number: int
    n_points: int  # that become one summary
    prompt: int  # tokens
    is_cached: bool


@dataclass(frozen=True, slots=True)
class MergeEnded:
    number: int
    points: tuple[Point, ...]
    answered: Answered
    seconds: float


@dataclass(frozen=True, slots=True)
class PointReady:
    """A point of the final summary, checked; it will not change any more."""

    point: Point


@dataclass(frozen=True, slots=True)
class CacheWriteFailed:
    """The first answer that could not be kept; `why` is among the summary's notes too."""

    why: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Cancelled; last event."""

    done: int  # parts
    of: int
    is_kept: bool  # each part that is done lies in the cache


@dataclass(frozen=True, slots=True)
class Done:
    """Last event of a run that was not cancelled."""

    summary: Summary


_End = Stopped | Done
Event = (
    Planned
    | PartBegan
    | Live
    | Read
    | Text
    | Thought
    | PartEnded
    | MergeBegan
    | MergeEnded
    | PointReady
    | CacheWriteFailed
    | _End
)
