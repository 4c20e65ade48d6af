"""How many slots a head a device, host memory and a disk have room for, from the budgets of `[memory]`.

A store is made with it, and a plan of memory counts with the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvcli.kv.cache.level import SLACK
from kvcli.kv.footprint import STEP, full_bytes, packs_by_age, quantized_bytes
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import storing
from kvcli.kv.tiers.extents import parts_of
from kvcli.settings.schema import size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcli.kv.formats.format import KVFormat
    from kvcli.kv.slots import AttentionParams, LayerShape
    from kvcli.kv.sparse.settings import SparseMethod
    from kvcli.settings.schema import Kv, Memory

EVERY = 64  # tokens between two boundaries of a ladder, where no policy wants them closer


@dataclass(frozen=True)
class CacheCapacity:
    """Bytes are those of a slot of all heads and layers."""

    memory: Memory
    layers: Sequence[int]  # by layer: bytes of a slot in full precision
    wide: int  # bytes of a slot in the top, and on the disk: of all of them
    narrow: int  # bytes of a slot below the top
    index: int  # bytes of recall's index beside a slot on the device that it reads a part of
    far: int  # bytes on the device beside a slot that lies elsewhere: the same, and what a pass keeps of such slots
    between: int  # slots a head that are in the top before they can go anywhere
    newest: int  # of these, the ones that came since the last boundary
    always: int  # slots a head in full precision at a boundary, whatever else goes down
    is_packed: bool  # the device has a rung of few bits below the top
    free: int  # bytes of the device that keys and values may take where memory.device gives no size
    host: int  # bytes of host memory behind it, where memory.host gives no size

    @cached_property
    def max_slots(self) -> int | None:
        """Slots a head that all places together have room for; None = no limit."""
        if self.on_device is None:
            return None
        return self.always + self.on_device + self.in_host + self.on_disk

    def holds(self, slots: int) -> bool:
        """Whether so many a head have room at a boundary, however the room was limited."""
        try:
            most = (self.free - self.between * self.wide) // self.narrow if self.max_slots is None else self.max_slots
        except CacheFull:
            return False
        return slots <= most

    @cached_property
    def on_device(self) -> int | None:
        """Slots beside the top, or in the top itself where nothing is packed; None = no limit."""
        if self._left is None:
            return None
        left = self._left - (self.in_host + self.on_disk) * self.far
        is_indexed = self.is_packed or not self.has_more  # a top with rungs below is read in full
        tokens = left // (self.narrow + (self.index if is_indexed else 0))
        return tokens * SLACK // (SLACK + 1) if self.has_more else tokens

    @cached_property
    def in_host(self) -> int:
        """Slots for which there is room in host memory, and on the device for what reaches them."""
        return self._indexed(self.host_bytes // self.narrow)

    @cached_property
    def on_disk(self) -> int:
        """The same on the disk."""
        own = [each for each in self.layers if each]
        parts = zip(parts_of(size_of(self.memory.disk), own), own, strict=True)
        return self._indexed(min(part // each for part, each in parts), self.in_host)

    @property
    def elsewhere(self) -> int | None:
        """Slots for which the first place beside the device has room; None = there is none."""
        return (self.in_host or self.on_disk) if self.has_more else None

    @property
    def host_bytes(self) -> int:
        """Of host memory, for what a GPU has no room for."""
        return self.host if self.memory.host == "auto" else size_of(self.memory.host)

    @property
    def has_more(self) -> bool:
        """Is there a place beside the device?"""
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
            raise CacheFull(
                f"memory.device = {self.memory.device} has no room for a text",
                lines=[
                    f"{self.between:,} tokens are stored between two boundaries: "
                    f"{need / (1 << 20):,.1f} MiB of {room / (1 << 20):,.1f} MiB"
                ],
                detail={"need": need, "room": room},
                try_=[f"--set memory.device={_mib(2 * need)}MiB", *self._smaller(room)],
            )
        return left

    def _smaller(self, room: int) -> list[str]:
        """A chunk so much smaller that as much room is left to a text as what comes between two boundaries takes."""
        most = room // (2 * self.wide) - (self.between - self.newest)
        return [f"--set prefill.chunk={1 << most.bit_length() - 1}"] if most >= EVERY else []

    def _of_device(self) -> int | None:
        """Bytes that keys and values may take; None = no limit."""
        if self.memory.device != "auto":
            return size_of(self.memory.device)
        return self.free if self.has_more else None


def _mib(nbytes: int) -> int:
    return -(-nbytes // (1 << 20))


def room(
    kv: Kv,
    form: KVFormat,
    memory: Memory,
    recall: SparseMethod,
    sights: Sequence[AttentionParams],
    shapes: Sequence[LayerShape],
    number: int,
    *,
    chunk: int,
    is_cpu: bool,
    free: int,
    host: int,
) -> CacheCapacity:
    """Room for keys and values under these tables.

    `number`: bytes of a number as it comes. `chunk`: tokens read in one pass, at most. `free`, `host`: bytes where no
    size is given; a CPU has no memory beside its own.
    """
    read = [shapes[layer] for layer in recall.layers(storing(sights, shapes))]
    each = [full_bytes(shape, number) for shape in shapes]
    index = sum(shape.n_kv_heads * recall.per_slot(shape.k_dim, number) for shape in read)
    near = sum(recall.page_cache_bytes(shape.numbers // 2, number) for shape in read)
    newest, packs = max(chunk, EVERY), packs_by_age(kv, form, memory)
    always = kv.sinks + (kv.residual if packs else 0)
    return CacheCapacity(
        memory=replace(memory, host="auto") if is_cpu else memory,
        layers=each,
        wide=sum(each),
        narrow=sum(
            (quantized_bytes(kv, form, shape, number) if packs else full_bytes(shape, number)) for shape in shapes
        ),
        index=round(index),
        far=round(index if is_cpu else index + near),
        between=always + kv.group + newest + STEP,
        newest=newest,
        always=always,
        is_packed=packs,
        free=free,
        host=0 if is_cpu else host,
    )
