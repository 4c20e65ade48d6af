"""Where keys and values lie under `[memory]`: how much of them the device holds, and how much lies elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.kv.shortage import Shortage
from kvcli.schema import size_of

if TYPE_CHECKING:
    from kvcli.kv.room import Room


@dataclass(frozen=True, slots=True)
class Places:
    """Bytes."""

    device: int
    host: int = 0  # memory of the host, behind a GPU
    disk: int = 0
    over: int = 0  # for which there is no room anywhere


@dataclass(frozen=True, slots=True)
class Held:
    """Slots a head."""

    settled: int  # at a boundary, the longest
    fresh: int  # that come between two boundaries, on top
    nbytes: Callable[[int], int]  # of so many slots on the device -> bytes there

    @property
    def most(self) -> int:
        return self.settled + self.fresh


@dataclass(frozen=True, slots=True)
class Caps:
    """What a store is told of its room, so that a plan refuses what the store would."""

    room: Callable[[int, int], Room]  # tokens of a pass, bytes free where no size is given
    free: int  # of the device, for a whole plan

    def spread(self, held: Held, chunk: int, beside: int) -> Places:
        """Places for what is held, the device first; `beside`: bytes of what else the plan needs there."""
        room, whole = self.room(chunk, max(0, self.free - beside)), held.nbytes(held.most)
        try:
            most = room.most
        except Shortage:  # not even for what comes between two boundaries
            return Places(whole, over=whole)
        if most is None:
            return Places(whole)
        here = room.always + (room.on_device or 0)
        away = max(0, min(held.settled, most) - here)
        host = min(away, room.in_host)
        device = held.nbytes(min(held.most, here + room.newest)) + away * (room.far - room.index)
        if room.memory.device != "auto":
            device = min(device, size_of(room.memory.device))
        over = max(0, held.settled - most)
        return Places(device, host * room.narrow, (away - host) * room.wide, over * room.narrow)
