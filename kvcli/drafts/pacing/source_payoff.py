"""Switch a draft source off while it costs more time than it saves.

Draft tokens of all sources are verified alike, so each pass shows how many tokens would have been accepted without one
source. The difference in tokens per pass must pay for the longer passes at the present speed. Lookahead rows make
passes longer; learning from logits and ranking draft tokens takes time between passes. A source that costs more is
switched off. The pause doubles each time; afterwards the source is tested for several passes in a row, because its
draft tokens take several passes to build up.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

_BURST = 16  # passes with a source before it is judged
_FIRST = 3  # passes of a burst after which a source too expensive for any text is switched off
# most tokens per pass that a source adds: Lookahead gets 1.64 on Spec-Bench, one of which plain decoding gives
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
            if (worth := self.brought or 0.0) >= price:
                self._rest = _REST
            else:
                self._stop(f"{self._what} added {worth:.2f} tokens per pass and cost the time of {price:.2f}")

    def _stop(self, why: str) -> None:
        self._left, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        self._brought.clear()
        self._why = why
