"""Capacity of a KV cache: slots per head that fit a device, host memory and a disk under the budgets of `[memory]`.

Both the KV cache and the memory plan use this computation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvcli.kv.cache.level import SLACK
from kvcli.kv.footprint import STEP, full_bytes, packs_by_age, quantized_bytes
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import params_of_storing_layers
from kvcli.kv.tiers.disk import parts_of
from kvcli.settings.schema import size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcli.kv.formats.block_format import BlockFormat
    from kvcli.kv.slots import AttentionParams, LayerShape
    from kvcli.kv.sparse.settings import SparseMethod
    from kvcli.settings.schema import Kv, Memory

EVERY = 64  # compression interval of a tiered cache if neither the policy nor sparse attention sets one


@dataclass(frozen=True)
class CacheCapacity:
    """Capacity of a KV cache. Bytes per slot are summed over all heads and layers."""

    memory: Memory
    layers: Sequence[int]  # by layer: bytes of a slot in full precision
    wide: int  # bytes of a slot in the top and on disk, all layers
    narrow: int  # bytes of a slot below the top
    index: int  # bytes of the sparse attention index per slot on the device
    far: int  # device bytes per offloaded slot: index and page cache
    between: int  # most slots per head in the top between two compression points
    newest: int  # slots among `between` stored since the last compression point
    always: int  # slots per head that stay in full precision at a compression point
    is_packed: bool  # the device has a quantized level below the top
    free: int  # device bytes for KV if `memory.device` gives no size
    host: int  # bytes of host memory if `memory.host` gives no size

    @cached_property
    def max_slots(self) -> int | None:
        """Most slots per head of all levels together; None = no limit."""
        if self.on_device is None:
            return None
        return self.always + self.on_device + self.in_host + self.on_disk

    def holds(self, slots: int) -> bool:
        """True if `slots` per head fit at a compression point, with or without a set limit."""
        try:
            most = (self.free - self.between * self.wide) // self.narrow if self.max_slots is None else self.max_slots
        except CacheFull:
            return False
        return slots <= most

    @cached_property
    def on_device(self) -> int | None:
        """Slots below the top on the device, or in the top if no level is quantized; None = no limit."""
        if self._left is None:
            return None
        left = self._left - (self.in_host + self.on_disk) * self.far
        is_indexed = self.is_packed or not self.has_more  # a top with levels below is read in full
        tokens = left // (self.narrow + (self.index if is_indexed else 0))
        return tokens * SLACK // (SLACK + 1) if self.has_more else tokens

    @cached_property
    def in_host(self) -> int:
        """Slots that fit in host memory, with index and page cache on the device."""
        return self._indexed(self.host_bytes // self.narrow)

    @cached_property
    def on_disk(self) -> int:
        """Slots that fit on the disk, with index and page cache on the device."""
        own = [each for each in self.layers if each]
        parts = zip(parts_of(size_of(self.memory.disk), own), own, strict=True)
        return self._indexed(min(part // each for part, each in parts), self.in_host)

    @property
    def elsewhere(self) -> int | None:
        """Slots that fit the first offload tier; None = no offload."""
        return (self.in_host or self.on_disk) if self.has_more else None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for slots offloaded from a GPU."""
        return self.host if self.memory.host == "auto" else size_of(self.memory.host)

    @property
    def has_more(self) -> bool:
        """True if slots can be offloaded to host memory or disk."""
        return self.host_bytes > 0 or size_of(self.memory.disk) > 0

    def _indexed(self, slots: int, before: int = 0) -> int:
        """Limit `slots` so that index and page cache, with those of `before`, take at most half of the device."""
        if not slots or not self.far:
            return slots
        return max(1, min(slots, (self._left or 0) // 2 // self.far - before))

    @cached_property
    def _left(self) -> int | None:
        """Device bytes without the top; None = no limit."""
        room = self._of_device()
        if room is None:
            return None
        left = room - self.between * self.wide
        if left < self.narrow:
            need = (self.between + 1) * self.wide
            raise CacheFull(
                f"memory.device = {self.memory.device} is too small for a text",
                lines=[
                    f"{self.between:,} tokens are stored before the next eviction: "
                    f"{need / (1 << 20):,.1f} MiB, more than {room / (1 << 20):,.1f} MiB"
                ],
                detail={"need": need, "room": room},
                try_=[f"--set memory.device={_mib(2 * need)}MiB", *self._smaller(room)],
            )
        return left

    def _smaller(self, room: int) -> list[str]:
        """Suggest a prefill chunk so small that the top takes at most half of the capacity."""
        most = room // (2 * self.wide) - (self.between - self.newest)
        return [f"--set prefill.chunk={1 << most.bit_length() - 1}"] if most >= EVERY else []

    def _of_device(self) -> int | None:
        """Return the device bytes for KV; None = no limit."""
        if self.memory.device != "auto":
            return size_of(self.memory.device)
        return self.free if self.has_more else None


def _mib(nbytes: int) -> int:
    return -(-nbytes // (1 << 20))


def room(
    kv: Kv,
    form: BlockFormat,
    memory: Memory,
    recall: SparseMethod,
    attention_params: Sequence[AttentionParams],
    shapes: Sequence[LayerShape],
    number: int,
    *,
    chunk: int,
    is_cpu: bool,
    free: int,
    host: int,
) -> CacheCapacity:
    """Compute the capacity of the KV cache under these tables.

    `number`: bytes of an element in full precision. `chunk`: most tokens of a prefill pass. `free`, `host`: bytes if no
    size is set; on a CPU there is no separate host memory.
    """
    read = [shapes[layer] for layer in recall.layers(params_of_storing_layers(attention_params, shapes))]
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
