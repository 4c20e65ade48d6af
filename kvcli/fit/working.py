"""Memory a pass needs beside weights, keys and values: what one layer computes, fresh rows, logits.

Each sum names the tensors that live at once in `forward.py` and the kernels it calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.fit.weights import BYTES
from kvcli.kernels.attend.cpu import FEW, MANY
from kvcli.kernels.attend.reference import BLOCK

if TYPE_CHECKING:
    from kvcli.fit.room import Room
    from kvcli.models.shape import Shape

# Products of 16-bit matrices on a CPU: oneDNN compiles one for each shape that it meets and keeps the last thousand.
PRODUCT = 2 * (1 << 20) // 3  # bytes of one
KEPT = 1024
LINEAR = 6  # shapes of weights in a decoder
WIDTHS = 5  # of passes with drafts that an answer of some lines meets, beside plain ones
AGAIN = 2  # of these, those that meet all heads of unequal length

WIDE = 4  # bytes of a float32, in which parts are merged and scores are summed
CHECK = 16  # rows that are compared with the stock model after loading

# Fused kernels on a GPU keep no scores. A few rows read what is stored in spans, whose parts lie in one buffer for all
# layers until they are merged; a linear layer of few outputs is summed in stretches of its inputs, likewise.
FRAMES = (1, 8, 16, 32, 64)  # rows that a captured pass has: those that are not used compute all the same
SPAN = 256  # slots of the shortest span; later ones are twice, then eight times as long
STRETCHES = 4  # of a linear layer's inputs, at most
WIDEST = 256  # numbers of a head
UNPACKED = 64 << 20  # of a weight in few bits, at most, while a prompt is read
# Bytes the process holds for each byte of live tensors: malloc keeps freed blocks (tests/bench/fit.py measures how well
# this holds). The peak of torch's CUDA allocator counts live tensors, and takes none.
ALLOCATOR = {"cpu": 1.6}


def is_native(shape: Shape, dtype: str, device: str) -> bool:
    """Whether attention of this type has kernels here, which keep no scores and compile nothing."""
    import torch

    from kvcli.kernels.attend_rows import why_not

    kinds = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    kind = kinds.get(dtype, torch.float32 if BYTES[dtype] == WIDE else torch.float16)
    return not any(why_not(kind, torch.device(device), of.key, of.value) for of in set(shape.stores))


def is_fused(shape: Shape, number: int, room: Room) -> bool:
    """Whether a GPU's fused kernels serve it."""
    return (
        room.kind == "cuda"
        and not room.unserved
        and number == 2
        and all(size <= WIDEST and not size % 16 for of in shape.stores for size in (of.key, of.value))
    )


def working_bytes(
    shape: Shape,
    *,
    chunk: int,
    rows: int,
    slots: int,
    number: int,
    kv_number: int,
    device: str,
    is_native: bool = False,
    is_fused: bool = False,
    draws: bool = False,
    largest: int = 0,
    waiting: int = 0,
) -> int:
    """The larger of reading a chunk and of decoding `rows` rows, over `slots` stored ones.

    `is_fused`: a GPU's kernels serve it, and with `draws` the draw too. `largest`: a packed weight in the numbers of
    the run; 0 = none is packed. `waiting`: rows of a prompt that is read layer by layer, between two of them, of which
    a chunk is in one; 0 = it is read chunk by chunk.
    """
    kept = ALLOCATOR.get(device, 1.0)
    rows = next((frame for frame in FRAMES if frame >= rows), rows) if is_fused else rows
    scores = [0 if is_native or is_fused else _scores(shape, n, slots, device) for n in (chunk, rows)]
    layer = max(_inner(shape, chunk, number), _attention(shape, chunk, number) + scores[0])
    fresh = fresh_bytes(shape, chunk, kv_number)
    reading = layer + (fresh // shape.layers + waiting * shape.hidden * number if waiting else fresh)
    reading += 0 if device == "cpu" else min(UNPACKED, largest)
    logits = rows * shape.vocab * number if is_fused and draws else logits_bytes(shape, rows)
    writing = fresh_bytes(shape, rows, kv_number) + _attention(shape, rows, number) + scores[1] + logits
    writing += _parts(shape, rows, slots) if is_fused else 0
    return int(kept * max(reading, writing))


def recorded_bytes(shape: Shape, *, rows: int, slots: int, number: int, kv_number: int, draws: bool) -> int:
    """What captured passes of `rows` rows keep, each its own, between two times that they run: while a prompt is read,
    too. One of a single row, one of a draft, and one that takes over behind a boundary."""

    def one(n: int) -> int:
        logits = n * shape.vocab * number if draws else logits_bytes(shape, n)
        return fresh_bytes(shape, n, kv_number) + _attention(shape, n, number) + logits + _parts(shape, n, slots)

    rows = next((frame for frame in FRAMES if frame >= rows), 0)  # wider passes are not captured
    return one(1) + 2 * one(rows)


def logits_bytes(shape: Shape, rows: int) -> int:
    """Logits as the model gives them, in float32 for the sampler, and their noise."""
    return 3 * rows * shape.vocab * WIDE


def _parts(shape: Shape, rows: int, slots: int) -> int:
    """What fused kernels merge: of each span an output and a sum, of each stretch of a linear layer an output."""
    units = -(-slots // SPAN)  # as kernels/attend_rows cuts them
    spans = min(units, 8 + units // 2, 56 + units // 8) + 1
    return WIDE * rows * (shape.heads * spans * (shape.head_dim + 1) + STRETCHES * max(2 * shape.inner, shape.hidden))


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


def fresh_bytes(shape: Shape, rows: int, number: int) -> int:
    """Keys and values of the pass itself, in all its layers, until its rows are accepted."""
    return shape.kv_per_token * rows * number


def _inner(shape: Shape, rows: int, number: int) -> int:
    """Feed-forward part: what goes round it, its input, and gate, up and their product."""
    return rows * number * (2 * shape.hidden + 3 * shape.inner * max(1, shape.active))


def _attention(shape: Shape, rows: int, number: int) -> int:
    """What goes round it and its input, queries before and after rotation, two parts, and their merge in float32."""
    width = shape.heads * max(max(of.key, of.value) for of in shape.stores)
    live = rows * (number * (2 * shape.hidden + 3 * width) + 3 * WIDE * width)
    if number == WIDE:
        live -= 2 * WIDE * width * rows  # the parts are float32 already
    return live


def _scores(shape: Shape, rows: int, slots: int, device: str) -> int:
    """Scores that exist at once: none in torch's flash kernel, all of a few rows' in products, blocks elsewhere."""
    if device != "cpu" or shape.is_capped:
        return 3 * shape.heads * rows * min(max(slots, rows), BLOCK) * WIDE
    if rows * (shape.heads // shape.kv_heads) <= FEW:
        return 2 * shape.heads * rows * slots * WIDE
    return 0
