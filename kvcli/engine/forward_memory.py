"""Bytes that a pass takes beside weights, keys and values, by the shape of the model alone: before the first one.

Each sum names the tensors that live at once in `forward.py` and the kernels it calls. A store divides a device's room
by them, and `kvcli fit` foretells with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.kernels import triton_support
from kvcli.kernels.attend.cpu import FEW
from kvcli.kernels.attend.reference import BLOCK
from kvcli.kernels.attend_invariant import why_not
from kvcli.kv.tiers.device_tables import MOST_ROWS
from kvcli.models.shape import shape_of

if TYPE_CHECKING:
    import torch

    from kvcli.engine.hf.lm import LM
    from kvcli.models.shape import Shape

WIDE = 4  # bytes of a float32, in which parts are merged and scores are summed

# Fused kernels on a GPU keep no scores. A few rows read what is stored in spans, whose parts lie in one buffer for all
# layers until they are merged; a linear layer of few outputs is summed in stretches of its inputs, likewise.
FRAMES = (1, 8, 16, 32, MOST_ROWS)  # rows that a captured pass has: those that are not used compute all the same
SPAN = 256  # slots of the shortest span; later ones are twice, then eight times as long
STRETCHES = 4  # of a linear layer's inputs, at most
DRAWN = 52  # bytes a logit where all rows are drawn at once, of a vocabulary that is sorted (top_p without top_k)
UNPACKED = 64 << 20  # of a weight in few bits, at most, while a prompt is read
# Bytes the process holds for each byte of live tensors: malloc keeps freed blocks (tests/bench/fit.py measures how well
# this holds). The peak of torch's CUDA allocator counts live tensors, and takes none.
ALLOCATOR = {"cpu": 1.6}


def pass_bytes(lm: LM, chunk: int, rows: int, dtype: torch.dtype, device: str = "cuda") -> int:
    """Of a loaded model whose store holds such numbers; however many slots there are."""
    shape = shape_of(lm.model.config.get_text_config().to_dict(), lm.info.id)
    return working_bytes(
        shape,
        chunk=chunk,
        rows=rows,
        slots=max(lm.limit, BLOCK),
        number=lm.dtype.itemsize,
        kv_number=dtype.itemsize,
        device=device,
        is_native=device == "cpu" and not any(why_not(lm.dtype, lm.device, of.k_dim, of.v_dim) for of in lm.shapes),
        is_fused=not triton_support.why_not(lm.device, dtype),
        largest=0 if lm.info.quant == "none" else UNPACKED,
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
    fresh = new_kv_bytes(shape, chunk, kv_number)
    reading = layer + (fresh // shape.layers if waiting else fresh)
    reading += 0 if device == "cpu" else min(UNPACKED, largest)
    logits = rows * shape.vocab * number if is_fused and draws else logits_bytes(shape, rows, device)
    writing = new_kv_bytes(shape, rows, kv_number) + _attention(shape, rows, number) + scores[1] + logits
    writing += _parts(shape, rows, slots) if is_fused else 0
    # what waits is a block or two, as large as the prompt: those go back whole
    return max(int(kept * reading) + waiting * shape.hidden * number, int(kept * writing))


def captured_bytes(shape: Shape, *, rows: int, slots: int, number: int, kv_number: int, draws: bool) -> int:
    """What captured passes keep between two times that they run, while a prompt is read, too: one of each size up to
    that of `rows` rows. What they compute with and what draws share a pool."""

    def one(n: int) -> int:
        layer = max(_inner(shape, n, number), _attention(shape, n, number)) + _parts(shape, n, slots)
        drawn = (number if draws else number + DRAWN) * n * shape.vocab
        return new_kv_bytes(shape, n, kv_number) + max(layer, drawn)

    return sum(map(one, captured_sizes(rows)))


def captured_sizes(rows: int) -> tuple[int, ...]:
    """Rows of captured passes where a draft has so many: wider ones are not captured."""
    most = next((frame for frame in FRAMES if frame >= rows), FRAMES[-1])
    return FRAMES[: FRAMES.index(most) + 1]


def logits_bytes(shape: Shape, rows: int, device: str) -> int:
    """Logits as the model gives them, in float32 for the sampler, and their noise; a card draws all rows at once."""
    return rows * shape.vocab * (WIDE + DRAWN if device == "cuda" else 3 * WIDE)


def _parts(shape: Shape, rows: int, slots: int) -> int:
    """What fused kernels merge: of each span an output and a sum, of each stretch of a linear layer an output."""
    units = -(-slots // SPAN)  # as kernels/attend_invariant cuts them
    spans = min(units, 8 + units // 2, 56 + units // 8) + 1
    return WIDE * rows * (shape.heads * spans * (shape.head_dim + 1) + STRETCHES * max(2 * shape.inner, shape.hidden))


def new_kv_bytes(shape: Shape, rows: int, number: int) -> int:
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
