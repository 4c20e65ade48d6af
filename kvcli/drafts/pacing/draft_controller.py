"""Decide from measured pass times when to draft and how many draft tokens to verify.

The rule is the marginal one of Sequoia (arXiv 2402.12374): a row is worth verifying when its chance of acceptance
exceeds its cost at the present rate. Costs are measured while decoding, in units: one unit is the time of a pass with
one row. A growing context or a slower machine therefore changes both sides alike. The decisions change the speed and
never the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvcli.drafts.pacing.pass_timer import PassTimer
from kvcli.engine.drafting.report import DraftReport

_WARM_UP = 2  # first passes, whose times are ignored (allocation, caches, compilation)
_FIRST_PLAIN = 3  # plain passes measured before the first draft
_WINDOW = 32  # drafting passes over which the speed is judged
_EARLY, _CLEARLY = 16, 0.08  # passes after which drafting stops early if it is slower by this much
_PAUSE, _LONGEST_PAUSE = 64, 1024  # passes; a pause doubles each time drafting fails again
_RELAPSE = 128  # passes after a pause within which another failure doubles the next one
_PAPER_EVERY = 8  # passes between two dry-run drafts during a pause
_ABSURD = 0.6  # units; if a pass with draft tokens seems faster than this, the plain time is wrong
# at most 2 times in 128 passes the plain time is measured again; after that, differences are noise
_DOUBTS, _LATELY = 2, 128
_MARGINAL = 1.2  # multiple of plain speed
_FEW = 0.25  # share of passes with draft tokens from which a slow window is attributed to drafting
_SAFE = 4  # draft tokens of a draft model that are made before the cost of verifying as many is measured
_ENOUGH = 4  # correct dry runs in a row that end any pause


class Mode(Enum):
    """Purpose of the next pass."""

    DRAFT = "draft"  # draft, and verify the tokens that save time
    PAPER = "paper"  # draft, verify no token, and compare the draft with the text that follows
    PLAIN = "plain"  # no draft: one row, timed as the baseline


@dataclass(frozen=True, slots=True)
class TimedPass:
    """Record of one pass."""

    n_draft_tokens: int
    tokens: int
    units: float


class PassHistory:
    """The newest passes and their speed, which is cached because it is read several times a pass."""

    def __init__(self, most: int) -> None:
        self._passes: deque[TimedPass] = deque(maxlen=most)
        self._rate: float | None = 0.0  # None = must be recomputed

    def __len__(self) -> int:
        return len(self._passes)

    def __iter__(self) -> Iterator[TimedPass]:
        return iter(self._passes)

    def note(self, timed: TimedPass) -> None:
        self._passes.append(timed)
        self._rate = None

    def clear(self) -> None:
        self._passes.clear()
        self._rate = 0.0

    @property
    def rate(self) -> float:
        """Speed as a multiple of plain decoding; 0 = nothing noted."""
        if self._rate is None:
            units = sum([p.units for p in self._passes])
            self._rate = sum([p.tokens for p in self._passes]) / units if units else 0.0
        return self._rate


class DraftController:
    """Draft controller: chooses the purpose of each pass and its number of draft tokens, and records pass times."""

    def __init__(self, min_speedup: float = 0.98, baseline_interval: int = 64) -> None:
        self.min_speedup = min_speedup  # multiple of plain speed below which drafting pauses
        self.baseline_interval = baseline_interval  # passes between two plain passes timed as the baseline
        self.paused_passes = 0
        self._clock = PassTimer()
        self._passes = 0
        self._owed = _FIRST_PLAIN  # plain passes still to be timed
        self._timed = 0  # pass in which a plain pass was last timed
        self._doubts: list[int] = []  # passes in which the plain time was discarded
        self._window = PassHistory(_WINDOW)  # drafting passes
        self._recent = PassHistory(2 * _WINDOW)  # all passes
        self._left = 0  # passes until the pause ends
        self._pause = _PAUSE
        self._kept = 0  # correct dry runs in a row
        self._resumed = -_RELAPSE  # pass in which the last pause ended
        self._why = ""
        self._mode = Mode.PLAIN

    def expect(self, costs: Mapping[int, float]) -> None:
        """Set initial costs of passes: rows -> time in plain passes."""
        self._clock.expect(costs)

    def restart(self) -> None:
        """Start a new sequence. The plain time is measured again; the cost of rows in units is kept."""
        self._window.clear()
        self._owed = max(self._owed, 1)

    def mode(self) -> Mode:
        """Choose the purpose of the coming pass."""
        if self._left:
            self._mode = Mode.PAPER if self._left % _PAPER_EVERY == 0 else Mode.PLAIN
        else:
            # when drafting gains little, a plain pass costs little, and an accurate baseline matters
            every = self.baseline_interval // 4 if self._window.rate < _MARGINAL else self.baseline_interval
            due = self._passes < _WARM_UP or self._owed or self._passes - self._timed >= every
            self._mode = Mode.PLAIN if due else Mode.DRAFT
        return self._mode

    def rows(self, chances: Sequence[float], safe: int) -> int:
        """Return how many draft tokens to verify; `chances` of acceptance, falling.

        Beyond `safe`, the row count grows one step at a time, and each step must be timed before the next one is
        tried.
        """
        return self._best(chances, safe)[0]

    def worth(self, chances: Sequence[float], safe: int) -> float:
        """Return the tokens gained by verifying the best number of draft tokens, less the cost at the present speed."""
        return self._best(chances, safe)[1]

    def _best(self, chances: Sequence[float], safe: int) -> tuple[int, float]:
        """Return the best number of draft tokens to verify, and their net gain in tokens."""
        costs = self._clock.costs(len(chances) + 1)
        rate, reach = max(self._window.rate, 1.0), self._clock.reach
        best, most, tokens = 0, 0.0, 0.0
        for n, chance in enumerate(chances, start=1):
            if n > safe and n + 1 > reach:
                break
            tokens += chance
            if (worth := tokens - rate * (costs[n] - 1)) > most:
                best, most = n, worth
        return best, most

    def deeper(self, chances: Sequence[float], most: int, mean: float, each: float, beside: float = 0.0) -> bool:
        """True if more draft tokens after those of `chances`, up to `most`, gain more than the draft passes they need.

        `mean`: expected acceptance of further draft tokens; `each`: draft pass time in plain passes; `beside`: net gain
        in tokens (`worth`) of draft tokens that need no pass.
        """
        n, chance, gain = len(chances), chances[-1] if chances else 1.0, 0.0
        rate = max(self._window.rate, 1.0)
        if chance * mean <= rate * each:  # further draft tokens are accepted no more often
            return False
        costs = self._clock.costs(most + 2)
        for further in range(1, min(most, max(_SAFE, self._clock.reach - 1)) - n + 1):
            chance *= mean
            gain += chance
            if gain > beside + rate * (further * each + costs[n + further] - costs[n]):
                return True
        return False

    def costs(self, most: int) -> list[float]:
        """Return the cost of passes with 1, 2, ... `most` rows, in plain passes."""
        return self._clock.costs(most)

    @property
    def plain(self) -> float:
        """Seconds of a pass with one row; 0 = not measured."""
        return self._clock.plain

    @property
    def speed(self) -> float:
        """Recent tokens per plain-pass time; 0 = not measured."""
        return self._recent.rate

    def surcharge(self, rows: int) -> float:
        """Estimate how many plain passes longer a pass takes with this many rows added to a few draft tokens."""
        costs = self._clock.costs(rows + 4)
        return costs[-1] - costs[3]

    def wants_alone(self, n_draft_tokens: int) -> bool:
        """True if these draft tokens should be verified without lookahead rows, so that their cost stays measured."""
        return self._clock.is_fading(1 + n_draft_tokens)

    @property
    def is_paused(self) -> bool:
        return self._left > 0

    def observe(
        self, n_draft_tokens: int, tokens: int, seconds: float, scouts: int = 0, ahead: float = 0.0
    ) -> float | None:
        """Record a pass that verified `n_draft_tokens` draft tokens beside `scouts` lookahead rows and yielded `tokens`
        tokens. `ahead`: the part of `seconds` spent in draft passes.

        Returns the extra time caused by the lookahead rows in plain passes, or None if it is unknown.
        """
        self._passes += 1
        self._clock.tick()
        if self._passes <= _WARM_UP:
            return None
        if self._mode is Mode.PLAIN and not n_draft_tokens:
            self._timed, self._owed = self._passes, max(0, self._owed - 1)
            if not self._clock.agrees(seconds):
                self._doubt(2)
            self._clock.time_plain(seconds)
        if not self._clock.plain:
            return None
        before = ahead / self._clock.plain
        units = seconds / self._clock.plain - before
        if (n_draft_tokens or scouts) and units < _ABSURD and self._doubt(_FIRST_PLAIN):
            return None  # the plain time was measured while warming up, or the machine has become faster
        # a single stall (a compression point, another program) is no evidence about drafting
        usual, is_known = self._clock.costs(n_draft_tokens + 1)[-1], self._clock.knows(n_draft_tokens + 1)
        if n_draft_tokens and not scouts:
            self._clock.time(n_draft_tokens + 1, units)
        self._note(
            TimedPass(n_draft_tokens, tokens, before + min(units, (1.5 if is_known and not scouts else 4) * usual))
        )
        return units - usual if scouts else None

    def observe_dry_run(self, came_true: bool) -> None:
        """Record a dry run. 1 correct dry run ends a first pause; the number doubles with each relapse."""
        self._kept = self._kept + 1 if came_true else 0
        if self._left and self._kept >= min(_ENOUGH, self._pause // _PAUSE):
            self._resume()

    def report(self) -> DraftReport:
        reason = self._why
        if not self._left:
            reason = "" if self._clock.plain else "measuring plain passes"
        return DraftReport(
            paused=bool(self._left),
            reason=f"{reason}; next try in {self._left} passes" if self._left else reason,
            paused_passes=self.paused_passes,
            plain_pass=self._clock.plain,
            gain=self._recent.rate if self._recent else None,
            row_cost=self._clock.measured,
        )

    def _doubt(self, owed: int) -> bool:
        """Discard the plain time and request `owed` new measurements; False if it was discarded too often lately.

        On a machine shared with other programs, pass times never agree. Without the limit, drafting would never start.
        """
        self._doubts = [when for when in self._doubts if self._passes - when < _LATELY]
        if len(self._doubts) >= _DOUBTS:
            return False
        self._doubts.append(self._passes)
        self._clock.forget_plain()
        self._owed = owed
        return True

    def _note(self, timed: TimedPass) -> None:
        self._recent.note(timed)
        if self._left:
            self._tick_pause()
        elif self._mode is Mode.DRAFT:
            self._window.note(timed)
            is_hopeless = len(self._window) == _EARLY and self._window.rate < self.min_speedup - _CLEARLY
            if len(self._window) == _WINDOW or is_hopeless:
                self._judge()

    def _judge(self) -> None:
        """Pause drafting if the window was slower than plain decoding, twice as long if drafting caused a relapse."""
        rate = self._window.rate
        if rate >= self.min_speedup:
            return
        guessed = sum(p.n_draft_tokens > 0 for p in self._window) >= _FEW * len(self._window)
        is_relapse = guessed and self._passes - self._resumed < _RELAPSE
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if is_relapse else _PAUSE
        self._left, self._kept = self._pause, 0
        self._why = f"drafting ran at {rate:.2f}× plain speed over {len(self._window)} passes"
        self._window.clear()

    def _tick_pause(self) -> None:
        self.paused_passes += 1
        self._left -= 1
        if not self._left:
            self._resume()

    def _resume(self) -> None:
        self._left = 0
        self._resumed = self._passes
