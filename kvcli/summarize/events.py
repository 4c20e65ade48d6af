"""Events of a summary, in order. Live, Read and Text events of a turn come between its begin and end events."""

from __future__ import annotations

from dataclasses import dataclass

from kvcli.api import Live, Read, Text, Thought, ToolCall, Waiting
from kvcli.summarize.parts import Part
from kvcli.summarize.plan import Plan
from kvcli.summarize.result import Answered, Point, Summary


@dataclass(frozen=True, slots=True)
class Planned:
    """First event, before any prefill."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PartBegan:
    part: Part
    of: int
    prompt: int  # tokens
    is_cached: bool  # answer of an earlier run: no prefill


@dataclass(frozen=True, slots=True)
class PartEnded:
    part: Part
    of: int
    points: tuple[Point, ...]
    answered: Answered
    seconds: float  # time in this run; near zero for a cached part


@dataclass(frozen=True, slots=True)
class MergeBegan:
    number: int
    n_points: int  # points that the merge combines
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
    """A checked point of the final summary; it does not change any more."""

    point: Point


@dataclass(frozen=True, slots=True)
class CacheWriteFailed:
    """Event of the first answer that could not be saved; `why` is among the summary's notes too."""

    why: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Last event of a cancelled run."""

    done: int  # parts
    of: int
    is_kept: bool  # True if each finished part is in the cache


@dataclass(frozen=True, slots=True)
class Done:
    """Last event of a run that was not cancelled."""

    summary: Summary


_End = Stopped | Done
Event = (
    Planned
    | PartBegan
    | Waiting
    | Live
    | Read
    | Text
    | Thought
    | ToolCall
    | PartEnded
    | MergeBegan
    | MergeEnded
    | PointReady
    | CacheWriteFailed
    | _End
)
