"""Divide the KV cache among device, host memory and disk as `[memory]` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.kv.cache.level import SLACK
from kvcli.kv.footprint import STEP
from kvcli.kv.out_of_memory import CacheFull
from kvcli.settings.schema import size_of

if TYPE_CHECKING:
    from kvcli.kv.capacity import CacheCapacity


@dataclass(frozen=True, slots=True)
class KVPlacement:
    """Bytes of KV in each place."""

    device: int
    host: int = 0  # host memory, beside a GPU
    disk: int = 0
    over: int = 0  # bytes that fit nowhere


@dataclass(frozen=True, slots=True)
class HeldSlots:
    """Slots per head, by tier."""

    settled: int  # the most slots at a compression point
    fresh: int  # slots added between two compression points
    nbytes: Callable[[int], int]  # slots on the device -> bytes there
    stored: int = 0  # slots in all tiers, if a policy demotes
    moved: int = 0  # of `stored`: the most slots in lower tiers; this peak is later than the top tier's
    drops: bool = False  # slots that fit no lower tier are evicted

    @property
    def most(self) -> int:
        return self.settled + self.fresh


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Capacity limits of the tiers, equal to those of a KV cache, so that a plan refuses what the cache refuses."""

    room: Callable[[int, int], CacheCapacity]  # tokens of a pass, free bytes if no size is given -> capacity
    free: int  # bytes of the device for the whole plan
    host: int = 0  # bytes of host memory beside it

    def spread(self, held: HeldSlots, chunk: int, beside: int) -> KVPlacement:
        """Place the slots, on the device first; `beside`: bytes of all else that the plan needs on the device."""
        room, whole = self.room(chunk, max(0, self.free - beside)), held.nbytes(held.most)
        cap = size_of(room.memory.device) if room.memory.device != "auto" else room.free
        try:
            most = room.max_slots
        except CacheFull:  # too small even for the slots between two compression points
            return KVPlacement(min(whole, cap), over=max(1, whole - cap))
        if most is None:
            return KVPlacement(whole)
        stored = max(held.settled, min(held.stored, most) if held.drops else held.stored)
        over = max(0, stored - most) * room.narrow
        here = (room.on_device or 0) * (SLACK + 1) // SLACK + room.between  # before the oldest slots are demoted
        device = min(whole, cap, held.nbytes(room.always + here + STEP))
        left = max(0, whole + (stored - held.settled) * room.narrow - device - over)  # in the size of lower tiers
        left = max(left, min(held.moved, stored) * room.narrow)
        host = min(left, room.in_host * room.narrow)
        away = left // room.narrow * (room.far - room.index)
        return KVPlacement(device + away, host, (left - host) * room.wide // room.narrow, over)
