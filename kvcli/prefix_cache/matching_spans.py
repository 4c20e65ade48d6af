"""Matching spans: the same consecutive tokens in two sequences, at any positions, and KV that one has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

FACTOR = 0x9E3779B97F4A7C15  # odd multiplier of the rolling hashes by which spans are found


@dataclass(frozen=True, slots=True)
class MatchingSpan:
    """A span of consecutive tokens that two sequences have in common."""

    old: int  # first position in the old sequence
    new: int  # first position in the new sequence
    n: int

    @property
    def end(self) -> int:
        return self.new + self.n

    def part(self, start: int, end: int) -> MatchingSpan:
        """Return the part of the span between these positions of the new sequence."""
        return MatchingSpan(self.old + start - self.new, start, end - start)


def find_matching_spans(
    had: Sequence[int] | NDArray[np.int64], ids: Sequence[int], start: int, least: int
) -> Iterator[MatchingSpan]:
    """Yield spans of `least` or more tokens that occur in both sequences, in `ids` from `start` on. Their positions
    in `ids` rise and do not overlap."""
    old, new = np.asarray(had, dtype=np.uint64), np.asarray(ids, dtype=np.uint64)
    if min(len(old), len(new) - start) < least:
        return
    places: dict[int, int] = {}
    for i, key in enumerate(rolling_hashes(old, least).tolist()):
        places.setdefault(key, i)
    wanted = rolling_hashes(new, least).tolist()
    shift, at = 0, start  # offset of the last span: repeated text continues there
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
    """Return a hash of each n consecutive tokens of ids [.., T]; equal spans have equal hashes."""
    found = np.zeros((*ids.shape[:-1], max(0, ids.shape[-1] - n + 1)), dtype=np.uint64)
    for i in range(n):
        found = found * np.uint64(FACTOR) + ids[..., i : i + found.shape[-1]]
    return found


Held = dict[int, tuple[Tensor, Tensor]]  # by layer that stores KV: keys [K, n, D] and values [K, n, E]


class SpanSourceGone(Exception):
    """Raised if the source of a span no longer has its KV."""


@dataclass(frozen=True, slots=True)
class SpanSource:
    """A sequence whose KV can be reused."""

    ids: Sequence[int]  # its tokens, up to the end of the reusable part
    # position, n -> the KV of n tokens from there on, as computed in that sequence. Raises SpanSourceGone
    held: Callable[[int, int], Held]


Found = tuple[MatchingSpan, SpanSource]
