"""A ladder: tiers in order. What is old, or what a policy lets go, moves down a rung at boundaries; each rung answers.

Attention over the whole past is the merge of the rungs' parts, which is exact over everything that is stored
(FlashAttention, arXiv 2205.14135): a ladder of two dense rungs gives what one dense tier gives. Only a rung that stores
fewer bits rounds, and only when slots come down to it. KIVI (arXiv 2402.02750) keeps a residual of newest tokens in
full precision and packs older ones in groups: that is a first rung that holds `residual` slots.

Who leaves a rung is one question: the oldest beyond what it holds and, where the ladder `demotes`, what the masks of a
policy let go of the top. Such a policy governs the top alone, so the top is what the store shows, and views are made
of; what lies below is read in the way of its rung, and let go by nobody. A policy that answers with levels governs all
rungs, which it is shown side by side: slots go down to any lower one, and none comes up, as what was rounded stays so.
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
    """A store of tiers. New rows are stored in `top`; `below` are the rungs under it, nearest first."""

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
        """`top` keeps `holds` slots a head at a boundary and the first `sinks` tokens of the text beside them.

        `demotes`: what masks let go moves down. `drops`: where the last rung is full, what came to it first is
        forgotten; else CacheFull is raised.
        """
        assert below or not demotes, "there is nowhere to go"
        self._top, self._sinks = top, sinks
        self._rungs = [TierLevel(top, holds, group), *below]
        self._shown = self._rungs[:1] if demotes else self._rungs
        self._demotes, self._drops = demotes, drops
        self._layers = sorted({use.layer for use in top.usage()})  # that store
        self._waits = any(rung.attend_async is not None for rung in below)
        self._twice: set[tuple[int, int, int]] = set()  # rung and layer whose slots another, lower one may hold too
        self._has_dropped = False
        self.changes = 0

    @property
    def dtype(self) -> torch.dtype:
        """Numbers that new rows are stored in: those of the top."""
        return self._top.dtype

    @property
    def forgets(self) -> bool:
        """Is what masks let go gone, or some of it?"""
        return not self._demotes or self._has_dropped

    @property
    def batch_variant_reason(self) -> str:
        """What the first rung says that says anything."""
        return next(filter(None, (rung.tier.batch_variant_reason for rung in self._rungs)), "")

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, N, D] of rows at positions pos [N] -> the parts of every rung that holds something, the top's last."""
        asked = [rung.ask(layer, q, sight, pos) for rung in self._rungs[:0:-1]]
        if own is None or self._waits:  # the device reads its own while others are read elsewhere
            above = self._top.attend(layer, q, sight, pos, own)
            return [*(part for answer in asked for part in answer()), *above]
        below = [part for answer in asked for part in answer()]
        return self._top.attend(layer, q, sight, pos, replace(own, before=below))

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """The top, where there is nothing below it."""
        if len(self._rungs) > 1:
            return DeviceCache(why_not="slots lie in several tiers (kv.k_bits, memory.host)")
        most = self._rungs[0].holds  # which the host looks at where it is due
        return self._top.fixed(rows, more if most is None else min(more, max(0, most - self._top.n_slots(0))))

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] at positions from `start` on in the top."""
        self._top.append(layer, k, v, start)

    def take(self, layer: int, slots: Slots) -> None:
        """Store these slots and send the old ones down at once: how a past moves from one store to another."""
        self._top.take(layer, slots)
        self._demote(layer)

    def n_slots(self, layer: int) -> int:
        """Slots of the longest head, heads padded in each rung that is shown."""
        return sum(rung.tier.n_slots(layer) for rung in self._shown)

    def slots(self, layer: int) -> Slots:
        """Slots of all rungs side by side, the lowest first, in the numbers and on the device of the top.

        Of the top alone where the ladder demotes.
        """
        found = [rung.tier.slots(layer) for rung in reversed(self._shown)]
        return replace(concat_slots(found), spans=self._spans(layer))

    def newest(self, layer: int, n: int) -> Slots:
        """The n slots that each head stored last."""
        if n <= self._top.n_slots(layer) - self._sinks:
            return self._top.newest(layer, n)
        s = self.slots(layer)
        rank = s.pos.argsort(dim=1, descending=True).argsort(dim=1)  # [K, S] 0 = newest
        return compact(s, (rank < n) & (s.pos >= 0))

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Forget slots whose mask [K, S] is False, in the order of `slots`; returns what fell out."""
        fell = [self._rungs[at].tier.keep(layer, part) for at, part in self._by_rung(layer, mask) if part.shape[1]]
        if any(s.n_slots for s in fell):
            self.changes += 1
        return concat_slots(fell) if fell else empty_like(self._top.slots(layer))

    def crop(self, n: int) -> None:
        """Forget every slot at position n or later, in every rung; ends what a failure left half done."""
        self.changes += 1
        self._has_dropped &= n > 0
        for at, layer, to in sorted(self._twice):
            self._once(at, layer, to)
        for rung in self._rungs:
            rung.tier.crop(n)

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Room for n slots a head, as far as they stay in the top; raises CacheFull where all rungs have too little."""
        if not self._drops and all(rung.holds is not None for rung in self._rungs):
            most = self._sinks + sum(rung.holds or 0 for rung in self._rungs)
            if n > most:
                raise CacheFull(f"{n:,} tokens do not fit in memory", lines=list(map(str, self._rungs)), most=most)
        holds = self._rungs[0].holds
        self._top.reserve(n if holds is None else min(n, self._sinks + holds), layers)

    def reaches(self, n: int) -> bool:
        """Whether a row at position n finds all that it sees, once `crop(n)` has made it the next one."""
        return self._top.windows.reaches(n, lambda layer: [rung.tier.slots(layer).pos for rung in self._rungs])

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """Layer by layer: evict what the masks let go, or have it go down, send down what is old, and give back what
        windows hide from rows at `end` and later."""
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
        """By rung."""
        assert not self._twice, "what a failure left half done is mended by `crop`"
        rungs: State = {str(i): rung.tier.snapshot() for i, rung in enumerate(self._rungs)}
        return {"rungs": rungs, "has_dropped": self._has_dropped}

    def restore(self, given: SnapshotReader) -> None:
        """Each rung what it had."""
        for i, rung in enumerate(self._rungs):
            rung.tier.restore(given.part("rungs").part(str(i)))
        self._has_dropped = bool(given.number("has_dropped", 1))
        self.changes += 1

    def usage(self) -> list[Usage]:
        """What each rung holds, newest rung first."""
        top = self._top.usage()
        taken = {use.tier for use in top}
        below = [
            replace(use, tier=rung.name) if rung.name and use.tier in taken else use
            for rung in self._rungs[1:]
            for use in rung.tier.usage()
        ]
        return [*top, *below]

    def _spans(self, layer: int) -> list[LevelSpan]:
        """How the slots lie that `slots` shows."""
        return [LevelSpan(at, rung.tier.n_slots(layer), rung.group) for at, rung in enumerate(self._shown)][::-1]

    def _by_rung(self, layer: int, said: Tensor) -> list[tuple[int, Tensor]]:
        """What is said [K, S] of slots in the order of `slots`, by their rung."""
        spans = self._spans(layer)
        assert said.shape[1] == sum(span.n for span in spans), "it is not of the slots that are shown"
        parts = said.split_with_sizes([span.n for span in spans], dim=1)
        return [(span.rung, part) for span, part in zip(spans, parts, strict=True)]

    def _give_back(self, layer: int, end: int) -> None:
        if low := self._top.evict_below(layer, end):
            for rung in [rung for rung in self._rungs[1:] if rung.tier.n_slots(layer)]:
                pos = rung.tier.slots(layer).pos
                # by whole groups: what shares scales with a slot that stays does so too, and nothing is rounded again
                rung.tier.keep(layer, ~slots_to_demote(pos, 0, int((pos >= low).sum(1).max()), rung.group))
            self.changes += 1

    def _demote(self, layer: int, stays: Tensor | None = None) -> bool:
        """Send down what leaves each rung. `stays` [K, S]: what a policy keeps of the top, None = all of it.

        True if it lets go of any.
        """
        lets_go = False
        for at, rung in enumerate(self._rungs):
            mask = stays if at == 0 else None
            is_full = rung.is_full(layer, is_last=at + 1 == len(self._rungs))
            if mask is None and not is_full:
                continue
            slots = rung.tier.slots(layer)
            leaves = torch.zeros_like(slots.pos, dtype=torch.bool) if mask is None else (slots.pos >= 0) & ~mask
            lets_go |= mask is not None and bool(leaves.any())
            if is_full:
                left = slots.pos.masked_fill(leaves, -1)
                leaves |= slots_to_demote(left, 0 if at else self._sinks, rung.holds or 0, rung.group)
            if bool(leaves.any()):
                if at + 1 == len(self._rungs):
                    raise self._outgrown()
                self._send(at, layer, slots, torch.where(leaves, at + 1, at))
        return lets_go

    def _move(self, layer: int, levels: Tensor) -> bool:
        """Send slots to the rungs that levels [K, S] name, in the order of `slots`: those of the lowest rung first.

        True if any went.
        """
        goes = False
        for at, part in self._by_rung(layer, levels):
            if bool((part > at).any()):
                slots = self._rungs[at].tier.slots(layer)
                to = part.masked_fill(slots.pos < 0, at)
                if bool((to > at).any()):
                    self._send(at, layer, slots, to)
                    goes = True
        top = self._top.slots(layer)  # in no more room than it needs: who says levels counts bytes
        self._top.put(layer, compact(top, top.pos >= 0))
        return goes

    def _send(self, at: int, layer: int, slots: Slots, to: Tensor) -> None:
        """The slots of rung `at` go to the lower ones that `to` [K, S] names; those behind the last are forgotten."""
        sent = set()
        for rung in range(at + 1, len(self._rungs)):
            if bool((leaves := to == rung).any()):
                going = self._room_for(rung, layer, compact(slots, leaves))
                sent.add((at, layer, rung))
                self._twice |= sent  # until they are gone up here; `crop` mends a failure in between
                self._rungs[rung].tier.take(layer, going)
        self._rungs[at].tier.keep(layer, to <= at)
        self._has_dropped |= bool((to == len(self._rungs)).any())
        self._twice -= sent
        self.changes += 1

    def _room_for(self, at: int, layer: int, s: Slots) -> Slots:
        """Of these, which come down to rung `at`, those that have room there once it has let go of others, if it may.

        Raises CacheFull. A rung with others below hands down its own.
        """
        if at + 1 < len(self._rungs) or self._rungs[at].has_room(layer, s.n_slots):
            return s
        if not self._drops:
            raise self._outgrown()
        self._has_dropped = True
        return self._rungs[at].forget(layer, s)

    def _outgrown(self) -> CacheFull:
        return CacheFull("keys and values have outgrown their memory", lines=list(map(str, self._rungs)))

    def _once(self, at: int, layer: int, to: int) -> None:
        """What two rungs hold stays in the lower one."""
        upper, lower = self._rungs[at].tier, self._rungs[to].tier.slots(layer)
        pos = upper.slots(layer).pos
        there = [torch.isin(a, b.to(a.device)) for a, b in zip(pos, lower.pos, strict=True)]
        upper.keep(layer, ~torch.stack(there))
        self._twice.discard((at, layer, to))


def slots_to_demote(pos: Tensor, sinks: int, holds: int, group: int) -> Tensor:
    """Which slots move down, [K, S] bool for positions pos [K, S]: of each head its oldest past `holds`, by groups."""
    may = pos >= sinks  # empty slots have position -1, and no store has a negative number of sinks
    n = (may.sum(1, keepdim=True) - holds).clamp(min=0) // group * group  # [K, 1]
    late = torch.where(may, pos, torch.iinfo(pos.dtype).max)  # what may not move comes last
    age = late.argsort(dim=1, stable=True).argsort(dim=1)  # [K, S] 0 = oldest
    return may & (age < n)
