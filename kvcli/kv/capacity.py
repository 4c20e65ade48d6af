"""Memory of a KV cache under the tables of a profile: bytes of its slots, and the slots that fit the budgets of
`[memory]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvcli.kv.cache.level import SLACK
from kvcli.kv.cache.precision_budget import PrecisionBudget
from kvcli.kv.footprint import FIRST, STEP, IndexBytes
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import POSITION, AttentionParams, LayerShape, params_of_storing_layers
from kvcli.kv.sparse.settings import SparseMethod
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.disk import parts_of
from kvcli.settings.profile import is_there, tier_effects
from kvcli.settings.schema import Kv, Memory, size_of

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


@dataclass(frozen=True)
class CacheFootprint:
    """Memory of a KV cache under the tables of a profile. The cache, the memory plan and the fallbacks for a full
    device ask this one object. `slots`: slots per head; `fresh`: of these, stored since the last compression point."""

    kv: Kv
    form: BlockFormat
    memory: Memory
    sparse: SparseMethod
    shapes: Sequence[LayerShape]  # by layer
    attention_params: Sequence[AttentionParams]  # by layer
    number: int  # bytes of an element in full precision
    kind: str  # type of the device

    @property
    def is_packed_by_age(self) -> bool:
        """True if slots are quantized by age, not chosen by a policy."""
        return self.form.is_active(self.kv) and not self.memory.demotes

    def lower_slot(self, shape: LayerShape) -> int:
        """Return the bytes of a slot of all heads of a layer below the top."""
        is_quantized = self.form.is_active(self.kv) and shape.numbers
        return self.form.nbytes(shape, self.kv, self.number) if is_quantized else shape.slot_bytes(self.number)

    @cached_property
    def old_slots(self) -> list[int]:
        """Bytes of a slot that is old, by layer: quantized if slots are quantized by age."""
        return [self.lower_slot(of) if self.is_packed_by_age else of.slot_bytes(self.number) for of in self.shapes]

    @cached_property
    def demoted_slot(self) -> int:
        """Device bytes of a slot of all layers that a policy demoted; 0 if it is offloaded."""
        has_place = (self.kind != "cpu" and is_there(self.memory.host)) or is_there(self.memory.disk)
        is_away = has_place and not self.form.is_active(self.kv)
        return 0 if is_away else sum(map(self.lower_slot, self.shapes))

    def layer_bytes(self, shape: LayerShape, slots: int, fresh: int) -> int:
        """Return the bytes of the slots of a layer, with the spare capacity of its top."""
        top = self._in_top(slots, fresh)
        in_top = -(-top // self._step) * self._step * shape.slot_bytes(self.number)
        return in_top + (slots - top) * self.lower_slot(shape)

    def index_bytes(self, slots: int, fresh: int) -> int:
        """Return the bytes of the sparse attention index of all layers; layers that read all slots have none."""
        below = slots - self._in_top(slots, fresh) if self.is_packed_by_age else slots
        return int(below * self._index_slot)

    def capacity(self, chunk: int, free: int, host: int) -> CacheCapacity:
        """Compute the capacity. `chunk`: most tokens of a prefill pass; `free`, `host`: bytes if no size is set, of the
        device and of host memory, which a CPU does not have separately."""
        near = sum(self.sparse.index_bytes(self.shapes[i].numbers // 2, self.number).near for i in self._read)
        newest, is_cpu = max(chunk, EVERY), self.kind == "cpu"
        always = self.kv.sinks + (self.kv.residual if self.is_packed_by_age else 0)
        each = [shape.slot_bytes(self.number) for shape in self.shapes]
        return CacheCapacity(
            memory=replace(self.memory, host="auto") if is_cpu else self.memory,
            layers=each,
            wide=sum(each),
            narrow=sum(self.old_slots),
            index=round(self._index_slot),
            far=round(self._index_slot if is_cpu else self._index_slot + near),
            between=always + self.kv.group + newest + STEP,
            newest=newest,
            always=always,
            is_packed=self.is_packed_by_age,
            free=free,
            host=0 if is_cpu else host,
        )

    def budget(self, free: int, *, has_more: bool, holds: int | None) -> PrecisionBudget:
        """Return the precision budget of `memory.budget`. `free`: the bytes that "fit" stands for. `has_more`: slots
        can be offloaded, up to `holds` slots per head."""
        return PrecisionBudget(
            self.memory.budget.replace(" %", "%"), free, self.shapes, self.number, self.memory.bits, self.kv.group,
            *self._far_slots(has_more), not self.sparse.describe_read, holds, self.memory.max_loss,
        )  # fmt: skip

    def fit_bytes(self, spare: int, taken: int) -> int:
        """Return the bytes that `memory.budget = "fit"` stands for: the share of a sequence in the spare bytes, without
        the bytes that its passes take."""
        return max(0, spare // self.memory.sequences - taken)

    def _far_slots(self, has_more: bool) -> tuple[list[float], list[float]]:
        """Return, by layer, the device bytes per offloaded slot of one head, and the constant device bytes per head;
        the second list is empty if no slot can be offloaded."""
        read = self._read if has_more else ()
        each = [
            self.sparse.index_bytes(of.k_dim, self.number) if i in read else IndexBytes()
            for i, of in enumerate(self.shapes)
        ]
        if not has_more:
            return [of.slot for of in each], []
        if self.kind == "cpu":  # positions of a file are in memory too, and its extents double
            return [of.slot + 2.0 * POSITION for of in each], [FIRST * POSITION + of.head for of in each]
        return [of.slot + of.near for of in each], [of.head for of in each]

    def _in_top(self, slots: int, fresh: int) -> int:
        """Return how many slots are in full precision; all, if a policy chooses the slots to demote."""
        most = self.kv.sinks + self.kv.residual + self.kv.group - 1 + fresh
        return min(slots, most) if self.is_packed_by_age else slots

    @cached_property
    def _step(self) -> int:
        """Slots by which the top grows."""
        return STEP if tier_effects(self.kv, self.form, self.memory) else Dense.STEP

    @cached_property
    def _read(self) -> Sequence[int]:
        """Layers with sparse attention."""
        return self.sparse.layers(params_of_storing_layers(self.attention_params, self.shapes))

    @cached_property
    def _index_slot(self) -> float:
        """Bytes of the index per slot, all heads of all layers."""
        layers = [self.shapes[i] for i in self._read]
        return sum(of.n_kv_heads * self.sparse.index_bytes(of.k_dim, self.number).slot for of in layers)
