"""Memory of the KV cache under `[kv]` and `[memory]`, for planning: bytes of slots in full precision and quantized."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from kvcli.kv.slots import POSITION, LayerShape
from kvcli.kv.tiers.dense import Dense
from kvcli.settings.profile import is_there, tier_effects

if TYPE_CHECKING:
    from kvcli.kv.formats.block_format import BlockFormat
    from kvcli.kv.sparse.settings import SparseMethod
    from kvcli.settings.schema import Kv, Memory

STEP = 64  # slots by which the top of a tiered cache grows: it is short, or memory is scarce
FIRST = 256  # slots of the first extent of a layer, in a file or on the host


def packs_by_age(kv: Kv, form: BlockFormat, memory: Memory) -> bool:
    return form.is_active(kv) and not memory.demotes


def layer_bytes(
    kv: Kv, form: BlockFormat, memory: Memory, number: int, shape: LayerShape, slots: int, fresh: int
) -> int:
    """Return the bytes of a layer with `slots` slots per head, for planning.

    `number`: bytes of an element in full precision; `fresh`: slots stored since the last compression point.
    """
    step, top = (STEP if tier_effects(kv, form, memory) else Dense.STEP), in_top(kv, form, memory, slots, fresh)
    return -(-top // step) * step * full_bytes(shape, number) + (slots - top) * quantized_bytes(kv, form, shape, number)


def lower_bytes(kv: Kv, form: BlockFormat, memory: Memory, shape: LayerShape, number: int, *, is_cpu: bool) -> int:
    """Return the device bytes of a demoted slot of all heads of a layer; 0 if it is offloaded."""
    has_host = not is_cpu and is_there(memory.host)
    is_away = not form.is_active(kv) and (has_host or is_there(memory.disk))
    return 0 if is_away else quantized_bytes(kv, form, shape, number)


def index_bytes(kv: Kv, form: BlockFormat, memory: Memory, per_slot: float, slots: int, fresh: int) -> int:
    """Return the bytes of the sparse attention index, for planning; layers that read all slots have no index.

    `per_slot`: index bytes per slot of all heads of the other layers, by `profile.sparse.per_slot(head_dim, number)`.
    """
    below = slots - in_top(kv, form, memory, slots, fresh) if packs_by_age(kv, form, memory) else slots
    return int(below * per_slot)


def far_slot_bytes(
    recall: SparseMethod, is_lower: bool, shapes: Sequence[LayerShape], read: Container[int], number: int, kind: str
) -> tuple[list[float], list[float]]:
    """Return, by layer, the device bytes per offloaded slot of one head, and the constant device bytes per head.

    `is_lower`: slots can be offloaded; otherwise the second list is empty. `read`: layers with an index there.
    `kind`: type of the device.
    """
    slot = [recall.per_slot(of.k_dim, number) if i in read else 0.0 for i, of in enumerate(shapes)]
    if not is_lower:
        return slot, []
    is_here = kind == "cpu"  # positions of a file are in memory too, and its extents double
    near = [
        2.0 * POSITION if is_here else recall.page_cache_bytes(of.k_dim, number) * (i in read)
        for i, of in enumerate(shapes)
    ]
    first = FIRST * POSITION if is_here else 0
    head = [first + recall.per_head(of.k_dim) * (i in read) for i, of in enumerate(shapes)]
    return [a + b for a, b in zip(slot, near, strict=True)], head


def in_top(kv: Kv, form: BlockFormat, memory: Memory, slots: int, fresh: int) -> int:
    """Return how many of `slots` per head are in full precision; all, if a policy chooses the slots to demote."""
    return min(slots, kv.sinks + kv.residual + kv.group - 1 + fresh) if packs_by_age(kv, form, memory) else slots


def full_bytes(shape: LayerShape, number: int) -> int:
    """Return the bytes of a dense slot of all heads of a layer; 0 if it reads another layer's slots."""
    return shape.numbers * number + POSITION if shape.numbers else 0


def quantized_bytes(kv: Kv, form: BlockFormat, shape: LayerShape, number: int) -> int:
    """Return the bytes of a slot of all heads below the top."""
    return form.nbytes(shape, kv, number) if form.is_active(kv) and shape.numbers else full_bytes(shape, number)
