"""A ladder: tiers in order, newest first. What is old moves down a rung at boundaries; every rung answers for itself.

Attention over the whole past is the merge of the rungs' parts, which is exact over everything that is stored
(FlashAttention, arXiv 2205.14135): a ladder of two dense rungs gives what one dense tier gives. Only a rung that stores
fewer bits rounds, and only when slots come down to it. KIVI (arXiv 2402.02750) keeps a residual of newest tokens in
full precision and packs older ones in groups: that is a first rung that holds `residual` slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvcli.kernels.attend_rows import Own
from kvcli.kernels.merge import Part
from kvcli.kv.shortage import Shortage
from kvcli.kv.slots import Masks, Sight, Slots, Tier, Usage, compact, empty_like

SLACK = 16  # a rung with others below may hold this part more than it has to


class Floor(Tier, Protocol):
    """A tier that can be undone, which is all that a rung needs beside a tier's own verbs."""

    def crop(self, n: int) -> None:
        """Forget every slot at position n or later."""


class Top(Floor, Protocol):
    """The first rung: new rows go there."""

    @property
    def dtype(self) -> torch.dtype: ...

    def reserve(self, n: int) -> None:
        """Room for n slots a head."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A tier and how much of the past stays in it at a boundary."""

    tier: Floor
    holds: int | None = None  # slots a head, sinks aside (up to SLACK more); None = all. Of the last: its room
    group: int = 1  # what is older moves down in multiples of so many slots a head


class Ladder:
    """A store of tiers. New rows are stored in `top`; `below` are the rungs under it, nearest first."""

    def __init__(
        self, top: Top, below: Sequence[Rung] = (), *, holds: int | None = None, group: int = 1, sinks: int = 0
    ):
        """`top` keeps `holds` slots a head at a boundary and the first `sinks` tokens of the text beside them."""
        self._top, self._sinks = top, sinks
        self._rungs = [Rung(top, holds, group), *below]
        self._widths: dict[int, list[int]] = {}  # slots of each rung when `slots` last showed a layer
        self._twice: set[tuple[int, int]] = set()  # rung and layer whose slots the rung below may hold too
        self.changes = 0

    @property
    def dtype(self) -> torch.dtype:
        """Numbers that new rows are stored in: those of the top."""
        return self._top.dtype

    def attend(self, layer: int, q: Tensor, sight: Sight, pos: Sequence[int], own: Own | None = None) -> list[Part]:
        """q [H, N, D] of rows at positions pos [N] -> the parts of every rung that holds something, the top's last."""
        below = [part for rung in self._rungs[:0:-1] for part in rung.tier.attend(layer, q, sight, pos)]
        if own is None:
            return [*below, *self._top.attend(layer, q, sight, pos)]
        return self._top.attend(layer, q, sight, pos, replace(own, before=below))

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] at positions from `start` on in the top."""
        self._top.append(layer, k, v, start)

    def take(self, layer: int, slots: Slots) -> None:
        """Store these slots and send the old ones down at once: how a past moves from one store to another."""
        self._top.take(layer, slots)
        self._demote(layer)

    def n_slots(self, layer: int) -> int:
        """Slots of the longest head, heads padded in each rung."""
        return sum(rung.tier.n_slots(layer) for rung in self._rungs)

    def slots(self, layer: int) -> Slots:
        """All rungs' slots side by side, the oldest rung first, in the numbers and on the device of the top."""
        found = [rung.tier.slots(layer) for rung in reversed(self._rungs)]
        self._widths[layer] = [s.n_slots for s in found]
        return beside(found)

    def newest(self, layer: int, n: int) -> Slots:
        """The n slots that each head stored last."""
        if n <= self._top.n_slots(layer) - self._sinks:
            return self._top.newest(layer, n)
        s = self.slots(layer)
        rank = s.pos.argsort(dim=1, descending=True).argsort(dim=1)  # [K, S] 0 = newest
        return compact(s, (rank < n) & (s.pos >= 0))

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Forget slots whose mask [K, S] is False, in the order that `slots` gave last; returns what fell out."""
        if layer not in self._widths:
            self.slots(layer)
        widths = self._widths.pop(layer)
        assert mask.shape[1] == sum(widths), "the mask is not of the slots that were shown last"
        fell = []
        for rung, part in zip(reversed(self._rungs), mask.split_with_sizes(widths, dim=1), strict=True):
            if part.shape[1]:
                fell.append(rung.tier.keep(layer, part))
        if any(s.n_slots for s in fell):
            self.changes += 1
        return beside(fell) if fell else empty_like(self._top.slots(layer))

    def crop(self, n: int) -> None:
        """Forget every slot at position n or later, in every rung; ends what a failure left half done."""
        self.changes += 1
        for at, layer in sorted(self._twice):
            self._once(at, layer)
        self._widths.clear()
        for rung in self._rungs:
            rung.tier.crop(n)

    def reserve(self, n: int) -> None:
        """Room for n slots a head, as far as they stay in the top; raises Shortage where all rungs have too little."""
        if all(rung.holds is not None for rung in self._rungs):
            most = self._sinks + sum(rung.holds or 0 for rung in self._rungs)
            if n > most:
                raise Shortage(f"{n:,} tokens do not fit in memory", lines=self._room(), most=most)
        holds = self._rungs[0].holds
        self._top.reserve(n if holds is None else min(n, self._sinks + holds))

    def settle(self, masks: Masks = ()) -> bool:
        """Evict what the masks let go, then send down what is old, layer by layer."""
        has_lost = False
        for layer in range(self.n_layers):
            if masks and (mask := masks[layer]) is not None:
                has_lost |= self.keep(layer, mask).n_slots > 0
            self._demote(layer)
        return has_lost

    @property
    def n_layers(self) -> int:
        return 1 + max(use.layer for use in self._top.usage())

    def usage(self) -> list[Usage]:
        """What each rung holds, newest rung first."""
        return [use for rung in self._rungs for use in rung.tier.usage()]

    def _demote(self, layer: int) -> None:
        for at, rung in enumerate(self._rungs):
            if rung.holds is None or rung.tier.n_slots(layer) < rung.holds + self._slack(at):
                continue
            slots = rung.tier.slots(layer)
            old = oldest(slots.pos, 0 if at else self._sinks, rung.holds, rung.group)  # [K, S]
            n = int(old.sum(1).max())
            if not n:
                continue
            self._check_room(at + 1, layer, n)
            self._twice.add((at, layer))  # until they are gone up here; a failure in between is mended by `crop`
            self._rungs[at + 1].tier.take(layer, compact(slots, old))
            rung.tier.keep(layer, ~old)
            self._twice.discard((at, layer))
            self._widths.pop(layer, None)
            self.changes += 1

    def _slack(self, at: int) -> int:
        """Slots a head beyond what a rung holds that are worth moving: a long rung is copied when its oldest go."""
        rung = self._rungs[at]
        is_last = at + 1 == len(self._rungs)
        return rung.group if is_last else max(rung.group, (rung.holds or 0) // SLACK)

    def _check_room(self, at: int, layer: int, n: int) -> None:
        """Whether rung `at` can take n slots a head of a layer; what it could hand down makes room."""
        if at == len(self._rungs):
            raise Shortage("keys and values have outgrown their memory", lines=self._room())
        rung = self._rungs[at]
        if at + 1 == len(self._rungs) and rung.holds is not None and rung.tier.n_slots(layer) + n > rung.holds:
            raise Shortage("keys and values have outgrown their memory", lines=self._room())

    def _once(self, at: int, layer: int) -> None:
        """What two rungs hold stays in the lower one."""
        upper, lower = self._rungs[at].tier, self._rungs[at + 1].tier.slots(layer)
        pos = upper.slots(layer).pos
        there = [torch.isin(a, b.to(a.device)) for a, b in zip(pos, lower.pos, strict=True)]
        upper.keep(layer, ~torch.stack(there))
        self._twice.discard((at, layer))

    def _room(self) -> list[str]:
        """How much each rung has room for, for people."""
        return [
            f"{rung.tier.usage()[0].tier}: {'all the rest' if rung.holds is None else f'{rung.holds:,} tokens'}"
            for rung in self._rungs
        ]


def beside(found: Sequence[Slots]) -> Slots:
    """Slots side by side, in the numbers and on the device of the last ones."""
    held = [s for s in found[:-1] if s.n_slots]
    end = found[-1]
    if not held:
        return end
    k = torch.cat([*(s.k.to(end.k) for s in held), end.k], 1)
    v = torch.cat([*(s.v.to(end.v) for s in held), end.v], 1)
    return Slots(k, v, torch.cat([*(s.pos.to(end.pos) for s in held), end.pos], 1))


def oldest(pos: Tensor, sinks: int, holds: int, group: int) -> Tensor:
    """Which slots move down, [K, S] bool for positions pos [K, S]: of each head its oldest past `holds`, by groups."""
    may = pos >= sinks  # empty slots have position -1, and no store has a negative number of sinks
    n = (may.sum(1, keepdim=True) - holds).clamp(min=0) // group * group  # [K, 1]
    late = torch.where(may, pos, torch.iinfo(pos.dtype).max)  # what may not move comes last
    age = late.argsort(dim=1, stable=True).argsort(dim=1)  # [K, S] 0 = oldest
    return may & (age < n)
