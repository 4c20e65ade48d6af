"""How many slots a head a device, host memory and a disk have room for, from the budgets of `[memory]`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import psutil
import torch

from kvcli.kv.ladder import SLACK
from kvcli.kv.shortage import Shortage
from kvcli.schema import size_of

if TYPE_CHECKING:
    from kvcli.schema import Memory

KEPT_FREE = 1 << 30  # bytes that keys and values leave alone where no size is given, or a tenth of what is free


@dataclass(frozen=True)
class Room:
    """Bytes are those of a slot of all heads and layers."""

    memory: Memory
    device: torch.device  # that computes
    wide: int  # bytes of a slot in the top, and on the disk
    narrow: int  # bytes of a slot below the top
    index: int  # bytes of recall's index beside a slot on the device that it reads a part of
    far: int  # bytes on the device beside a slot that lies elsewhere: the same, and what a pass keeps of such slots
    between: int  # slots a head that are in the top before they can go anywhere
    chunk: int  # tokens read in one pass, which is most of them
    is_packed: bool  # the device has a rung of few bits below the top
    held: int  # bytes of the device that a store takes which is to be replaced

    @cached_property
    def on_device(self) -> int | None:
        """Slots beside the top, or in the top itself where nothing is packed; None = no limit."""
        if self._left is None:
            return None
        left = self._left - (self.in_host + self.on_disk) * self.far
        is_indexed = self.is_packed or not self._has_more  # a top with rungs below is read in full
        tokens = left // (self.narrow + (self.index if is_indexed else 0))
        return tokens * SLACK // (SLACK + 1) if self._has_more else tokens

    @cached_property
    def in_host(self) -> int:
        """Slots for which there is room in host memory, and on the device for what reaches them."""
        return self._indexed(self.host_bytes // self.narrow)

    @cached_property
    def on_disk(self) -> int:
        """The same on the disk."""
        return self._indexed(size_of(self.memory.disk) // self.wide, self.in_host)

    @cached_property
    def host_bytes(self) -> int:
        """Of host memory, for what a GPU has no room for."""
        if self.memory.host != "auto":
            return size_of(self.memory.host)
        return _spared(int(psutil.virtual_memory().available)) if self.device.type == "cuda" else 0

    @property
    def _has_more(self) -> bool:
        return self.host_bytes > 0 or size_of(self.memory.disk) > 0

    def _indexed(self, slots: int, before: int = 0) -> int:
        """So many slots, or as many as half of the device's room is enough to reach, beside those `before`."""
        if not slots or not self.far:
            return slots
        return max(1, min(slots, (self._left or 0) // 2 // self.far - before))

    @cached_property
    def _left(self) -> int | None:
        """Bytes of the device beside the top; None = no limit."""
        room = self._of_device()
        if room is None:
            return None
        left = room - self.between * self.wide
        if left < self.narrow:
            need = (self.between + 1) * self.wide
            raise Shortage(
                f"memory.device = {self.memory.device} has no room for a text",
                lines=[
                    f"{self.between:,} tokens are stored between two boundaries: {_mib(need)} MiB of {_mib(room)} MiB"
                ],
                detail={"need": need, "room": room},
                try_=[f"--set memory.device={_mib(2 * need)}MiB", f"--set prefill.chunk={max(1, self.chunk // 4)}"],
            )
        return left

    def _of_device(self) -> int | None:
        """Bytes that keys and values may take; None = no limit."""
        if self.memory.device != "auto":
            return size_of(self.memory.device)
        if not self._has_more:
            return None
        if self.device.type == "cuda":
            free = int(torch.cuda.mem_get_info(self.device)[0])
        else:
            free = int(psutil.virtual_memory().available)
        return _spared(free + self.held)


def _spared(free: int) -> int:
    """Of what is free, what keys and values may take."""
    return free - min(KEPT_FREE, free // 10)


def _mib(nbytes: int) -> int:
    return -(-nbytes // (1 << 20))
