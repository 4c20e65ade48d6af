"""Where keys and values lie under `[memory]`: how much of them the device holds, and how much lies elsewhere."""

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
    """Bytes."""

    device: int
    host: int = 0  # memory of the host, behind a GPU
    disk: int = 0
    over: int = 0  # for which there is no room anywhere


@dataclass(frozen=True, slots=True)
class HeldSlots:
    """Slots a head."""

    settled: int  # at a boundary, the longest
    fresh: int  # that come between two boundaries, on top
    nbytes: Callable[[int], int]  # of so many slots on the device -> bytes there
    stored: int = 0  # in all tiers, where a policy moves down what it does not keep
    moved: int = 0  # of these the most that lie below, later than most lie on top
    drops: bool = False  # those for which there is no room below go

    @property
    def most(self) -> int:
        return self.settled + self.fresh


@dataclass(frozen=True, slots=True)
class TierLimits:
    """What a store is told of its room, so that a plan refuses what the store would."""

    room: Callable[[int, int], CacheCapacity]  # tokens of a pass, bytes free where no size is given
    free: int  # of the device, for a whole plan
    host: int = 0  # of host memory behind it

    def spread(self, held: HeldSlots, chunk: int, beside: int) -> KVPlacement:
        """Places for what is held, the device first; `beside`: bytes of what else the plan needs there."""
        room, whole = self.room(chunk, max(0, self.free - beside)), held.nbytes(held.most)
        cap = size_of(room.memory.device) if room.memory.device != "auto" else room.free
        try:
            most = room.max_slots
        except CacheFull:  # not even for what comes between two boundaries
            return KVPlacement(min(whole, cap), over=max(1, whole - cap))
        if most is None:
            return KVPlacement(whole)
        stored = max(held.settled, min(held.stored, most) if held.drops else held.stored)
        over = max(0, stored - most) * room.narrow
        here = (room.on_device or 0) * (SLACK + 1) // SLACK + room.between  # before the oldest move
        device = min(whole, cap, held.nbytes(room.always + here + STEP))
        left = max(0, whole + (stored - held.settled) * room.narrow - device - over)  # as it lies below the top
        left = max(left, min(held.moved, stored) * room.narrow)
        host = min(left, room.in_host * room.narrow)
        away = left // room.narrow * (room.far - room.index)
        return KVPlacement(device + away, host, (left - host) * room.wide // room.narrow, over)
