"""The time of engine steps, by which prompt rows are limited while other sequences decode."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from kvcli.engine.forward_request import ForwardRequest

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

LEAST = 16  # prompt rows of a step, so that a prompt is prefilled however long decoding takes
FILLED = 0.85  # share of the longest step that is planned, because later rows attend to more slots
FLAT = 512  # stored slots whose attention takes far less time than the linear layers, in any model
SURE = 4  # factor by which the time of a row may fall from one step to the next, because a measurement may be wrong


class StepTime:
    """Measured times: of a step without prompt rows, and of a prompt row by model and number of layers."""

    def __init__(self, longest: float) -> None:
        """`longest`: seconds of a step in which other sequences decode."""
        self._longest = longest
        self._decoding: deque[float] = deque(maxlen=5)  # seconds of steps without prompt rows
        self._rows: dict[tuple[LM, int], tuple[float, int]] = {}  # seconds of a row, and its position

    def left(self, used: float) -> float:
        """Return the seconds of a step that are left beside decoding. `used`: seconds of it that are over."""
        return FILLED * self._longest - median(self._decoding or [0.0]) - used

    def share(self, request: ForwardRequest, used: float = 0.0) -> float:
        """Return the share of a step that one prompt row of the request takes. `used` as in `left`.

        A row takes longer the more slots it attends to, beyond the first at most in proportion.
        """
        left = self.left(used)
        if left <= 0 or (known := self._rows.get(_kind(request))) is None:
            return 1 / LEAST
        seconds, at = known
        return min(1 / LEAST, seconds * max(1.0, (request.rows.pos[0] + FLAT) / (at + FLAT)) / left)

    def learn(self, seconds: float, prompts: Sequence[tuple[ForwardRequest, int]]) -> None:
        """Learn from a step and its prompt requests, each with its number of rows, beside which sequences decoded."""
        if not prompts:
            self._decoding.append(seconds)
            return
        each = max(0.0, seconds - median(self._decoding or [0.0])) / sum(n for _, n in prompts)
        for request, _ in prompts:
            before, _ = self._rows.get(_kind(request), (0.0, 0))
            self._rows[_kind(request)] = max(each, before / SURE), request.rows.pos[0]


def _kind(request: ForwardRequest) -> tuple[LM, int]:
    return request.lm, -1 if request.layers is None else len(request.layers)
