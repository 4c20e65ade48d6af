"""Blocks of a GGUF tensor: dequantized, or converted to the 4-bit groups that kvcli's kernels multiply.

A row of such a tensor is a row of whole blocks, so rows are read in any order and some at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcli.kernels.linear_quantized import why_not

Bytes = NDArray[np.uint8]
_STRETCH = 1 << 22  # numbers dequantized at a time: 16 MiB in float32


def stretches(rows: int, columns: int) -> Iterator[slice]:
    """Slices of the rows of a tensor, each small enough to be dequantized at once."""
    step = max(1, _STRETCH // columns)
    return (slice(a, min(a + step, rows)) for a in range(0, rows, step))


def stays_packed(name: str, kind: str, shape: tuple[int, ...]) -> bool:
    """True if, on a CPU, a tensor of this transformers name is multiplied without dequantizing it."""
    in_layer = name.startswith("model.layers.") and name.endswith("_proj.weight")
    return in_layer and kind in PACKS and len(shape) == 2 and not why_not((shape[0], shape[1]), 4)


def numbers(raw: Bytes, kind: str) -> Tensor:
    """Dequantize rows of blocks [N, bytes] -> [N, K] float32."""
    import gguf

    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])))


def packed(raw: Bytes, kind: str) -> tuple[Tensor, Tensor]:
    """Split rows of blocks of a kind in PACKS into q [N, K] in 0..15 and (scale, zero) [N, K // 32, 2] float32.

    The weight is scale * (q - 8) + zero, exactly the value of the blocks.
    """
    n = raw.shape[0]
    q, scale, zero = PACKS[kind](raw)
    pairs = np.stack([scale, zero], axis=-1).reshape(n, -1, 2)
    return torch.from_numpy(q.reshape(n, -1)), torch.from_numpy(pairs)


def _q4_0(raw: Bytes) -> tuple[Bytes, NDArray[np.float32], NDArray[np.float32]]:
    """Blocks of 18 bytes: a scale in float16, 16 bytes of nibbles; w = scale * (q - 8)."""
    blocks = raw.reshape(-1, 18)
    scale = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scale, np.zeros_like(scale)


def _q4_1(raw: Bytes) -> tuple[Bytes, NDArray[np.float32], NDArray[np.float32]]:
    """Blocks of 20 bytes: scale and minimum in float16, 16 bytes of nibbles; w = scale * q + minimum."""
    blocks = raw.reshape(-1, 20)
    scale, least = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    return _nibbles(blocks[:, 4:]), scale, least + 8 * scale


def _q4_k(raw: Bytes) -> tuple[Bytes, NDArray[np.float32], NDArray[np.float32]]:
    """Blocks of 144 bytes: two float16, 8 scales and 8 minima of 6 bits in 12 bytes, 4 times 32 bytes of nibbles."""
    blocks = raw.reshape(-1, 144)
    d, least = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])  # [B, 1]
    a, b, c = blocks[:, 4:16].reshape(-1, 3, 4).transpose(1, 0, 2)  # [B, 4] each
    scales = np.concatenate([a & 63, (c & 15) | (a >> 2 & 48)], axis=1).astype(np.float32)  # [B, 8]
    leasts = np.concatenate([b & 63, (c >> 4) | (b >> 2 & 48)], axis=1).astype(np.float32)
    scale = d * scales
    return _nibbles(blocks[:, 16:].reshape(-1, 32)), scale, 8 * scale - least * leasts


PACKS: dict[str, Callable[[Bytes], tuple[Bytes, NDArray[np.float32], NDArray[np.float32]]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}


def _halves(raw: Bytes) -> NDArray[np.float32]:
    """Convert float16: [B, 2] bytes -> [B, 1] numbers."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """Split bytes into nibbles: [B, M] bytes -> [B, 2 M], all low nibbles, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)
