"""A tiered KV cache. At compression points, old slots or slots that the policy drops are demoted to a lower tier.

Attention runs on every level and the partial results are merged, which is exact over all stored slots (FlashAttention,
arXiv 2205.14135): two dense levels give the result of one dense tier. Only a level of fewer bits is lossy, because
slots are quantized when they are demoted to it. KIVI (arXiv 2402.02750) keeps a residual of newest tokens in full
precision and quantizes older tokens in groups: the residual is a first level of `residual` slots.

A level demotes its oldest slots beyond its limit. If the cache `demotes`, the top also demotes the slots that the masks
of a policy drop. Such a policy sees the top alone, so `slots` and cache views cover only the top; lower levels are read
as their tier reads them, and no policy evicts their slots. A policy that returns levels sees the slots of all levels
concatenated. It may demote slots to any lower level; no slot is promoted, because quantization cannot be undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.cache.level import TierLevel, TopTier
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import AttentionParams, LevelSpan, Masks, Slots, Usage, compact, concat_slots, empty_like
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.device_tables import DeviceCache


class TieredCache:
    """A KV cache of tiers. New rows are stored in `top`; `below` are the lower levels, nearest first."""

    def __init__(
        self,
        top: TopTier,
        below: Sequence[TierLevel] = (),
        *,
        holds: int | None = None,
        group: int = 1,
        sinks: int = 0,
        demotes: bool = False,
        drops: bool = False,
    ):
        """Set up the levels. At a compression point `top` keeps `holds` slots per head plus the first `sinks` tokens.

        `demotes`: slots dropped by masks are demoted. `drops`: if the last level is full, its oldest slots are
        evicted; otherwise CacheFull is raised.
        """
        assert below or not demotes, "there is no lower tier"
        self._top, self._sinks = top, sinks
        self._levels = [TierLevel(top, holds, group), *below]
        self._read_levels = self._levels[:1] if demotes else self._levels
        self._demotes, self._drops = demotes, drops
        self._layers = sorted({use.layer for use in top.usage()})  # layers that store slots
        self._waits = any(level.attend_async is not None for level in below)
        self._twice: set[tuple[int, int, int]] = set()  # (level, layer, lower level) that may both hold a slot
        self._has_dropped = False
        self.changes = 0

    @property
    def dtype(self) -> torch.dtype:
        """Data type of new rows: that of the top."""
        return self._top.dtype

    @property
    def forgets(self) -> bool:
        """True if some slots dropped by masks are evicted for good."""
        return not self._demotes or self._has_dropped

    @property
    def batch_variant_reason(self) -> str:
        """Return the reason of the first level that is batch variant, or ""."""
        return next(filter(None, (level.tier.batch_variant_reason for level in self._levels)), "")

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over each non-empty level, the top last."""
        asked = [level.ask(layer, q, params, pos) for level in self._levels[:0:-1]]
        if own is None or self._waits:  # the device attends to the top while other levels run in parallel
            above = self._top.attend(layer, q, params, pos, own)
            return [*(part for answer in asked for part in answer()), *above]
        below = [part for answer in asked for part in answer()]
        return self._top.attend(layer, q, params, pos, replace(own, before=below))

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the device tables of the top if there is no lower level."""
        if len(self._levels) > 1:
            return DeviceCache(why_not="the KV cache has several tiers (kv.k_bits, memory.host)")
        most = self._levels[0].holds  # the host checks this limit at compression points
        return self._top.fixed(rows, more if most is None else min(more, max(0, most - self._top.n_slots(0))))

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] at positions from `start` on in the top."""
        self._top.append(layer, k, v, start)

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots and demote the old ones at once. Used to move a KV cache into another one."""
        self._top.take(layer, slots)
        self._demote(layer)

    def n_slots(self, layer: int) -> int:
        """Return the number of slots of the longest head, with the padding of each level in `slots`."""
        return sum(level.tier.n_slots(layer) for level in self._read_levels)

    def slots(self, layer: int) -> Slots:
        """Return the slots of all levels, the lowest first, in the data type and on the device of the top.

        If the cache demotes slots that masks drop, only those of the top.
        """
        found = [level.tier.slots(layer) for level in reversed(self._read_levels)]
        return replace(concat_slots(found), spans=self._spans(layer))

    def newest(self, layer: int, n: int) -> Slots:
        """Return the n slots that each head stored last."""
        if n <= self._top.n_slots(layer) - self._sinks:
            return self._top.newest(layer, n)
        s = self.slots(layer)
        rank = s.pos.argsort(dim=1, descending=True).argsort(dim=1)  # [K, S] 0 = newest
        return compact(s, (rank < n) & (s.pos >= 0))

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Evict slots whose mask [K, S] is False, in the order of `slots`, and return them."""
        fell = [self._levels[at].tier.keep(layer, part) for at, part in self._by_level(layer, mask) if part.shape[1]]
        if any(s.n_slots for s in fell):
            self.changes += 1
        return concat_slots(fell) if fell else empty_like(self._top.slots(layer))

    def crop(self, n: int) -> None:
        """Remove slots at position n or later from every level and finish demotions that a failure interrupted."""
        self.changes += 1
        self._has_dropped &= n > 0
        for at, layer, to in sorted(self._twice):
            self._once(at, layer, to)
        for level in self._levels:
            level.tier.crop(n)

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Allocate capacity in the top for its share of n slots per head. Raises CacheFull if n exceeds all levels."""
        if not self._drops and all(level.holds is not None for level in self._levels):
            most = self._sinks + sum(level.holds or 0 for level in self._levels)
            if n > most:
                raise CacheFull(f"{n:,} tokens do not fit in memory", lines=list(map(str, self._levels)), most=most)
        holds = self._levels[0].holds
        self._top.reserve(n if holds is None else min(n, self._sinks + holds), layers)

    def reaches(self, n: int) -> bool:
        """True if, after `crop(n)`, a row at position n finds every slot inside its sliding windows."""
        return self._top.windows.reaches(n, lambda layer: [level.tier.slots(layer).pos for level in self._levels])

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """For each layer, evict or demote slots that masks drop, demote old slots, and evict slots that windows hide
        from rows at `end` and later."""
        lets_go = False
        for layer in self._layers if layers is None else filter(self._layers.__contains__, layers):
            mask = masks[layer] if masks else None
            is_mask = mask is not None and mask.dtype is torch.bool
            if mask is not None and not is_mask:
                lets_go |= self._move(layer, mask)
            elif mask is not None and not self._demotes:
                lets_go |= self.keep(layer, mask).n_slots > 0
            lets_go |= self._demote(layer, mask if is_mask and self._demotes else None)
            self._give_back(layer, end)
        return lets_go

    def snapshot(self) -> State:
        """Return the snapshots of all levels."""
        assert not self._twice, "a failed step must be undone by `crop`"
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

    def _spans(self, layer: int) -> list[LevelSpan]:
        """Return the levels of the slots that `slots` returns."""
        return [LevelSpan(at, level.tier.n_slots(layer), level.group) for at, level in enumerate(self._read_levels)][
            ::-1
        ]

    def _by_level(self, layer: int, said: Tensor) -> list[tuple[int, Tensor]]:
        """Split a tensor [K, S] in the order of `slots` by level."""
        spans = self._spans(layer)
        assert said.shape[1] == sum(span.n for span in spans), "it does not match the slots of the view"
        parts = said.split_with_sizes([span.n for span in spans], dim=1)
        return [(span.level, part) for span, part in zip(spans, parts, strict=True)]

    def _give_back(self, layer: int, end: int) -> None:
        if low := self._top.evict_below(layer, end):
            for level in [level for level in self._levels[1:] if level.tier.n_slots(layer)]:
                pos = level.tier.slots(layer).pos
                # by whole groups: a group with a remaining slot is kept, so that no slot is quantized again
                level.tier.keep(layer, ~slots_to_demote(pos, 0, int((pos >= low).sum(1).max()), level.group))
            self.changes += 1

    def _demote(self, layer: int, stays: Tensor | None = None) -> bool:
        """Demote slots of each level. `stays` [K, S]: slots of the top that a policy keeps, None = all.

        Returns True if the policy dropped slots.
        """
        lets_go = False
        for at, level in enumerate(self._levels):
            mask = stays if at == 0 else None
            is_full = level.is_full(layer, is_last=at + 1 == len(self._levels))
            if mask is None and not is_full:
                continue
            slots = level.tier.slots(layer)
            leaves = torch.zeros_like(slots.pos, dtype=torch.bool) if mask is None else (slots.pos >= 0) & ~mask
            lets_go |= mask is not None and bool(leaves.any())
            if is_full:
                left = slots.pos.masked_fill(leaves, -1)
                leaves |= slots_to_demote(left, 0 if at else self._sinks, level.holds or 0, level.group)
            if bool(leaves.any()):
                if at + 1 == len(self._levels):
                    raise self._outgrown()
                self._send(at, layer, slots, torch.where(leaves, at + 1, at))
        return lets_go

    def _move(self, layer: int, levels: Tensor) -> bool:
        """Demote slots to the levels in levels [K, S], in the order of `slots`; slots of the lowest level move first.

        Returns True if any slot moved.
        """
        goes = False
        for at, part in self._by_level(layer, levels):
            if bool((part > at).any()):
                slots = self._levels[at].tier.slots(layer)
                to = part.masked_fill(slots.pos < 0, at)
                if bool((to > at).any()):
                    self._send(at, layer, slots, to)
                    goes = True
        top = self._top.slots(layer)  # without spare capacity, because the precision budget counts bytes
        self._top.put(layer, compact(top, top.pos >= 0))
        return goes

    def _send(self, at: int, layer: int, slots: Slots, to: Tensor) -> None:
        """Demote slots of level `at` to the levels in `to` [K, S]; slots with a level after the last are evicted."""
        sent = set()
        for level in range(at + 1, len(self._levels)):
            if bool((leaves := to == level).any()):
                going = self._room_for(level, layer, compact(slots, leaves))
                sent.add((at, layer, level))
                self._twice |= sent  # until the upper copy is removed; `crop` repairs a failure in between
                self._levels[level].tier.take(layer, going)
        self._levels[at].tier.keep(layer, to <= at)
        self._has_dropped |= bool((to == len(self._levels)).any())
        self._twice -= sent
        self.changes += 1

    def _room_for(self, at: int, layer: int, s: Slots) -> Slots:
        """Return the slots of `s` that fit level `at`, after evicting older slots there if the cache `drops`.

        Raises CacheFull. Only the last level is checked, because other levels demote their own slots.
        """
        if at + 1 < len(self._levels) or self._levels[at].has_room(layer, s.n_slots):
            return s
        if not self._drops:
            raise self._outgrown()
        self._has_dropped = True
        return self._levels[at].forget(layer, s)

    def _outgrown(self) -> CacheFull:
        return CacheFull("the KV cache has outgrown its memory", lines=list(map(str, self._levels)))

    def _once(self, at: int, layer: int, to: int) -> None:
        """Remove slots from level `at` that level `to` stores too."""
        upper, lower = self._levels[at].tier, self._levels[to].tier.slots(layer)
        pos = upper.slots(layer).pos
        there = [torch.isin(a, b.to(a.device)) for a, b in zip(pos, lower.pos, strict=True)]
        upper.keep(layer, ~torch.stack(there))
        self._twice.discard((at, layer, to))


def slots_to_demote(pos: Tensor, sinks: int, holds: int, group: int) -> Tensor:
    """Return slots to demote, [K, S] bool for pos [K, S]: the oldest of each head beyond `holds`, in whole groups."""
    may = pos >= sinks  # empty slots have position -1, and sinks >= 0
    n = (may.sum(1, keepdim=True) - holds).clamp(min=0) // group * group  # [K, 1]
    late = torch.where(may, pos, torch.iinfo(pos.dtype).max)  # slots that must not move are sorted last
    age = late.argsort(dim=1, stable=True).argsort(dim=1)  # [K, S] 0 = oldest
    return may & (age < n)
