"""Whether a source is worth its time: what it brings, by counterfactual, against what it costs, by the clock.

Every guess is verified whoever named it, so each pass shows what it would have accepted without one source. The
difference, in tokens a pass, must pay for the longer passes at the present speed: those of scouts have more rows, and
whoever listens to logits and ranks guesses takes time between passes. Where it does not pay, a source rests, twice as
long each time, and is then tried again in one burst: what it can name takes several passes to come about.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

_BURST = 16  # passes with a source before it is judged
_FIRST = 3  # of them, after which a source that no text could pay for is stopped
# tokens a pass that it brings at best: Lookahead accepts 1.64 a pass on Spec-Bench, one of them plain
_HOPELESS = 0.6
_REST, _LONGEST_REST = 128, 4096  # passes; a rest doubles each time it fails again


class SourcePayoff:
    """Says whether the next pass has the source, `what` in words, and hears what it brought and cost."""

    def __init__(self, wait: int = 16, what: str = "lookahead") -> None:
        """`wait`: passes before the first with it. By then it is known how fast it goes without."""
        self._what = what
        self._brought: deque[int] = deque(maxlen=_BURST)  # tokens that only this source had named
        self._cost: deque[float] = deque(maxlen=9)  # plain passes that a pass with it takes longer
        self._wait = wait
        self._left = 0  # passes until it is tried again
        self._rest = _REST
        self.rested_passes = 0
        self._why = ""

    @property
    def cost(self) -> float | None:
        """Plain passes that a pass with it takes longer; None = not measured."""
        return median_low(self._cost) if len(self._cost) > 1 else None

    @property
    def why(self) -> str:
        """In words, while it rests."""
        return self._why if self._left else ""

    @property
    def brought(self) -> float | None:
        """Tokens a pass that only it had named, lately."""
        return sum(self._brought) / len(self._brought) if self._brought else None

    def due(self, cost: float, speed: float) -> bool:
        """Does the coming pass have it? `cost`: estimated, counts until it is measured; `speed`: over plain."""
        if self._wait:
            self._wait -= 1
            return False
        if not self._left and (price := (self.cost if self.cost is not None else cost) * max(1.0, speed)) > _HOPELESS:
            self._stop(f"a pass with {self._what} takes {price:.2f} tokens' time longer")
        if not self._left:
            return True
        self._left -= 1
        self.rested_passes += 1
        if not self._left:
            self._cost.clear()  # measured in another context or a bad moment: it must not forbid the next try
        return False

    def observe(self, brought: int, cost: float | None, speed: float) -> None:
        """A pass with it: tokens that only it had named, what it took longer, speed as a multiple of plain."""
        self._brought.append(brought)
        if cost is not None:
            self._cost.append(max(0.0, cost))
        price = (self.cost or 0.0) * max(1.0, speed)
        if len(self._cost) >= _FIRST and price > _HOPELESS:
            self._stop(f"a pass with {self._what} takes {price:.2f} tokens' time longer")
        elif len(self._brought) == _BURST:
            if (worth := self.brought or 0.0) >= price:
                self._rest = _REST
            else:
                self._stop(f"{self._what} brought {worth:.2f} tokens a pass and cost {price:.2f}")

    def _stop(self, why: str) -> None:
        self._left, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        self._brought.clear()
        self._why = why
