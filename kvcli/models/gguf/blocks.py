"""Blocks of a GGUF tensor: dequantized, or taken apart into the codes and scales that the CPU kernel multiplies.

A row of such a tensor is a row of whole blocks, so rows are read in any order and some at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcli.kernels import native
from kvcli.kernels.linear_quantized.formats import PANEL, Format
from kvcli.kernels.linear_skinny.ptx import IQ4, MXFP4

if TYPE_CHECKING:
    from kvcli.models.checkpoint import TensorHeader

Bytes = NDArray[np.uint8]
_STRETCH = 1 << 22  # numbers dequantized at a time: 16 MiB in float32
# tensors of linear layers and embeddings
_WEIGHTS = ("_proj.weight", "embed_tokens.weight", "lm_head.weight", "mtp.fc.weight")
_JOINED = re.compile(r"(.+)\.(?:[qkv]|gate|up)_proj\.weight$")  # projections that a GPU multiplies as one


def stretches(rows: int, columns: int) -> Iterator[slice]:
    """Slices of the rows of a tensor, whole panels, each small enough to be dequantized at once."""
    step = max(1, _STRETCH // columns // PANEL) * PANEL
    return (slice(a, min(a + step, rows)) for a in range(0, rows, step))


def stays_packed(name: str, tensor: TensorHeader, kind: str) -> bool:
    """True if a tensor of this transformers name is multiplied without dequantizing it on this kind of device; "" =
    none."""
    if not kind:
        return False
    # no panel has outputs of two experts
    of_experts = kind == "cpu" and len(tensor.shape) == 3 and ".experts." in name and tensor.in_file[1] % PANEL == 0
    is_served = of_experts or (len(tensor.shape) == 2 and name.endswith(_WEIGHTS) and not tensor.is_turned)
    has_kernel = kind != "cpu" or native.native() is not None
    return is_served and not tensor.is_made and tensor.dtype in PACKED and has_kernel


def packed_bytes(kind: str, shape: Sequence[int], device: str = "cpu", *, is_joined: bool = False) -> int:
    """Bytes of a weight [N, K], or of those of experts [E, N, K], on a kind of device. A GPU has 4 or 8 bits a code,
    and 8 a factor; `is_joined`: the weight became a part of one in 8 bits (Weight.merged)."""
    of = _EIGHTS if is_joined else PACKED[kind].format
    if device != "cpu":
        of = replace(of, bits=4 if of.bits <= 4 else 8, factor_bits=8 if of.factor_bits else 0)
    return sum(of.nbytes(prod(shape[:-1]), shape[-1]))


def joined_with(name: str) -> str:
    """Return the module whose projections a GPU multiplies as one with this tensor; "" = it stays by itself."""
    found = _JOINED.match(name)
    return found[1] if found else ""


def packed_sizes(tensors: Mapping[str, TensorHeader], device: str) -> dict[str, int]:
    """Bytes of each tensor that stays quantized on a kind of device, once projections of several formats are joined
    there. A model whose layers stay as transformers has them joins none of q, k and v, and takes less."""
    kept = {name: t for name, t in tensors.items() if stays_packed(name, t, device)}
    groups: dict[str, list[str]] = {}
    for name in tensors if device == "cuda" else ():
        groups.setdefault(joined_with(name), []).append(name)
    groups.pop("", None)
    joined = {module for module, group in groups.items() if _becomes_eights([kept.get(name) for name in group])}
    return {
        name: packed_bytes(t.dtype, t.in_file, device, is_joined=joined_with(name) in joined)
        for name, t in kept.items()
    }


def _becomes_eights(group: Sequence[TensorHeader | None]) -> bool:
    """True if these quantized weights (None: another) differ in format and can be joined all the same."""
    able = [t for t in group if t is not None and PACKED[t.dtype].format.factor_bits and not t.shape[0] % PANEL]
    return len(able) == len(group) and len({t.dtype for t in able}) > 1


def numbers(raw: Bytes, kind: str) -> Tensor:
    """Dequantize rows of blocks [N, bytes] -> [N, K] float32."""
    import gguf

    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])))


@dataclass(frozen=True, slots=True)
class Plane:
    """Bits of the numbers of a block: `bits` of each, from so many bytes on. The lowest bits of `stride` successive
    bytes come first, then their next bits."""

    at: int
    nbytes: int
    bits: int
    stride: int

    def read(self, blocks: Bytes) -> Bytes:
        """[B, bytes] -> [B, numbers]."""
        part = blocks[:, self.at : self.at + self.nbytes].reshape(len(blocks), -1, 1, self.stride)
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)[:, None]
        return (part >> shifts & np.uint8((1 << self.bits) - 1)).reshape(len(blocks), -1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Layout of the blocks of one type."""

    nbytes: int
    format: Format
    low: Plane  # low bits of the codes
    high: Plane | None = None
    d: tuple[int, int] = (0, 2)  # bytes of d, and of least if the format has one
    factors: Callable[[Bytes], Bytes] = lambda blocks: blocks[:, :0]  # [B, bytes] -> those of all groups, [B, ...]

    def codes(self, raw: Bytes) -> Tensor:
        """Rows of blocks [N, bytes] -> codes [N, K], uint8."""
        blocks = raw.reshape(-1, self.nbytes)
        q = self.low.read(blocks)
        if self.high is not None:
            q |= self.high.read(blocks) << self.low.bits
        if self.format.bits == 8:  # signed in the block
            q ^= 128
        return torch.from_numpy(q.reshape(len(raw), -1))

    def scales(self, raw: Bytes) -> Tensor:
        """Rows of blocks [N, bytes] -> [N, K / span, bytes of a span]: d, least, then the factors of each group."""
        blocks = raw.reshape(-1, self.nbytes)
        d = blocks[:, slice(*self.d)]
        if self.format.is_bf16:  # 2^(e - 128), which denormal numbers continue below e = 1
            e = d.astype(np.uint16)
            d = np.where(e < 2, 32 << e, (e - 1) << 7).astype("<u2").view(np.uint8)
        if self.format.has_min and not self.format.factor_bits:  # added in the block, subtracted in the format
            d = d ^ np.array([0, 0, 0, 128], np.uint8)
        found = np.concatenate([d, self.factors(blocks).reshape(len(blocks), -1)], axis=1)
        return torch.from_numpy(found.reshape(len(raw), -1, self.format.per_span))


def _of_4_k(blocks: Bytes) -> Bytes:
    """8 factors and 8 minima of 6 bits in 12 bytes."""
    a, b, c = blocks[:, 4:16].reshape(-1, 3, 4).transpose(1, 0, 2)  # [B, 4] each
    factors = np.concatenate([a & 63, (c & 15) | (a >> 2 & 48)], axis=1)  # [B, 8]
    least = np.concatenate([b & 63, (c >> 4) | (b >> 2 & 48)], axis=1)
    return np.stack([factors, least], axis=2)


def _six_bits(low: Plane, high: Plane) -> Callable[[Bytes], Bytes]:
    """Factors of 6 bits, stored plus 32."""
    return lambda blocks: np.subtract(low.read(blocks) | high.read(blocks) << 4, 32, dtype=np.uint8)


def _table(values: tuple[int, ...], span: int, **more: Any) -> Format:
    return Format(4, 32, 128, span, table=tuple(v + 128 for v in values), **more)


PACKED = {
    "Q4_0": Blocks(18, Format(4, 32, 8, 32), Plane(2, 16, 4, 16)),
    "Q4_1": Blocks(20, Format(4, 32, 0, 32, True), Plane(4, 16, 4, 16), d=(0, 4)),
    "Q5_0": Blocks(22, Format(5, 32, 16, 32), Plane(6, 16, 4, 16), Plane(2, 4, 1, 1)),
    "Q5_1": Blocks(24, Format(5, 32, 0, 32, True), Plane(8, 16, 4, 16), Plane(4, 4, 1, 1), d=(0, 4)),
    "Q8_0": Blocks(34, Format(8, 32, 128, 32), Plane(2, 32, 8, 32)),
    "Q2_K": Blocks(84, Format(2, 16, 0, 256, True, 4), Plane(16, 64, 2, 32), d=(80, 84), factors=lambda b: b[:, :16]),
    "Q3_K": Blocks(110, Format(3, 16, 4, 256, False, 8), Plane(32, 64, 2, 32), Plane(0, 32, 1, 32), (108, 110),
                   _six_bits(Plane(96, 8, 4, 8), Plane(104, 4, 2, 4))),
    "Q4_K": Blocks(144, Format(4, 32, 0, 256, True, 8), Plane(16, 128, 4, 32), None, (0, 4), _of_4_k),
    "Q5_K": Blocks(176, Format(5, 32, 0, 256, True, 8), Plane(48, 128, 4, 32), Plane(16, 32, 1, 32), (0, 4), _of_4_k),
    "Q6_K": Blocks(210, Format(6, 16, 32, 256, False, 8), Plane(0, 128, 4, 64), Plane(128, 64, 2, 32), (208, 210),
                   lambda b: b[:, 192:208]),
    "IQ4_NL": Blocks(18, _table(IQ4, 32), Plane(2, 16, 4, 16)),
    "IQ4_XS": Blocks(136, _table(IQ4, 256, factor_bits=8), Plane(8, 128, 4, 16),
                     factors=_six_bits(Plane(4, 4, 4, 1), Plane(2, 2, 2, 1))),
    "MXFP4": Blocks(17, _table(MXFP4, 32, is_bf16=True), Plane(1, 16, 4, 16), d=(0, 1)),
}  # fmt: skip
_EIGHTS = Format(8, 16, 0, 256, True, 8)  # holds the numbers of all formats with factors
