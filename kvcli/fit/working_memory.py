"""What serves a model's attention where it would run, and memory that libraries and the check after loading take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.engine.forward_memory import WIDE
from kvcli.fit.weights import BYTES
from kvcli.kernels.attend.cpu import MANY

if TYPE_CHECKING:
    from kvcli.fit.available_memory import AvailableMemory
    from kvcli.models.shape import Shape

# Products of 16-bit matrices on a CPU: oneDNN compiles one for each shape that it meets and keeps the last thousand.
PRODUCT = 2 * (1 << 20) // 3  # bytes of one
KEPT = 1024
LINEAR = 6  # shapes of weights in a decoder
WIDTHS = 5  # of passes with drafts that an answer of some lines meets, beside plain ones
AGAIN = 2  # of these, those that meet all heads of unequal length

CHECK = 16  # rows that are compared with the stock model after loading


WIDEST = 256  # numbers of a head


def is_native(shape: Shape, dtype: str, device: str) -> bool:
    """Whether attention of this type has kernels here, which keep no scores and compile nothing."""
    import torch

    from kvcli.kernels.attend_invariant import why_not

    kinds = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    kind = kinds.get(dtype, torch.float32 if BYTES[dtype] == WIDE else torch.float16)
    return not any(why_not(kind, torch.device(device), of.key, of.value) for of in set(shape.stores))


def is_fused(shape: Shape, number: int, room: AvailableMemory) -> bool:
    """Whether a GPU's fused kernels serve it."""
    return (
        room.kind == "cuda"
        and not room.unserved
        and number == 2
        and all(size <= WIDEST and not size % 16 for of in shape.stores for size in (of.key, of.value))
    )


def product_bytes(rows: int, slots: int, uneven: int, *, is_packed: bool) -> int:
    """Products that 16-bit numbers on a CPU without native kernels bring beside those of plain passes.

    `uneven`: heads that differ in length, about `slots` each; `is_packed`: linear layers have kernels of their own.
    """
    drafts = min(rows - 1, WIDTHS)
    count = 0 if is_packed else LINEAR * drafts
    if slots >= MANY:  # a score and a sum for each head; shorter ones are read in another way
        count += 2 * uneven * (AGAIN if drafts else 1)
    return PRODUCT * min(KEPT, count)


def check_bytes(shape: Shape, number: int) -> int:
    """The comparison after loading: logits of both sides, and each of them in float64."""
    return CHECK * shape.vocab * (2 * number + 2 * 2 * WIDE)
