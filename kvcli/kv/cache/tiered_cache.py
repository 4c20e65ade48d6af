"""A tiered KV cache. At compression points, old slots or slots that a policy does not keep go to a lower level.

Each level is one tier. Attention runs on every level and the partial results are merged without approximation, up to
rounding (FlashAttention, arXiv 2205.14135). Only a level of fewer bits is lossy, because slots are quantized when they
are demoted to it. KIVI (arXiv 2402.02750) keeps a residual of newest tokens in full
precision and quantizes older tokens in groups: the residual is a first level of `residual` slots.

A level demotes its oldest slots beyond its limit. If the cache `demotes`, the top also demotes the slots that a mask
does not keep. Policies then see the top alone, because `slots` and cache views cover only the top: no policy evicts
slots of lower levels, and rows read them as each tier allows (all slots, or selected pages). A policy that returns
levels sees the slots of all levels. It may move slots down to any level, never up: quantization cannot be undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import AttentionParams, LevelSpan, Masks, Slots, Usage, compact, concat_slots, empty_like
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.device_tables import DeviceCache, LowerLayer


class TieredCache:
    """A KV cache of tiers. New rows are stored in `top`; `below` are the lower levels, nearest first."""

    def __init__(
        self,
        top: Dense,
        below: Sequence[TierLevel] = (),
        *,
        holds: int | None = None,
        group: int = 1,
        sinks: int = 0,
        demotes: bool = False,
        evicts_oldest: bool = False,
    ):
        """`holds`: limit of `top` in slots per head, without the first `sinks` tokens. A compression point cuts it to
        the limit once `TierLevel.is_full`. `demotes`: slots that masks do not keep are demoted, not evicted.
        `evicts_oldest`: if the last level is full, its oldest slots are evicted; otherwise CacheFull is raised."""
        assert below or not demotes, "there is no lower level to demote slots to"
        self._top, self._sinks = top, sinks
        self._levels = [TierLevel(top, holds, group), *below]
        self._read_levels = self._levels[:1] if demotes else self._levels
        self._demotes, self._evicts_oldest = demotes, evicts_oldest
        self._layers = sorted({use.layer for use in top.usage()})  # layers that store slots
        self._waits = any(level.attend_async is not None for level in below)
        self._duplicates: set[tuple[int, int, int]] = set()  # (level, layer, lower level): both levels may store a slot
        self._has_dropped = False
        self.changes = 0

    @property
    def dtype(self) -> torch.dtype:
        """Data type of new rows: that of the top."""
        return self._top.dtype

    @property
    def forgets(self) -> bool:
        """True if slots that masks do not keep are evicted, or slots were evicted because the last level was full."""
        return not self._demotes or self._has_dropped

    @property
    def batch_variant_reason(self) -> str:
        """Return the reason of the first level that is batch variant, or ""."""
        return next(filter(None, (level.tier.batch_variant_reason for level in self._levels)), "")

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over each non-empty level, the top last."""
        answers = [level.ask(layer, q, params, pos) for level in self._levels[:0:-1]]
        if own is None or self._waits:  # the device attends to the top while other levels run in parallel
            above = self._top.attend(layer, q, params, pos, own)
            return [*(part for answer in answers for part in answer()), *above]
        below = [part for answer in answers for part in answer()]
        return self._top.attend(layer, q, params, pos, replace(own, before=below))

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the device tables of all levels that store slots; new rows are stored in the top."""
        lower = [level.tier for level in self._levels[:0:-1]]
        if why := next((why for tier in lower if isinstance(why := tier.device_layer(self._layers[0]), str)), ""):
            return DeviceCache(why_not=why)
        most = self._levels[0].holds  # the host checks this limit at compression points
        more = more if most is None else min(more, max(0, most - self._top.n_slots(0)))
        cache, below = self._top.device_tables(rows, more), list[list[LowerLayer]]()
        for layer in range(len(cache.layers)):
            found = [tier.device_layer(layer) for tier in lower if tier.n_slots(layer)]
            below.append([one for one in found if not isinstance(one, str)])
        return replace(cache, below=below)

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] at positions from `start` on in the top."""
        self._top.append(layer, k, v, start)

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots, and demote at once those beyond the limits. A whole KV cache is moved into this one by it."""
        self._top.take(layer, slots)
        self._demote(layer)

    def n_slots(self, layer: int) -> int:
        """Return the number of slots of the longest head, with the padding of each level in `slots`."""
        return sum(level.tier.n_slots(layer) for level in self._read_levels)

    def slots(self, layer: int) -> Slots:
        """Return the slots of all levels, the lowest first, in the data type and on the device of the top.

        If the cache `demotes`, return the slots of the top alone.
        """
        found = [level.tier.slots(layer) for level in reversed(self._read_levels)]
        return replace(concat_slots(found), levels=self._level_spans(layer))

    def newest(self, layer: int, n: int) -> Slots:
        """Return the n slots that each head stored last."""
        if n <= self._top.n_slots(layer) - self._sinks:
            return self._top.newest(layer, n)
        s = self.slots(layer)
        rank = s.pos.argsort(dim=1, descending=True).argsort(dim=1)  # [K, S] 0 = newest
        return compact(s, (rank < n) & (s.pos >= 0))

    def evict_except(self, layer: int, mask: Tensor) -> Slots:
        """Evict slots whose mask [K, S] is False, in the order of `slots`, and return them."""
        parts = [(self._levels[at].tier, part) for at, part in self._by_level(layer, mask) if part.shape[1]]
        evicted = [tier.evict_except(layer, part) for tier, part in parts]
        if any(s.n_slots for s in evicted):
            self.changes += 1
        return concat_slots(evicted) if evicted else empty_like(self._top.slots(layer))

    def crop(self, n: int) -> None:
        """Remove slots at position n or later from every level and finish demotions that a failure interrupted."""
        self.changes += 1
        self._has_dropped &= n > 0
        for at, layer, to in sorted(self._duplicates):
            self._remove_duplicates(at, layer, to)
        for level in self._levels:
            level.tier.crop(n)

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Allocate capacity in the top for its share of n slots per head. Raises CacheFull if n exceeds all levels."""
        if not self._evicts_oldest and all(level.holds is not None for level in self._levels):
            most = self._sinks + sum(level.holds or 0 for level in self._levels)
            if n > most:
                raise CacheFull(f"{n:,} tokens do not fit in memory", lines=list(map(str, self._levels)), most=most)
        holds = self._levels[0].holds
        self._top.reserve(n if holds is None else min(n, self._sinks + holds), layers)

    def reaches(self, n: int) -> bool:
        """True if, after `crop(n)`, a row at position n finds every slot inside its sliding windows."""
        return self._top.windows.reaches(n, lambda layer: [level.tier.slots(layer).pos for level in self._levels])

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """In each layer, evict or demote the slots that masks do not keep, demote old slots, and evict slots that
        windows hide from rows at `end` and later. Returns True if masks evicted or demoted a slot."""
        has_moved = False
        for layer in self._layers if layers is None else filter(self._layers.__contains__, layers):
            mask = masks[layer] if masks else None
            is_mask = mask is not None and mask.dtype is torch.bool
            if mask is not None and not is_mask:
                has_moved |= self._move(layer, mask)
            elif mask is not None and not self._demotes:
                has_moved |= self.evict_except(layer, mask).n_slots > 0
            has_moved |= self._demote(layer, mask if is_mask and self._demotes else None)
            self._evict_hidden(layer, end)
        return has_moved

    def snapshot(self) -> State:
        """Return the snapshots of all levels."""
        assert not self._duplicates, "a demotion has failed and was not repaired by `crop`"
        levels: State = {str(i): level.tier.snapshot() for i, level in enumerate(self._levels)}
        return {"levels": levels, "has_dropped": self._has_dropped}

    def restore(self, given: SnapshotReader) -> None:
        """Restore all levels."""
        for i, level in enumerate(self._levels):
            level.tier.restore(given.part("levels").part(str(i)))
        self._has_dropped = bool(given.number("has_dropped", 1))
        self.changes += 1

    def usage(self) -> list[Usage]:
        """Return the memory use of each level, the top first."""
        top = self._top.usage()
        taken = {use.tier for use in top}
        below = [
            replace(use, tier=level.name) if level.name and use.tier in taken else use
            for level in self._levels[1:]
            for use in level.tier.usage()
        ]
        return [*top, *below]

    def _level_spans(self, layer: int) -> list[LevelSpan]:
        """Return which columns of the slots that `slots` returns are in which level."""
        levels = reversed([*enumerate(self._read_levels)])
        return [LevelSpan(at, level.tier.n_slots(layer), level.group) for at, level in levels]

    def _by_level(self, layer: int, mask: Tensor) -> list[tuple[int, Tensor]]:
        """Split a mask [K, S] in the order of `slots` by level."""
        spans = self._level_spans(layer)
        assert mask.shape[1] == sum(span.n for span in spans), "the mask does not match the slots that `slots` returns"
        parts = mask.split_with_sizes([span.n for span in spans], dim=1)
        return [(span.level, part) for span, part in zip(spans, parts, strict=True)]

    def _evict_hidden(self, layer: int, end: int) -> None:
        if low := self._top.evict_below(layer, end):
            for level in [level for level in self._levels[1:] if level.tier.n_slots(layer)]:
                pos = level.tier.slots(layer).pos
                # by whole groups: a group with a remaining slot is kept, so that no slot is quantized again
                level.tier.evict_except(layer, ~slots_to_demote(pos, 0, int((pos >= low).sum(1).max()), level.group))
            self.changes += 1

    def _demote(self, layer: int, kept: Tensor | None = None) -> bool:
        """Demote old slots of each level, and slots of the top that a policy does not keep (`kept` [K, S], None = all).

        Returns True if there were slots that the policy does not keep.
        """
        has_moved = False
        for at, level in enumerate(self._levels):
            mask = kept if at == 0 else None
            is_full = level.is_full(layer, is_last=at + 1 == len(self._levels))
            if mask is None and not is_full:
                continue
            slots = level.tier.slots(layer)
            leaves = torch.zeros_like(slots.pos, dtype=torch.bool) if mask is None else (slots.pos >= 0) & ~mask
            has_moved |= mask is not None and bool(leaves.any())
            if is_full:
                left = slots.pos.masked_fill(leaves, -1)
                leaves |= slots_to_demote(left, 0 if at else self._sinks, level.holds or 0, level.group)
            if bool(leaves.any()):
                if at + 1 == len(self._levels):
                    raise self._outgrown()
                self._demote_slots(at, layer, slots, torch.where(leaves, at + 1, at))
        return has_moved

    def _move(self, layer: int, levels: Tensor) -> bool:
        """Demote slots to the levels in levels [K, S], in the order of `slots`; slots of the lowest level move first.

        Returns True if any slot moved.
        """
        has_moved = False
        for at, part in self._by_level(layer, levels):
            if bool((part > at).any()):
                slots = self._levels[at].tier.slots(layer)
                to = part.masked_fill(slots.pos < 0, at)
                if bool((to > at).any()):
                    self._demote_slots(at, layer, slots, to)
                    has_moved = True
        top = self._top.slots(layer)  # without spare capacity, because the precision budget counts bytes
        self._top.put(layer, compact(top, top.pos >= 0))
        return has_moved

    def _demote_slots(self, at: int, layer: int, slots: Slots, to: Tensor) -> None:
        """Demote slots of level `at` to the levels in `to` [K, S]; slots with a level after the last are evicted."""
        sent = set()
        for level in range(at + 1, len(self._levels)):
            if bool((leaves := to == level).any()):
                going = self._room_for(level, layer, compact(slots, leaves))
                sent.add((at, layer, level))
                self._duplicates |= sent  # until the upper copy is removed; `crop` repairs a failure in between
                self._levels[level].tier.take(layer, going)
        self._levels[at].tier.evict_except(layer, to <= at)
        self._has_dropped |= bool((to == len(self._levels)).any())
        self._duplicates -= sent
        self.changes += 1

    def _room_for(self, at: int, layer: int, s: Slots) -> Slots:
        """Return the slots of `s` that fit level `at`, after evicting older slots there if it `evicts_oldest`.

        Raises CacheFull. Only the last level is checked, because other levels demote their own slots.
        """
        if at + 1 < len(self._levels) or self._levels[at].has_room(layer, s.n_slots):
            return s
        if not self._evicts_oldest:
            raise self._outgrown()
        self._has_dropped = True
        return self._levels[at].forget(layer, s)

    def _outgrown(self) -> CacheFull:
        return CacheFull("the KV cache has outgrown its memory", lines=list(map(str, self._levels)))

    def _remove_duplicates(self, at: int, layer: int, to: int) -> None:
        """Remove from level `at` the slots that level `to` stores too."""
        upper, lower = self._levels[at].tier, self._levels[to].tier.slots(layer)
        pos = upper.slots(layer).pos
        stored_below = [torch.isin(a, b.to(a.device)) for a, b in zip(pos, lower.pos, strict=True)]
        upper.evict_except(layer, ~torch.stack(stored_below))
        self._duplicates.discard((at, layer, to))


def slots_to_demote(pos: Tensor, sinks: int, holds: int, group: int) -> Tensor:
    """Return slots to demote, [K, S] bool for pos [K, S]: the oldest of each head beyond `holds`, in whole groups."""
    may = pos >= sinks  # empty slots have position -1, and sinks >= 0
    n = (may.sum(1, keepdim=True) - holds).clamp(min=0) // group * group  # [K, 1]
    late = torch.where(may, pos, torch.iinfo(pos.dtype).max)  # slots that must not move are sorted last
    age = late.argsort(dim=1, stable=True).argsort(dim=1)  # [K, S] 0 = oldest
    return may & (age < n)
