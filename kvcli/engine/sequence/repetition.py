"""Recognise a text that goes round in a loop, by its tokens alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ROUNDS = 4  # times a cycle has to come, however long it is
LONGEST = 256  # tokens of a cycle


@dataclass(frozen=True, slots=True)
class Repetition:
    """The end of a text: so many tokens that are nothing but a cycle of `period` of them."""

    period: int
    length: int

    def __str__(self) -> str:
        what = f"{self.period} tokens" if self.period > 1 else "one token"
        return f"the text went round in a loop of {what}"


class RepetitionDetector:
    """Hears a text token by token and says when its end has become a loop.

    A cycle counts once it fills `least` tokens and came ROUNDS times; 0 = never. What was read may be copied: a loop
    that stands in `read`, such as a table of zeros, is none. The verdict depends on the tokens alone, so a text ends at
    the same one however it was guessed.
    """

    def __init__(self, least: int, read: Sequence[int] = ()) -> None:
        self._least, self._read = least, read
        self._ids: list[int] = []
        self._seen: dict[int, deque[int]] = {}  # token -> where it stood within the last LONGEST tokens
        self._runs: dict[int, int] = {}  # period -> tokens in a row that equal the one so far before them

    def hear(self, token: int) -> Repetition | None:
        """The next token; the loop that it completes."""
        if not self._least:
            return None
        at = len(self._ids)
        self._ids.append(token)
        seen = self._seen.setdefault(token, deque())
        while seen and at - seen[0] > LONGEST:
            seen.popleft()
        self._runs = {at - i: self._runs.get(at - i, 0) + 1 for i in reversed(seen)}  # the shortest period first
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
    """A character for each token: strings are searched fast."""
    return "".join(map(chr, ids))
