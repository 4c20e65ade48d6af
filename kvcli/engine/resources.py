"""Resources of this process: CPU threads and devices, its memory, and the working memory of a forward pass."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor

from kvcli.errors import UsageError
from kvcli.kernels import triton_support
from kvcli.kernels.attend.cpu import FEW
from kvcli.kernels.attend.reference import BLOCK
from kvcli.kernels.attend_invariant import why_not
from kvcli.kernels.native import native
from kvcli.kv.tiers.device_tables import MOST_ROWS
from kvcli.models.machine import kept_free
from kvcli.models.shape import shape_of

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.models.shape import Shape

# Threads and devices of computation: the number of CPU threads (torch and native kernels), and the current GPU.


def use_device(device: torch.device) -> None:
    """Make this the current CUDA device of this thread. Triton launches on the current device, wherever the tensors
    are."""
    if device.index:  # a thread starts on device 0
        torch.cuda.set_device(device)


def check_stream(lm: LM) -> None:
    """Raise UsageError if earlier passes of the model ran on another CUDA stream: each weight counts the finished
    programs of its product (kernels/linear_skinny), and those of two streams would count into each other."""
    stream = torch.cuda.current_stream(lm.device).cuda_stream if lm.device.type == "cuda" else 0
    if lm.stream is None:
        lm.stream = stream
    if stream != lm.stream:
        raise UsageError(
            f"{lm.info.id} runs on one CUDA stream, and this pass is on another",
            code="other_stream",
            lines=["streams of one model would share the counters of its weights"],
            try_=["torch.cuda.stream(...) around all calls or none", "a second model for the second stream"],
        )


def use_threads(n: int) -> None:
    """Set the number of threads for the whole process."""
    torch.set_num_threads(n)
    if (kernels := native()) is not None:
        kernels.use_threads(n)


@contextmanager
def one_pool(has_pool: bool) -> Iterator[None]:
    """Run torch's operations on one thread if the model has a native thread pool (`has_pool`).

    Torch's threads spin for milliseconds after each shared operation and keep a core busy. In a pass of one token the
    native layers then lack that core: two threads were as slow as one.
    """
    n = torch.get_num_threads()
    torch.set_num_threads(1 if has_pool else n)
    try:
        yield
    finally:
        torch.set_num_threads(n)


# Memory of this process: its peak use, the free memory of a device, and dropping mapped pages of weights.


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of the process (resident set) on a CPU, or the peak of torch's allocator on a CUDA
    device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (status := Path("/proc/self/status")).exists():
        # Linux: getrusage starts at the peak of the parent process, however small this process is
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM")), "")
        if line:
            return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows has the figure in the process information
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def used_bytes(device: torch.device) -> tuple[int, int]:
    """Return the used memory (by all programs) and the total memory of a CUDA device, from its driver; (0, 0) for other
    devices.

    The peak of torch's allocator leaves out the CUDA context, memory allocated by libraries, and fragmented blocks.
    """
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def free_device_bytes(device: torch.device) -> int:
    """Return the free memory of a device, minus a reserve."""
    if device.type == "cuda":
        free, card = map(int, torch.cuda.mem_get_info(device))
        return free - kept_free(free, card)
    free = int(psutil.virtual_memory().available)
    return free - kept_free(free)


def free_beside_weights(lm: LM) -> int:
    """Return the bytes of the model's device that were free at the first call: one number for all sequences."""
    if lm.free_bytes is None:
        lm.free_bytes = int(min(lm.ranks.exchange("free memory", free_device_bytes(lm.device))))
    return lm.free_bytes


def drop_pages(t: Tensor) -> None:
    """Drop the pages of a tensor that is no longer needed, if they are mapped from a file. Only on Linux.

    Weights are views of one mapping of their file, which exists as long as any of them. Without this, a weight that was
    rearranged would remain in memory beside its copy until the last view is freed.
    """
    page = mmap.PAGESIZE
    start = -(-t.data_ptr() // page) * page  # whole pages only: the first and the last may hold parts of other tensors
    end = (t.data_ptr() + t.nbytes) // page * page
    if sys.platform == "linux" and start < end and _is_file(start, end):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _is_file(start: int, end: int) -> bool:
    """True if one mapping of a file covers these addresses."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        low, high = (int(x, 16) for x in span.split("-"))
        if low <= start and end <= high:
            return inode != "0"
    return False


# Working memory of a forward pass, beside weights and KV cache, computed from the model's shape alone.
#
# Each sum names the tensors that live at once in `forward.py` and the kernels it calls. A KV cache plans a device's
# memory with these numbers, and `kvcli fit` predicts with them.


WIDE = 4  # bytes of a float32, the type of partial attention and of summed scores

# Fused kernels on a GPU store no scores. For few rows, attention over the cache is split into spans of slots, whose
# partial results are in one buffer for all layers until they are merged. A linear layer of few outputs is summed in
# stretches of its inputs, likewise.
FRAMES = (1, 8, 16, 32, MOST_ROWS)  # row counts of captured passes: unused rows are computed too
SPAN = 256  # slots of the shortest span; later ones are twice, then eight times as long
STRETCHES = 4  # most stretches of a linear layer's inputs
DRAWN = 52  # bytes per logit where all rows are sampled at once from a sorted vocabulary (top_p without top_k)
UNPACKED = 64 << 20  # most bytes of a dequantized weight during prefill
# Process bytes per byte of live tensors: malloc does not return all freed blocks (tests/bench/fit.py measures how well
# this factor holds). The peak of torch's CUDA allocator counts live tensors, so it needs no factor.
ALLOCATOR = {"cpu": 1.6}


def pass_bytes(lm: LM, chunk: int, rows: int, dtype: torch.dtype, device: str = "cuda") -> int:
    """Return the working memory for a loaded model whose KV cache has this dtype, for any number of slots."""
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
    """Return the larger of the working memory of prefilling a chunk and of decoding `rows` rows, over `slots` slots.

    `is_fused`: the model runs on a GPU's fused kernels; with `draws` sampling does too. `largest`: bytes of the largest
    quantized weight once dequantized; 0 = no quantized weights. `waiting`: prompt rows between two layers in layer-wise
    prefill, a chunk of which is in a layer; 0 = chunked prefill.
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
    # The hidden states waiting between layers are one or two allocations of prompt size, so the allocator returns them
    # to the system.
    return max(int(kept * reading) + waiting * shape.hidden * number, int(kept * writing))


def captured_bytes(shape: Shape, sizes: Sequence[int], *, slots: int, number: int, kv_number: int, draws: bool) -> int:
    """Return the bytes that captured passes of so many rows each keep between replays, during prefill too. The
    intermediates of a pass and those of its sampling share a pool; passes do not, as they are replayed in any order."""

    def one(n: int) -> int:
        layer = max(_inner(shape, n, number), _attention(shape, n, number)) + _parts(shape, n, slots)
        drawn = (number if draws else number + DRAWN) * n * shape.vocab
        recurrent = shape.folds.layers * shape.folds.taped * n * number
        return new_kv_bytes(shape, n, kv_number) + recurrent + max(layer, drawn)

    return sum(map(one, sizes))


def captured_sizes(rows: int) -> tuple[int, ...]:
    """Return the row counts of captured passes for drafts of up to `rows` rows: of each size one for chains and one for
    trees, and one of one row. Wider passes are not captured."""
    most = next((frame for frame in FRAMES if frame >= rows), FRAMES[-1])
    return (*FRAMES[: FRAMES.index(most) + 1], *FRAMES[1 : FRAMES.index(most) + 1])


def logits_bytes(shape: Shape, rows: int, device: str) -> int:
    """Return the bytes of the model's logits, their float32 copy for the sampler and its noise. A GPU samples all rows
    at once."""
    return rows * shape.vocab * (WIDE + DRAWN if device == "cuda" else 3 * WIDE)


def _parts(shape: Shape, rows: int, slots: int) -> int:
    """Return the bytes that fused kernels merge: per span an output and a sum, per stretch of a linear layer an
    output."""
    units = -(-slots // SPAN)  # split as in kernels/attend_invariant
    spans = min(units, 8 + units // 2, 56 + units // 8) + 1
    return WIDE * rows * (shape.heads * spans * (shape.head_dim + 1) + STRETCHES * max(2 * shape.inner, shape.hidden))


def new_kv_bytes(shape: Shape, rows: int, number: int) -> int:
    """Return the bytes of the new KV of a pass, in all layers, until its rows are accepted."""
    return shape.kv_per_token * rows * number


def _inner(shape: Shape, rows: int, number: int) -> int:
    """Return the bytes of the feed-forward network: residual stream, input, and gate, up and their product."""
    return rows * number * (2 * shape.hidden + 3 * shape.inner * max(1, shape.active))


def _attention(shape: Shape, rows: int, number: int) -> int:
    """Return the bytes of attention: residual stream, input, queries before and after rotation, two partial outputs,
    and their merge in float32."""
    width = shape.heads * max(max(of.key, of.value) for of in shape.stores)
    live = rows * (number * (2 * shape.hidden + 3 * width) + 3 * WIDE * width)
    if number == WIDE:
        live -= 2 * WIDE * width * rows  # the partial outputs are float32 already
    return live


def _scores(shape: Shape, rows: int, slots: int, device: str) -> int:
    """Return the bytes of the scores that exist at once: none in torch's flash kernel, all scores of few rows, else one
    block."""
    if device != "cpu" or shape.is_capped:
        return 3 * shape.heads * rows * min(max(slots, rows), BLOCK) * WIDE
    if rows * (shape.heads // shape.kv_heads) <= FEW:
        return 2 * shape.heads * rows * slots * WIDE
    return 0
