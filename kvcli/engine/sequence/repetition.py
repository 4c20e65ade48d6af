"""Detect an answer that repeats itself in a loop, from its tokens alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ROUNDS = 4  # repetitions of a cycle that count as a loop, however long it is
LONGEST = 256  # longest cycle, in tokens


@dataclass(frozen=True, slots=True)
class Repetition:
    """A loop at the end of a text: `length` tokens that repeat a cycle of `period` tokens."""

    period: int
    length: int

    def __str__(self) -> str:
        what = f"{self.period} tokens" if self.period > 1 else "one token"
        return f"the answer repeated a loop of {what}"


class RepetitionDetector:
    """A detector that gets the answer token by token and reports when its end is a loop.

    A cycle counts as a loop once it fills `least` tokens (0 = never) and occurred ROUNDS times. The answer may copy
    from the prompt, so a loop that occurs in `read`, such as a table of zeros, does not count. The result depends on
    the tokens alone, so a text ends at the same token with any drafter.
    """

    def __init__(self, least: int, read: Sequence[int] = ()) -> None:
        self._least, self._read = least, read
        self._ids: list[int] = []
        self._seen: dict[int, deque[int]] = {}  # token -> its positions within the last LONGEST tokens
        self._runs: dict[int, int] = {}  # period -> consecutive tokens so far that equal the token one period earlier

    def hear(self, token: int) -> Repetition | None:
        """Add the next token. Return the loop that it completes, or None."""
        if not self._least:
            return None
        at = len(self._ids)
        self._ids.append(token)
        seen = self._seen.setdefault(token, deque())
        while seen and at - seen[0] > LONGEST:
            seen.popleft()
        self._runs = {at - i: self._runs.get(at - i, 0) + 1 for i in reversed(seen)}  # shortest period first
        seen.append(at)
        for period, run in self._runs.items():
            if (n := run + period) >= max(self._least, ROUNDS * period) and not self._is_copy(n):
                return Repetition(period, n)
        return None

    def _is_copy(self, n: int) -> bool:
        return _text(self._ids[-n:]) in self._whole

    @cached_property
    def _whole(self) -> str:
        return _text(self._read)


def _text(ids: Sequence[int]) -> str:
    """Return one character per token, because string search is fast."""
    return "".join(map(chr, ids))
