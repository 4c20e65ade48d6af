"""Reports on drafting, for users: shown by `/spec` and `kvcli spec doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class AcceptanceByMatch:
    """Acceptance of first choices after a match of some length, either verified or compared with the later text."""

    match: str  # match length in tokens, a range
    made: int  # draft tokens
    share: float  # share of them accepted


@dataclass(frozen=True, slots=True)
class LookaheadReport:
    """Gain and cost of lookahead rows."""

    rows: int  # rows of a pass with lookahead
    brought: float | None  # recent tokens per pass that only lookahead proposed
    cost: float | None  # extra time of a pass with lookahead, in plain passes; None = not measured
    rested_passes: int
    why: str  # reason for a pause, in words


@dataclass(frozen=True, slots=True)
class DraftReport:
    """The report that `/spec` shows, in seconds, passes, and speed as a multiple of plain decoding."""

    paused: bool
    reason: str  # why drafting pauses, in words
    paused_passes: int
    plain_pass: float  # median seconds of a pass with one row; 0 = not measured
    gain: float | None  # speedup over plain decoding in the last passes; None = not measured
    row_cost: dict[int, float]  # rows of a pass (upper bound) -> its time in plain passes; measured ones only
    by_source: Mapping[str, tuple[AcceptanceByMatch, ...]] = field(default_factory=dict)
    lookahead: LookaheadReport | None = None  # None = the drafter has no lookahead
    ahead: float | None = None  # time of a draft model's pass, in plain passes; None = no draft model
    by: str = ""  # name of the draft model
    fault: str = ""  # failure of the draft model, in words; decoding continued without it
    # draft source -> accepted tokens for which it was the most confident source
    accepted_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def free_rows(self) -> int | None:
        """Rows of a pass that takes at most 10 % longer than a pass of one row; None = not measured."""
        if not self.row_cost:
            return None
        free = takewhile(lambda cost: cost[1] <= 1.1, sorted(self.row_cost.items()))
        return max((rows for rows, _ in free), default=1)
