"""Lossless encoding of numbers with exponents in four bits: a quarter fewer bytes for bf16.

Signs and mantissas of keys and values are noise, but their exponents have about a dozen values. Each exponent is stored
as its distance below the greatest; those too far below are stored separately. Huffman coding (zlib) saves another
twelfth of the bytes and decodes at a tenth of the speed, other coders of the standard library at less
(docs/measurements/lab-log.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

UNSIGNED = {torch.bfloat16: np.uint16, torch.float32: np.uint32}  # both have eight bits of exponent
MOST = 15  # largest distance of an exponent in four bits
HEAD = 5  # bytes: the greatest exponent, and the number of those stored separately


def encode(t: Tensor) -> bytes | None:
    """Encode a tensor; None if that takes no fewer bytes."""
    if t.dtype not in UNSIGNED or not t.numel():
        return None
    numbers = t.cpu().contiguous().view(-1).view(torch.uint8).numpy().view(UNSIGNED[t.dtype])
    size = t.element_size()
    turned = (numbers << 1) | (numbers >> (8 * size - 1))  # the sign becomes the lowest bit
    *rest, top = ((turned >> (8 * i)).astype(np.uint8) for i in range(size))
    below = top.max() - top
    far = np.flatnonzero(below >= MOST).astype("<u4")
    below[far] = MOST
    half = (len(top) + 1) // 2
    pairs = below[:half].copy()
    pairs[: len(top) - half] |= below[half:] << 4
    head = bytes([top.max()]) + len(far).to_bytes(4, "little")
    made = b"".join((head, pairs.tobytes(), *(plane.tobytes() for plane in rest), far.tobytes(), top[far].tobytes()))
    return made if len(made) < t.nbytes else None


def decode(data: bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Decode the data of `encode`. Raises ValueError if invalid; allocates no more than the tensor's bytes."""
    n, size = math.prod(shape), dtype.itemsize
    half, most = (n + 1) // 2, int.from_bytes(data[:1], "little")
    n_far = int.from_bytes(data[1:HEAD], "little")
    if dtype not in UNSIGNED or len(data) != HEAD + half + n * (size - 1) + 5 * n_far:
        raise ValueError("its size does not fit its tensor")
    pairs, rest = np.frombuffer(data, np.uint8, half, HEAD), HEAD + half + n * (size - 1)
    far, its = np.frombuffer(data, "<u4", n_far, rest), np.frombuffer(data, np.uint8, n_far, rest + 4 * n_far)
    if n_far and int(far.max()) >= n:
        raise ValueError("it has an index beyond its tensor")
    top = np.empty(n, np.uint8)
    np.bitwise_and(pairs, MOST, out=top[:half])
    np.right_shift(pairs[: n - half], 4, out=top[half:])
    np.subtract(most, top, out=top)
    top[far] = its
    turned = top.astype(UNSIGNED[dtype]) << (8 * (size - 1))
    for i in range(size - 1):
        turned |= np.frombuffer(data, np.uint8, n, HEAD + half + i * n).astype(UNSIGNED[dtype]) << (8 * i)
    numbers = (turned >> 1) | (turned << (8 * size - 1))
    return torch.from_numpy(numbers.view(np.uint8)).view(dtype).view(*shape)
