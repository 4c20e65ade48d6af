"""Where keys and values lie under `[memory]`: how much of them the device holds, and how much lies elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.schema import size_of

if TYPE_CHECKING:
    from kvcli.fit.room import Room
    from kvcli.schema import Memory


@dataclass(frozen=True, slots=True)
class Places:
    """Bytes."""

    device: int
    host: int = 0  # memory of the host, behind a GPU
    disk: int = 0
    over: int = 0  # for which there is no room anywhere


@dataclass(frozen=True, slots=True)
class Caps:
    """Bytes for keys and values."""

    device: int | None  # as typed; None = what is free
    host: int
    disk: int
    free: int  # of the device, for a whole plan: its keys and values go elsewhere where there is no more
    wide: float = 1.0  # bytes on the disk, where nothing is packed, of one byte of older tokens in memory

    @staticmethod
    def of(memory: Memory, room: Room, free: int, wide: float) -> Caps:
        """Without a GPU there is no memory beside the device's."""
        host = 0 if room.kind == "cpu" else room.host if memory.host == "auto" else size_of(memory.host)
        device = None if memory.device == "auto" else size_of(memory.device)
        return Caps(device, host, size_of(memory.disk), free, wide)

    def spread(self, kv: int, beside: int) -> Places:
        """Places for so many bytes of keys and values, the device first; `beside`: what else the plan needs there."""
        if self.device is not None:
            here = min(kv, self.device)
        elif self.host or self.disk:
            here = min(kv, max(0, self.free - beside))
        else:
            here = kv
        host = min(kv - here, self.host)
        left = kv - here - host
        on_disk = min(left, int(self.disk / self.wide))
        return Places(here, host, int(on_disk * self.wide), left - on_disk)
