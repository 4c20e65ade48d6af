"""Pages of one layer: their slots, their summaries in the index, and the selection units that are always read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kv.slots import Slots, picked
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.sparse.index import Numbers, PageIndex
from kvcli.kv.sparse.page_source import Arrival, PageSource

AT_ONCE = 4096  # slots of a head summarized at a time
ENOUGH = 1024  # slots to learn shared values from; those learned from fewer are learned again at twice as many


@dataclass(frozen=True, slots=True)
class PageBudget:
    """Number of stored slots that a row reads per KV head. Always-read slots come on top."""

    fraction: float  # share of the stored slots
    floor: int  # least number of slots that a row may select
    sinks: int  # first tokens, always read
    recent: int  # newest tokens at a compression point, always read

    def grains(self, slots: int, grain: int) -> int:
        """Return how many selection units of `grain` slots a row may select if `slots` slots are stored."""
        return math.ceil(max(self.floor, self.fraction * slots) / grain)


class Pages:
    """Pages of one layer: ranges of `index.page` slots in the order of the tier, whole pages only.

    Rows select units of them, X in all (`index.selection_unit` slots each). Heads may have different numbers of pages.
    Slots after a head's last whole page are always read. Slots that may be quantized again are in no page, so they are
    always read too, because the summary of a page must match the values that rows read.
    """

    def __init__(self, index: PageIndex, budget: PageBudget) -> None:
        self.index, self.budget = index, budget
        self.clear()

    def clear(self) -> None:
        """Drop all pages and shared values."""
        none, heads = torch.empty(0, 0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
        self.always = self.open = none.flatten(1).bool()  # [K, X] read by every row; selectable
        self.kept: Numbers = ()  # summaries of the index, [K, P, ..] each
        self.shared: Numbers = ()  # shared values of the index, for the layer
        self.first = none  # [K, P, page / unit] lowest position in a unit; -1 = no such unit
        self.last = none  # [K, P, page / unit] highest position
        self.whole = heads  # [K] whole pages of each head
        self.ends = heads  # [K] slots of each head at the compression point
        self.most = 0  # units that a row may select
        self.reads_all = True  # the budget covers all slots, so nothing is selected
        self._learned = 0  # slots per head that `shared` was learned from

    def state(self) -> State:
        """Return the values that all pages share, learned from the first pages."""
        return {"learned": self._learned, "shared": {str(i): t for i, t in enumerate(self.shared)}}

    def restore(self, given: SnapshotReader, layer: int, source: PageSource) -> None:
        """Restore the shared values, without pages."""
        self.clear()
        pos, learned = source.positions(layer), given.number("learned", 1 << 62)  # a crop leaves fewer slots than that
        if learned and pos.shape[1]:
            key = source.head(layer, 0, 0).k
            like = self.index.learn(torch.zeros(pos.shape[0], 1, key.shape[2], dtype=key.dtype))  # only for the shapes
            self.shared = tuple(given.part("shared").like(str(i), t).to(pos.device) for i, t in enumerate(like))
            self._learned = learned

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that take memory."""
        return [*self.kept, *self.shared, self.first, self.last, self.whole, self.ends, self.always, self.open]

    @property
    def held(self) -> Tensor:
        """Mask [K, X] of the units that exist."""
        return self.last.flatten(1) >= 0

    def crop(self, before: Tensor, layer: int, source: PageSource) -> None:
        """Drop stale pages after the tier was cropped: slots may have moved or been quantized again.

        Each head drops its first page with changed positions (`before` [K, S]: old ones) or values, and all later ones.
        """
        after = source.positions(layer)
        n = min(before.shape[1], after.shape[1])
        same = (before[:, :n] == after[:, :n]).cumprod(1).sum(1)  # [K] slots
        same = source.n_stable(layer, same.to(self.whole))
        self._cut(torch.minimum(self.whole, same // self.index.page))

    def settle(self, layer: int, source: PageSource) -> None:
        """Run a compression point: summarize new pages and set the units that are always read until the next one."""
        pos = source.positions(layer)
        n_kv, s = pos.shape
        at = torch.arange(1, s + 1, device=pos.device)
        self.ends = ((pos >= 0) * at).amax(1) if s else pos.new_zeros(n_kv).long()  # the end of each head's last slot
        longest = int(self.ends.max())
        self.reads_all = longest <= self.budget.floor
        if self.reads_all:  # short sequences need no index; an existing index is kept
            return
        if not self.whole.numel():
            whole = torch.zeros_like(self.ends)
            none = pos.new_empty(n_kv, 0, self.index.page // self.index.selection_unit)
            # assigned together, because memory may run out while they are allocated
            self.whole, self.first, self.last = whole, none, none
        if self.shared and self._learned < ENOUGH and longest >= 2 * self._learned:
            self._cut(torch.zeros_like(self.whole))
        self._extend(layer, source, s)
        newest = int(pos.max())
        ends = ((self.first < self.budget.sinks) | (self.last > newest - self.budget.recent)).flatten(1)
        self.always, self.open = self.held & ends, self.held & ~ends
        self.most = self.budget.grains(longest, self.index.selection_unit)
        self.reads_all = int(self.open.sum(1).max()) <= self.most

    def behind(self) -> Tensor:
        """Return indices [K, M] of the slots after each head's last whole page at the compression point, -1 = none."""
        start = self.whole * self.index.page
        return _run(start, self.ends - start)

    def slots_of(self, grains: Tensor) -> Tensor:
        """Return the slot indices [K, U * unit] of selection units [K, U]; -1 = none in both."""
        return _slots_of(grains, self.index.selection_unit)

    def _cut(self, whole: Tensor) -> None:
        """Keep the first `whole` [K] pages of each head."""
        most = int(whole.max())
        gone = torch.arange(most, device=whole.device).unsqueeze(1) >= whole.view(-1, 1, 1)
        first, last = (t[:, :most].masked_fill(gone, -1) for t in (self.first, self.last))
        n = most * (self.index.page // self.index.selection_unit)
        always, open_ = (t[:, :n].clone() for t in (self.always, self.open))  # until the next compression point
        kept = tuple(t[:, :most].clone() for t in self.kept)
        self.first, self.last, self.always, self.open, self.kept, self.whole = first, last, always, open_, kept, whole
        if not most:
            self.kept, self.shared, self._learned = (), (), 0

    def _extend(self, layer: int, source: PageSource, slots: int) -> None:
        """Summarize new whole pages whose slots can no longer change, with `slots` slots per head in the tier."""
        page, at_once = self.index.page, max(1, AT_ONCE // self.index.page)
        target = torch.minimum(self.ends, source.n_stable(layer, torch.full_like(self.ends, slots))) // page
        while bool((self.whole < target).any()):
            fresh = _run(self.whole, (target - self.whole).clamp(max=at_once))  # [K, M] pages
            self._write(layer, source, fresh)
            self.whole = self.whole + (fresh >= 0).sum(1)

    def _write(self, layer: int, source: PageSource, fresh: Tensor) -> None:
        s = source.gather(layer, _slots_of(fresh, self.index.page))
        shape, device = (*fresh.shape, self.index.page), self.ends.device
        pos = s.pos.to(device).view(shape)
        k = _filled(s.k.to(device).view(*shape, -1), pos)
        if not self._learned:
            self.shared = self.index.learn(k.flatten(1, 2))
            self._learned = k.shape[1] * k.shape[2]
        pos = pos.view(*fresh.shape, -1, self.index.selection_unit)
        first = pos.where(pos >= 0, torch.iinfo(pos.dtype).max).amin(3)
        last = pos.amax(3)
        first = first.masked_fill(last < 0, -1)
        new = self.index.summarize(k, self.shared)
        old = self.kept or tuple(t[:, :0] for t in new)
        heads, at = (fresh >= 0).nonzero(as_tuple=True)
        to = fresh[heads, at]
        kept = tuple(_put(a, b[heads, at], heads, to, 0) for a, b in zip(old, new, strict=True))
        first = _put(self.first, first[heads, at], heads, to, -1)
        last = _put(self.last, last[heads, at], heads, to, -1)
        self.kept, self.first, self.last = kept, first, last


def _slots_of(runs: Tensor, n: int) -> Tensor:
    """Return the slot indices [K, U * n] of ranges [K, U] of n slots; -1 = none in both."""
    inside = runs.unsqueeze(2) * n + torch.arange(n, device=runs.device)
    return inside.masked_fill(runs.unsqueeze(2) < 0, -1).flatten(1)


def padded(mask: Tensor) -> Tensor:
    """Return the indices [K, U] of each head's True entries of [K, P] in order, padded with -1."""
    heads, at = mask.nonzero(as_tuple=True)
    count = mask.sum(1)
    rank = torch.arange(heads.shape[0], device=mask.device) - (count.cumsum(0) - count)[heads]
    out = at.new_full((mask.shape[0], int(count.max())), -1)
    out[heads, rank] = at
    return out


def _run(start: Tensor, length: Tensor) -> Tensor:
    """Return [K, M]: start, start + 1, .. of each head up to its length, padded with -1; start and length are [K]."""
    steps = torch.arange(int(length.max()), device=start.device)
    return (start.unsqueeze(1) + steps).masked_fill(steps >= length.unsqueeze(1), -1)


def _put(old: Tensor, new: Tensor, heads: Tensor, to: Tensor, empty: int) -> Tensor:
    """Return `old` [K, P, ..] with `new` [n, ..] written at [heads, to], widened as needed."""
    wide = max(old.shape[1], int(to.max()) + 1 if to.numel() else 0)
    out = old.new_full((old.shape[0], wide, *old.shape[2:]), empty)
    out[:, : old.shape[1]] = old
    out[heads, to] = new
    return out


def _filled(k: Tensor, pos: Tensor) -> Tensor:
    """Return keys k [K, M, page, D] with each empty slot filled by a copy of the page's first stored key.

    The copies raise no score bound above that of the copied key. A page without stored keys is never selected.
    """
    empty = pos < 0
    if not bool(empty.any()):
        return k
    one = (~empty).int().argmax(2)[..., None, None].expand(-1, -1, 1, k.shape[3])
    return torch.where(empty.unsqueeze(3), k.gather(2, one), k)


# Page cache: the selected pages of an offloaded tier, kept on the compute device, with prefetch of likely pages.
#
# Neighbouring tokens select mostly the same pages, and draft rows select the pages of later tokens. The best pages that
# were not selected are the likeliest to be selected next, so they are copied while others are read. The page cache
# never changes the selection or the values that rows read.

NONE = torch.iinfo(torch.int64).max  # sorts after all slot indices


@dataclass(frozen=True, slots=True)
class _CachedSlots:
    index: Tensor  # [K, M] ascending, NONE last
    slots: Slots

    def place(self, index: Tensor) -> Tensor:
        """Return [K, M]: where the page cache holds slots `index`, -1 = none; -1 if it does not hold a slot."""
        at = torch.searchsorted(self.index, index.contiguous()).clamp(max=max(0, self.index.shape[1] - 1))
        return at.masked_fill((index < 0) | (self.index.gather(1, at) != index), -1)


class PageCache:
    """Page cache of a tier across a link, by slot index. `forget` must be called when slots may have changed."""

    def __init__(self, gather: Callable[[int, Tensor], Slots], gather_async: Callable[[int, Tensor], Arrival]) -> None:
        """`gather`, `gather_async`: as in `PageSource`, of the tier."""
        self._gather, self._gather_async = gather, gather_async
        self._held: dict[int, _CachedSlots] = {}
        self._coming: dict[int, tuple[Tensor, Arrival]] = {}
        self.asked = self.found = 0  # slots requested, over all heads, and cache hits among them
        self.flown = 0  # slots prefetched

    def gather(self, layer: int, index: Tensor, ahead: Tensor | None = None) -> Slots:
        """Return slots index [K, M] of each head, -1 = none. `ahead` [K, A]: slots to prefetch for the next pass."""
        cached = self._arrived(layer, index)
        if cached is None:
            got = self._gather(layer, index)
        else:
            place = cached.place(index)
            got = picked(cached.slots, place)
            self._fill(layer, got, index.masked_fill(place >= 0, -1))
            self.found += int((place >= 0).sum())
        self.asked += int((index >= 0).sum())
        self._hold(layer, index, got, cached, ahead)
        return got

    def forget(self, layer: int) -> None:
        """Drop the cached slots of this layer, because slots may have moved or changed."""
        self._held.pop(layer, None)
        if layer in self._coming:
            self._coming.pop(layer)[1]()  # a pending copy still needs its target buffer

    def nbytes(self, layer: int) -> int:
        """Return the bytes of this layer in the page cache."""
        if (cached := self._held.get(layer)) is None:
            return 0
        s = cached.slots
        return sum(t.nbytes for t in (cached.index, s.k, *([] if s.v is s.k else [s.v]), s.pos))

    def _arrived(self, layer: int, index: Tensor) -> _CachedSlots | None:
        """Return the cached slots, including slots prefetched since the last pass; None if nothing is cached."""
        cached = self._held.get(layer)
        if cached is not None and layer in self._coming:
            came, arrival = self._coming.pop(layer)
            cached = _sorted(torch.cat([cached.index, came], 1), _beside(cached.slots, arrival()))
        return cached

    def _fill(self, layer: int, got: Slots, missing: Tensor) -> None:
        """Fetch the slots `missing` [K, M], -1 = none, and write them into `got`."""
        lacks = missing >= 0
        if (packed := _packed(missing)) is None:
            return
        new = self._gather(layer, packed)
        heads, to = lacks.nonzero(as_tuple=True)
        rank = (lacks.cumsum(1) - 1)[heads, to]
        for t, fresh in {id(t): (t, of) for t, of in ((got.k, new.k), (got.v, new.v), (got.pos, new.pos))}.values():
            t[heads, to] = fresh[heads, rank].to(t)

    def _hold(self, layer: int, index: Tensor, got: Slots, cached: _CachedSlots | None, ahead: Tensor | None) -> None:
        """Cache the slots just read and the cached slots of `ahead`; start to prefetch the other slots of `ahead`."""
        if ahead is not None and cached is not None:
            place = cached.place(ahead)
            index = torch.cat([index, ahead.masked_fill(place < 0, -1)], 1)
            got = _beside(got, picked(cached.slots, place))
            ahead = ahead.masked_fill(place >= 0, -1)
        self._held[layer] = _sorted(index, got)
        if ahead is not None and (packed := _packed(ahead)) is not None:
            self._coming[layer] = packed.masked_fill(packed < 0, NONE), self._gather_async(layer, packed)
            self.flown += int((packed >= 0).sum())


def _sorted(index: Tensor, s: Slots) -> _CachedSlots:
    order = index.masked_fill(index < 0, NONE).sort(1)
    return _CachedSlots(order.values, picked(s, order.indices))


def _beside(a: Slots, b: Slots) -> Slots:
    k = torch.cat([a.k, b.k], 1)
    return Slots(k, k if a.v is a.k else torch.cat([a.v, b.v], 1), torch.cat([a.pos, b.pos.to(a.pos)], 1))


def _packed(index: Tensor) -> Tensor | None:
    """Move the indices of [K, M], -1 = none, to the front in order, cut to the longest head; None if there are none."""
    gone = index < 0
    count = int((~gone).sum(1).max()) if index.numel() else 0
    order = gone.to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
    return index.gather(1, order) if count else None
