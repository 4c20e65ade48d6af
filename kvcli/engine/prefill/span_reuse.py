"""Span reuse: a prompt takes the KV of matching spans from other sequences instead of computing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import WIDEST, NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, LayerShape, Usage, attend_new_only
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import KVCache

# A KV cache combined with KV of tokens that are not recomputed, which lie between the tokens of a pass.


class KVOverlay:
    """A KV cache with extra KV. Rows attend to all slots of the cache, and to the extra tokens older than themselves as
    if their pass had computed them."""

    def __init__(
        self,
        store: KVCache,
        shapes: Sequence[LayerShape],
        extra: Mapping[int, tuple[Tensor, Tensor]],
        pos: Sequence[int],
    ) -> None:
        """`extra`: by layer that stores KV, k [K, M, D] and v [K, M, E] of tokens at positions pos [M]."""
        self._store, self._shapes, self._extra, self._pos = store, shapes, extra, list(pos)
        self.dtype = store.dtype

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the reason why passes over this cache are not captured."""
        return DeviceCache(why_not="reused KV is read outside the KV cache")

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over the cache, and over the extra KV with the
        new KV."""
        shares = self._shapes[layer].shared_from
        k, v = self._extra[layer if shares is None else shares]
        if own is None:
            at, rows = torch.tensor(self._pos).view(1, -1), torch.tensor(pos).view(-1, 1)
            mask = (at <= rows) & (at > rows - (params.window or WIDEST))
            over_extra = attend(q, k, v, params.scale, softcap=params.softcap, mask=mask.to(q.device))
            return [*self._store.attend(layer, q, params, pos), over_extra]
        every = [*self._pos, *own.pos]
        at, rows = torch.tensor(every).view(1, -1), torch.tensor(own.pos).view(-1, 1)
        tree_mask = at <= rows  # [N, M + N]
        mask = tree_mask if params.window is None else tree_mask & (at > rows - params.window)
        k, v = torch.cat([k, own.k], 1), torch.cat([v, own.v], 1)
        both = replace(own, k=k, v=v, pos=every, tree_mask=tree_mask, mask=mask.to(q.device))
        # separate: combined with the cache, rows with gaps between them would each be computed alone, which is slow
        return [*self._store.attend(layer, q, params, pos), *attend_new_only(q, params, both)]

    def usage(self) -> list[Usage]:
        """No lasting memory."""
        return []


# Matching spans: the same consecutive tokens in two sequences, at any positions.


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
Past = Iterable[tuple[int, Tensor, Tensor, int]]  # argument of `SequenceState.adopt`


class SpanSourceGone(Exception):
    """Raised if the source of a span no longer has its KV."""


class SpanSource(Protocol):
    """Protocol of a sequence whose KV can be reused."""

    @property
    def ids(self) -> Sequence[int]:
        """Its tokens, up to the end of the reusable part."""

    def held(self, first: int, n: int) -> Held:
        """Return the KV of n tokens from position `first` on, as computed there. Raises SpanSourceGone."""


Found = tuple[MatchingSpan, SpanSource]


class ReusableSpans(Protocol):
    """Protocol of the reusable spans of one prompt. They need no prefill once the tokens before them are stored."""

    def add(self, found: Iterable[Found]) -> None:
        """Add spans; a span never replaces an earlier one."""

    def next(self, at: int) -> int | None:
        """Return where the next span begins or continues, at or after position `at`; None = no more spans."""

    def load(self, at: int, most: int, kv: KVCache, ids: Sequence[int]) -> Passes[tuple[int, Past]]:
        """Load up to `most` tokens of the span at `at` of `ids`; `kv` holds all tokens before it. Return their end and
        their KV. The end is `at` if the source is gone."""


class ReuseMethod(Protocol):
    """Protocol of the `[reuse]` table of a profile, shared by all sequences."""

    @property
    def describe_reused(self) -> str:
        """Describe what is reused from other sequences, in words; "" = nothing."""

    @property
    def min_span(self) -> int:
        """Shortest span that is reused, in tokens."""

    @property
    def recompute(self) -> float:
        """Share of a span that is recomputed layer by layer."""

    def bind(self, lm: LM) -> ReusableSpans:
        """Return an empty set of reusable spans for the next prompt."""


@dataclass(frozen=True, slots=True)
class CopiedSpan:
    """A copy of the KV of one span, made before its sequence was rewound."""

    ids: Sequence[int]
    first: int
    of: Held

    def held(self, first: int, n: int) -> Held:
        """Return views of the copy."""
        at = slice(first - self.first, first - self.first + n)
        return {layer: (k[:, at], v[:, at]) for layer, (k, v) in self.of.items()}


def copy_matching_spans(
    lm: LM, kv: KVCache, had: Sequence[int], ids: Sequence[int], start: int, least: int
) -> Iterator[Found]:
    """Yield copies of the stored spans of `had` that occur in `ids` from `start` on.

    A span is left out if a layer no longer has all of its slots, because its sliding window has moved on.
    """
    kept: dict[MatchingSpan, Held] = {run: {} for run in find_matching_spans(had, ids, start, least)}
    for layer, shape in enumerate(lm.shapes):
        if shape.shared_from is None and kept:
            s = kv.slots(layer)  # once per layer, because quantized slots are dequantized for it
            order = s.pos[0].argsort()
            for run in list(kept):
                if (at := _at(s.pos[0], order, run)) is None:
                    del kept[run]
                else:
                    kept[run][layer] = s.each(lambda t: t[:, at])  # copies: the slots will be overwritten
    for run, held in kept.items():
        yield run, CopiedSpan(had, run.old, held)


def _at(pos: Tensor, order: Tensor, run: MatchingSpan) -> Tensor | None:
    """Return which slots at positions pos [S], rising in `order`, hold a span; None if some are missing."""
    first = int(torch.searchsorted(pos[order], run.old))
    at = order[first : first + run.n]
    return at if len(at) == run.n and int(pos[at[0]]) == run.old and int(pos[at[-1]]) == run.old + run.n - 1 else None
