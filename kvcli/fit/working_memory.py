"""Find the attention kernels that serve a model, and the memory of libraries and of the check after loading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.engine.forward_memory import WIDE
from kvcli.fit.weights import BYTES
from kvcli.kernels.attend.cpu import MANY

if TYPE_CHECKING:
    from kvcli.fit.available_memory import AvailableMemory
    from kvcli.models.shape import Shape

# Products of 16-bit matrices on a CPU: oneDNN compiles a kernel for each new shape and caches the last thousand.
PRODUCT = 2 * (1 << 20) // 3  # bytes of one kernel
KEPT = 1024
LINEAR = 6  # shapes of linear layers in a decoder
WIDTHS = 5  # draft sizes that a short answer uses, beside plain passes
AGAIN = 2  # of these, the draft sizes that run with all heads of unequal length

CHECK = 16  # rows that are compared with the stock model after loading


WIDEST = 256  # head size


def is_native(shape: Shape, dtype: str, device: str) -> bool:
    """True if native kernels serve attention of this type; they store no scores and compile nothing."""
    import torch

    from kvcli.kernels.attend_invariant import why_not

    kinds = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    kind = kinds.get(dtype, torch.float32 if BYTES[dtype] == WIDE else torch.float16)
    return not any(why_not(kind, torch.device(device), of.key, of.value) for of in set(shape.stores))


def is_fused(shape: Shape, number: int, room: AvailableMemory) -> bool:
    """True if a GPU's fused kernels serve the model."""
    return (
        room.kind == "cuda"
        and not room.unserved
        and number == 2
        and all(size <= WIDEST and not size % 16 for of in shape.stores for size in (of.key, of.value))
    )


def product_bytes(rows: int, slots: int, uneven: int, *, is_packed: bool) -> int:
    """Return the bytes of oneDNN kernels for 16-bit products on a CPU without native kernels, beside plain passes.

    `uneven`: number of heads that differ in length, about `slots` each; `is_packed`: linear layers have other kernels.
    """
    drafts = min(rows - 1, WIDTHS)
    count = 0 if is_packed else LINEAR * drafts
    if slots >= MANY:  # two products per head, for scores and sums; shorter heads use another method
        count += 2 * uneven * (AGAIN if drafts else 1)
    return PRODUCT * min(KEPT, count)


def check_bytes(shape: Shape, number: int) -> int:
    """Return the bytes of the comparison after loading: logits of both models, and a float64 copy of each."""
    return CHECK * shape.vocab * (2 * number + 2 * 2 * WIDE)
