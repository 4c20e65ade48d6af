"""Runs of equal tokens in two texts, wherever they lie in the old one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FACTOR = 0x9E3779B97F4A7C15  # odd, of the rolling sums by which runs are looked up


@dataclass(frozen=True, slots=True)
class MatchingSpan:
    """Equal tokens in two texts."""

    old: int  # position of the first in the text that was read
    new: int  # and in the one to be read
    n: int

    @property
    def end(self) -> int:
        return self.new + self.n

    def part(self, start: int, end: int) -> MatchingSpan:
        """What of it lies between these positions of the text to be read."""
        return MatchingSpan(self.old + start - self.new, start, end - start)


def find_matching_spans(
    had: Sequence[int] | NDArray[np.int64], ids: Sequence[int], start: int, least: int
) -> Iterator[MatchingSpan]:
    """Runs of `least` tokens or more that stand in both texts, in `ids` from `start` on, rising and apart."""
    old, new = np.asarray(had, dtype=np.uint64), np.asarray(ids, dtype=np.uint64)
    if min(len(old), len(new) - start) < least:
        return
    places: dict[int, int] = {}
    for i, key in enumerate(rolling_hashes(old, least).tolist()):
        places.setdefault(key, i)
    wanted = rolling_hashes(new, least).tolist()
    shift, at = 0, start  # where the last run lay: a text that repeats itself goes on there
    while at < len(wanted):
        i = at + shift
        if not (i >= 0 and i + least <= len(old) and (old[i : i + least] == new[at : at + least]).all()):
            i = places.get(wanted[at], -1)
        if i < 0 or not (old[i : i + least] == new[at : at + least]).all():
            at += 1
            continue
        both = min(len(old) - i, len(new) - at)
        differ = (old[i : i + both] != new[at : at + both]).nonzero()[0]
        n = int(differ[0]) if len(differ) else both
        yield MatchingSpan(i, at, n)
        shift, at = i - at, at + n


def rolling_hashes(ids: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """A number for each n tokens in a row, of texts ids [.., T]; equal ones have equal numbers."""
    found = np.zeros((*ids.shape[:-1], max(0, ids.shape[-1] - n + 1)), dtype=np.uint64)
    for i in range(n):
        found = found * np.uint64(FACTOR) + ids[..., i : i + found.shape[-1]]
    return found
