"""How drafting fares, for people: what a drafter reports and `/spec` and `kvcli spec doctor` show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class AcceptanceByMatch:
    """How first choices that continue a match of some length have fared, verified or only compared with what came."""

    match: str  # tokens, a range
    made: int  # guesses
    share: float  # of them right


@dataclass(frozen=True, slots=True)
class LookaheadReport:
    """What scouts brought and cost."""

    rows: int  # in a pass that carries them
    brought: float | None  # tokens a pass that only they had named, lately
    cost: float | None  # plain passes that a pass with them takes longer, None = not measured
    rested_passes: int
    why: str  # in words, while they rest


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What `/spec` shows. Seconds, passes, and speed as a multiple of plain decoding."""

    paused: bool
    reason: str  # why drafting pauses, in words
    paused_passes: int
    plain_pass: float  # median seconds of a pass with one row, 0 = not measured
    gain: float | None  # speed over plain decoding in the last passes, None = not measured
    row_cost: dict[int, float]  # rows in a pass, up to so many -> its time in plain passes; measured ones only
    by_source: Mapping[str, tuple[AcceptanceByMatch, ...]] = field(default_factory=dict)
    scouts: LookaheadReport | None = None  # None = the drafter sends none
    ahead: float | None = None  # plain passes that one of a second model's takes; None = there is none
    by: str = ""  # its name
    fault: str = ""  # what broke in it, in words: the text went on without
    accepted_by: Mapping[str, int] = field(default_factory=dict)  # source -> accepted guesses that it was surest of

    @property
    def free_rows(self) -> int | None:
        """Rows of a pass that takes at most a tenth longer than one of a single row; None = not measured."""
        if not self.row_cost:
            return None
        free = takewhile(lambda cost: cost[1] <= 1.1, sorted(self.row_cost.items()))
        return max((rows for rows, _ in free), default=1)
