"""Decide from measured pass times when to draft and how many draft tokens to verify.

The rule is the marginal one of Sequoia (arXiv 2402.12374): a row is worth verifying when its chance of acceptance
exceeds its cost at the present rate. Costs are measured while decoding, in units: one unit is the time of a pass with
one row. A growing context or a slower machine therefore changes both sides alike. The decisions change the speed and
never the text.

If several sequences share a pass, a row delays all of them, so its price is their number times its share of the pass.
All sequences then ask the same price, and the best draft tokens of all are verified (TETRIS, arXiv 2502.15197).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median_low

from kvcli.engine.drafting.pass_timer import ABSURD, Company, PassTimer
from kvcli.engine.stats import DraftReport

# Switch a draft source off while it costs more time than it saves.
#
# Draft tokens of all sources are verified alike, so each pass shows how many tokens would have been accepted without
# one source. The difference in tokens per pass must pay for the longer passes at the present speed. Lookahead rows make
# passes longer; learning from logits and ranking draft tokens takes time between passes. A source that costs more is
# switched off. The pause doubles each time; afterwards the source is tested for several passes in a row, because its
# draft tokens take several passes to build up.

_BURST = 16  # passes with a source before it is judged
_FIRST = 3  # passes of a burst after which a source too expensive for any text is switched off
# most tokens per pass that a source adds: Lookahead gets 1.64 on Spec-Bench, 0.64 more than plain
_HOPELESS = 0.6
_REST, _LONGEST_REST = 128, 4096  # passes; the pause doubles each time the source fails again


class SourcePayoff:
    """Payoff of one draft source (`what` in words): decides if the next pass uses it, and records its gain and cost."""

    def __init__(self, wait: int = 16, what: str = "lookahead") -> None:
        """`wait`: passes before the first one with the source, in which the speed without it is measured."""
        self._what = what
        self._brought: deque[int] = deque(maxlen=_BURST)  # accepted tokens that only this source proposed
        self._cost: deque[float] = deque(maxlen=9)  # plain passes that a pass with the source takes longer
        self._wait = wait
        self._left = 0  # passes until the source is tested again
        self._rest = _REST
        self.rested_passes = 0
        self._why = ""

    @property
    def cost(self) -> float | None:
        """Plain passes that a pass with the source takes longer; None = not measured."""
        return median_low(self._cost) if len(self._cost) > 1 else None

    @property
    def why(self) -> str:
        """Reason in words while the source is switched off."""
        return self._why if self._left else ""

    @property
    def brought(self) -> float | None:
        """Recent tokens per pass that only this source proposed."""
        return sum(self._brought) / len(self._brought) if self._brought else None

    def due(self, cost: float, speed: float) -> bool:
        """True if the coming pass uses the source. `cost`: estimate used until measured; `speed`: multiple of plain."""
        if self._wait:
            self._wait -= 1
            return False
        if not self._left and (price := (self.cost if self.cost is not None else cost) * max(1.0, speed)) > _HOPELESS:
            self._stop(f"{self._what} cost the time of {price:.2f} tokens per pass")
        if not self._left:
            return True
        self._left -= 1
        self.rested_passes += 1
        if not self._left:
            # measured in another context or a bad moment: an old cost must not prevent the next test
            self._cost.clear()
        return False

    def observe(self, brought: int, cost: float | None, speed: float) -> None:
        """Record a pass with it: tokens only it proposed, extra time in plain passes, speed as a multiple of plain."""
        self._brought.append(brought)
        if cost is not None:
            self._cost.append(max(0.0, cost))
        price = (self.cost or 0.0) * max(1.0, speed)
        if len(self._cost) >= _FIRST and price > _HOPELESS:
            self._stop(f"{self._what} cost the time of {price:.2f} tokens per pass")
        elif len(self._brought) == _BURST:
            if (gain := self.brought or 0.0) >= price:
                self._rest = _REST
            else:
                self._stop(f"{self._what} added {gain:.2f} tokens per pass and cost the time of {price:.2f}")

    def _stop(self, why: str) -> None:
        self._left, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        self._brought.clear()
        self._why = why


_WARM_UP = 2  # first passes, whose times are ignored (allocation, caches, compilation)
_FIRST_PLAIN = 3  # plain passes measured before the first draft
_WINDOW = 32  # drafting passes over which the speed is judged
_EARLY, _CLEARLY = 16, 0.08  # passes after which drafting stops early if it is slower by this much
_PAUSE, _LONGEST_PAUSE = 64, 1024  # passes; a pause doubles each time drafting fails again
_RELAPSE = 128  # passes after a pause within which another failure doubles the next one
_DRY_RUN_INTERVAL = 8  # passes between two dry-run drafts during a pause
# at most 2 times in 128 passes the plain time is measured again; after that, differences are noise
_DOUBTS, _LATELY = 2, 128
_MARGINAL = 1.2  # multiple of plain speed
_FEW = 0.25  # share of passes with draft tokens from which a slow window is attributed to drafting
_SAFE = 4  # draft tokens of a draft model that are made before the cost of verifying as many is measured
_ENOUGH = 4  # correct dry runs in a row that end any pause


class Mode(Enum):
    """Purpose of the next pass."""

    DRAFT = "draft"  # draft, and verify the tokens that save time
    DRY_RUN = "dry run"  # draft, verify no token, and compare the draft with the text that follows
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
        self._own = PassTimer()  # of passes without company
        self._company: Company | None = None  # in the last pass
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
        self._own.expect(costs)

    def restart(self) -> None:
        """Start a new sequence. The plain time is measured again; the cost of rows in units is kept."""
        self._window.clear()
        self._owed = max(self._owed, 1)

    @property
    def _clock(self) -> PassTimer:
        return self._own if self._company is None or self._company.timer is None else self._company.timer

    def mode(self) -> Mode:
        """Choose the purpose of the coming pass."""
        if self._left:
            self._mode = Mode.DRY_RUN if self._left % _DRY_RUN_INTERVAL == 0 else Mode.PLAIN
        elif self._company is not None:  # others time passes, too
            self._mode = Mode.DRAFT if self._clock.plain else Mode.PLAIN
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

    def net_gain(self, chances: Sequence[float], safe: int) -> float:
        """Return the tokens gained by verifying the best number of draft tokens, less the cost at the present speed."""
        return self._best(chances, safe)[1]

    def _best(self, chances: Sequence[float], safe: int) -> tuple[int, float]:
        """Return the best number of draft tokens to verify, and their net gain in tokens."""
        costs = self.costs(len(chances) + 1)
        rate, reach = max(self._window.rate, 1.0), self._clock.reach
        best, most, tokens = 0, 0.0, 0.0
        for n, chance in enumerate(chances, start=1):
            if n > safe and n + 1 > reach:
                break
            tokens += chance
            if (gain := tokens - rate * (costs[n] - 1)) > most:
                best, most = n, gain
        return best, most

    def deeper(self, chances: Sequence[float], most: int, mean: float, each: float, beside: float = 0.0) -> bool:
        """True if more draft tokens after those of `chances`, up to `most`, gain more than the draft passes they need.

        `mean`: expected acceptance of further draft tokens; `each`: draft pass time in plain passes; `beside`: net gain
        in tokens (`net_gain`) of draft tokens that need no pass.
        """
        n, chance, gain = len(chances), chances[-1] if chances else 1.0, 0.0
        rate = max(self._window.rate, 1.0)
        if chance * mean <= rate * each:  # further draft tokens are accepted no more often
            return False
        costs = self.costs(most + 2)
        for further in range(1, min(most, max(_SAFE, self._clock.reach - 1)) - n + 1):
            chance *= mean
            gain += chance
            if gain > beside + rate * (further * each + costs[n + further] - costs[n]):
                return True
        return False

    def costs(self, most: int) -> list[float]:
        """Return the cost of passes with 1, 2, ... `most` rows, in plain passes; with company, to all sequences."""
        n = self._company.n if self._company is not None else 1
        return [1 + n * (cost - 1) for cost in self._clock.costs(most)]

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
        costs = self.costs(rows + 4)
        return costs[-1] - costs[3]

    def wants_alone(self, n_draft_tokens: int) -> bool:
        """True if these draft tokens should be verified without lookahead rows, so that their cost stays measured."""
        return self._clock.is_fading(1 + n_draft_tokens)

    @property
    def is_paused(self) -> bool:
        return self._left > 0

    def observe(
        self, n_draft_tokens: int, tokens: int, seconds: float, lookahead_rows: int = 0, ahead: float = 0.0
    ) -> float | None:
        """Record a pass that verified `n_draft_tokens` draft tokens beside `lookahead_rows` and yielded `tokens`
        tokens. `ahead`: the part of `seconds` spent in draft passes.

        Returns the extra time caused by the lookahead rows in plain passes, or None if it is unknown.
        """
        self._company, self._passes = None, self._passes + 1
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
        if (n_draft_tokens or lookahead_rows) and units < ABSURD and self._doubt(_FIRST_PLAIN):
            return None  # the plain time was measured while warming up, or the machine has become faster
        # a single stall (a compression point, another program) is no evidence about drafting
        usual, is_known = self._clock.costs(n_draft_tokens + 1)[-1], self._clock.knows(n_draft_tokens + 1)
        if n_draft_tokens and not lookahead_rows:
            self._clock.time(n_draft_tokens + 1, units)
        most = (1.5 if is_known and not lookahead_rows else 4) * usual
        self._note(TimedPass(n_draft_tokens, tokens, before + min(units, most)))
        return units - usual if lookahead_rows else None

    def observe_beside(
        self, company: Company, n_draft_tokens: int, tokens: int, rows: int, spent: float
    ) -> float | None:
        """Record a pass with company, as `observe`. Its time is the engine's to record. `rows`: rows of this sequence;
        `spent`: seconds between two passes."""
        self._company, self._passes = company, self._passes + 1
        if not self._clock.plain:
            return None
        costs = self.costs(rows)
        self._note(TimedPass(n_draft_tokens, tokens, costs[-1] + company.n * spent / self._clock.plain))
        return costs[-1] - costs[n_draft_tokens]

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
        has_drafted = sum(p.n_draft_tokens > 0 for p in self._window) >= _FEW * len(self._window)
        is_relapse = has_drafted and self._passes - self._resumed < _RELAPSE
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
