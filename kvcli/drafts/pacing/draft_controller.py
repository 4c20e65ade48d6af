"""Decide from the clock when drafting pays.

The rule is the marginal one of Sequoia (arXiv 2402.12374): a row is worth verifying when its chance of acceptance
exceeds what the row costs at the present rate. Costs are measured while decoding, in passes: one unit is the time of a
pass with one row, so that a context that grows or a machine that slows down moves both sides alike. What is decided
here changes the speed and never the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvcli.drafts.pacing.pass_timer import PassTimer
from kvcli.engine.drafting.report import DraftReport

_WARM_UP = 2  # first passes, whose times count for nothing (allocation, caches, compilation)
_FIRST_PLAIN = 3  # plain passes measured before any claim
_WINDOW = 32  # passes with a look-up over which the speed is judged
_EARLY, _CLEARLY = 16, 0.08  # passes after which drafting that is clearly slower by so much need not go on
_PAUSE, _LONGEST_PAUSE = 64, 1024  # passes; a pause doubles each time drafting fails again
_RELAPSE = 128  # passes after a pause within which another failure doubles the next one
_PAPER_EVERY = 8  # passes between two guesses on paper during a pause
_ABSURD = 0.6  # units; a pass with guesses that seems cheaper means that the plain time is wrong
_DOUBTS, _LATELY = 2, 128  # so often within so many passes the plain time is measured anew; after that it is noise
_MARGINAL = 1.2  # multiple of plain speed
_FEW = 0.25  # share of passes with guesses that makes a slow window drafting's own fault
_SAFE = 4  # guesses of a second model that are made before the cost of verifying so many is known
_ENOUGH = 4  # guesses on paper in a row that end any pause


class Mode(Enum):
    """What the next pass is for."""

    DRAFT = "draft"  # look up, and verify what pays
    PAPER = "paper"  # look up, verify nothing, see whether the guess comes true
    PLAIN = "plain"  # nothing: one row, timed as the yardstick


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One pass on the books."""

    guesses: int
    tokens: int
    units: float


class PassHistory:
    """The last so many passes, and what they come to: asked several times a pass."""

    def __init__(self, most: int) -> None:
        self._passes: deque[TimedPass] = deque(maxlen=most)
        self._rate: float | None = 0.0  # None = to be worked out

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
    """Says what each pass is for and how many guesses it verifies, and hears how long it took."""

    def __init__(self, min_speedup: float = 0.98, baseline_interval: int = 64) -> None:
        self.min_speedup = min_speedup  # multiple of plain speed below which drafting pauses
        self.baseline_interval = baseline_interval  # passes between two plain passes timed as the yardstick
        self.paused_passes = 0
        self._clock = PassTimer()
        self._passes = 0
        self._owed = _FIRST_PLAIN  # plain passes to time
        self._timed = 0  # pass in which a plain one was last timed
        self._doubts: list[int] = []  # passes in which the plain time was thrown away
        self._window = PassHistory(_WINDOW)  # passes with a look-up
        self._recent = PassHistory(2 * _WINDOW)  # all passes
        self._left = 0  # passes until the pause ends
        self._pause = _PAUSE
        self._kept = 0  # guesses on paper that came true in a row
        self._resumed = -_RELAPSE  # pass in which the last pause ended
        self._why = ""
        self._mode = Mode.PLAIN

    def expect(self, costs: Mapping[int, float]) -> None:
        """Begin with these costs: rows -> time in plain passes."""
        self._clock.expect(costs)

    def restart(self) -> None:
        """The text has changed, and with it perhaps the time of a plain pass; what rows cost in units is kept."""
        self._window.clear()
        self._owed = max(self._owed, 1)

    def mode(self) -> Mode:
        """What the coming pass is for."""
        if self._left:
            self._mode = Mode.PAPER if self._left % _PAPER_EVERY == 0 else Mode.PLAIN
        else:
            # where drafting gains little a plain pass costs little, and the yardstick must be good
            every = self.baseline_interval // 4 if self._window.rate < _MARGINAL else self.baseline_interval
            due = self._passes < _WARM_UP or self._owed or self._passes - self._timed >= every
            self._mode = Mode.PLAIN if due else Mode.DRAFT
        return self._mode

    def rows(self, chances: Sequence[float], safe: int) -> int:
        """How many of the guesses to verify; `chances` of acceptance, falling.

        Past `safe` a stair at a time, each of which must have been timed before the next one is tried.
        """
        return self._best(chances, safe)[0]

    def worth(self, chances: Sequence[float], safe: int) -> float:
        """Tokens that verifying the best number of these guesses brings beyond what it costs at the present speed."""
        return self._best(chances, safe)[1]

    def _best(self, chances: Sequence[float], safe: int) -> tuple[int, float]:
        """How many to verify, and what that is worth."""
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
        """Does it pay to guess on behind guesses of these `chances`, up to `most`, where a guess takes a pass first?

        `mean`: how often further ones come true, as far as is known before they are made; `each`: plain passes of one;
        `beside`: what guesses that take none are `worth` at this place.
        """
        n, chance, gain = len(chances), chances[-1] if chances else 1.0, 0.0
        rate = max(self._window.rate, 1.0)
        if chance * mean <= rate * each:  # further ones come true no more often
            return False
        costs = self._clock.costs(most + 2)
        for further in range(1, min(most, max(_SAFE, self._clock.reach - 1)) - n + 1):
            chance *= mean
            gain += chance
            if gain > beside + rate * (further * each + costs[n + further] - costs[n]):
                return True
        return False

    def costs(self, most: int) -> list[float]:
        """Plain passes of one with 1, 2, ... `most` rows."""
        return self._clock.costs(most)

    @property
    def plain(self) -> float:
        """Seconds of a pass with one row, 0 = not measured."""
        return self._clock.plain

    @property
    def speed(self) -> float:
        """Tokens by the time of a plain pass, lately; 0 = not measured."""
        return self._recent.rate

    def surcharge(self, rows: int) -> float:
        """Plain passes that a pass takes longer with so many rows on top of one and a few guesses: an estimate."""
        costs = self._clock.costs(rows + 4)
        return costs[-1] - costs[3]

    def wants_alone(self, guesses: int) -> bool:
        """Should these guesses go without scouts, so that it stays known what they cost?"""
        return self._clock.is_fading(1 + guesses)

    @property
    def is_paused(self) -> bool:
        return self._left > 0

    def observe(self, guesses: int, tokens: int, seconds: float, scouts: int = 0, ahead: float = 0.0) -> float | None:
        """The pass verified this many guesses, beside so many scouts, and yielded this many tokens. `ahead`: of the
        seconds, those of passes by which the guesses were made.

        Returns how many plain passes longer it took for the scouts, if that can be said.
        """
        self._passes += 1
        self._clock.tick()
        if self._passes <= _WARM_UP:
            return None
        if self._mode is Mode.PLAIN and not guesses:
            self._timed, self._owed = self._passes, max(0, self._owed - 1)
            if not self._clock.agrees(seconds):
                self._doubt(2)
            self._clock.time_plain(seconds)
        if not self._clock.plain:
            return None
        before = ahead / self._clock.plain
        units = seconds / self._clock.plain - before
        if (guesses or scouts) and units < _ABSURD and self._doubt(_FIRST_PLAIN):
            return None  # it was timed while warming up, or the machine has become faster
        # one stall (a boundary, another program) says nothing about drafting
        usual, is_known = self._clock.costs(guesses + 1)[-1], self._clock.knows(guesses + 1)
        if guesses and not scouts:
            self._clock.time(guesses + 1, units)
        self._note(TimedPass(guesses, tokens, before + min(units, (1.5 if is_known and not scouts else 4) * usual)))
        return units - usual if scouts else None

    def observe_dry_run(self, came_true: bool) -> None:
        """How a guess on paper turned out: one that came true ends a first pause, twice as many each relapse."""
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
        """Forget the plain time and owe so many measurements of it; False if it was doubted often enough lately.

        On a machine that other programs use, passes never agree. Measuring on and on would mean never to draft.
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
        """Pause if the window was slower than plain decoding, for longer if drafting itself made it so once more."""
        rate = self._window.rate
        if rate >= self.min_speedup:
            return
        guessed = sum(p.guesses > 0 for p in self._window) >= _FEW * len(self._window)
        is_relapse = guessed and self._passes - self._resumed < _RELAPSE
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if is_relapse else _PAUSE
        self._left, self._kept = self._pause, 0
        self._why = f"drafting ran at {rate:.2f} of plain speed over {len(self._window)} passes"
        self._window.clear()

    def _tick_pause(self) -> None:
        self.paused_passes += 1
        self._left -= 1
        if not self._left:
            self._resume()

    def _resume(self) -> None:
        self._left = 0
        self._resumed = self._passes
