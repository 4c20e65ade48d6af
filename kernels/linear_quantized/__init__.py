"""Linear layers with weights quantized to 8 or 4 bits, which remain quantized while they run on a CPU.

Layouts: x [..., K], weight [N, K], result [..., N] in x's dtype (bfloat16, float16 or float32).
  8 bits: w[n, k] = scale[n] * q[n, k],                          q in -127..127, one scale per output
  4 bits: w[n, k] = scale[n, k // g] * (q[n, k] - 8) + zero[n, k // g],  q in 0..15, one pair per g inputs
On a CPU the native kernel computes them; torch does if there is none, and for float16. `why_not` rejects shapes for
which torch's kernels would read or write out of bounds (they do not check), and a group that does not divide K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvcli.kernels.linear_quantized import cpu, panels, reference

Bits = Literal[8, 4]
GROUPS = (128, 64, 32)  # groups of the int4 kernel; wider is smaller and faster, narrower is closer to the weights


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Quantized weight of one layer. `is_native`: `data` is in the order of the CPU kernel for its scales."""

    bits: Bits
    group: int  # 0 = a scale per output
    shape: tuple[int, int]  # N, K
    data: Tensor  # unless native: 8 bits [N, K] int8; 4 bits [N, K // 2] uint8, low nibble first
    scale: Tensor  # 8 bits: [N]; 4 bits: [K // g, N, 2], scale and zero
    is_native: bool

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    @property
    def codes(self) -> Tensor:
        """The codes [N, K], int8 or 0..15. Raises TypeError if only a kernel reads their order."""
        if self.is_native:
            raise TypeError("weights packed for the CPU's kernel can only be multiplied")
        return self.data if self.bits == 8 else reference.unpack4(self.data)

    def plain(self) -> Tensor:
        """Return the dequantized weight [N, K], in float32."""
        return reference.weight(self.bits, self.group, self.codes, self.scale)

    def native(self) -> QuantizedWeight:
        """Return the weight in the order of the CPU kernel for its scales."""
        if self.is_native:
            return self
        return replace(self, data=arrange(self.codes, self.bits, self.scale.dtype), is_native=True)


def why_not(shape: tuple[int, int], bits: Bits) -> str:
    """Return why a weight of this shape cannot be quantized; "" if it can."""
    n, k = shape
    if bits == 8:
        # torch reads 16 inputs at a time without a check: 13 inputs read numbers beyond the tensor, 97 crashed
        return f"{k} inputs are not a multiple of 16" if k % 16 else ""
    if group_of(k) == 0:
        return f"{k} inputs are not a multiple of {GROUPS[-1]}"
    return f"{n} outputs are not a multiple of 16" if n % 16 else ""


def group_of(k: int) -> int:
    """Return the inputs per 4-bit group for a layer of `k` inputs; 0 if no group divides `k`."""
    return next((g for g in GROUPS if k % g == 0), 0)


def padded_outputs(n: int) -> int:
    """Return the outputs stored in memory for a layer of `n` outputs, with the CPU kernel's padding."""
    return -(-n // panels.PANEL) * panels.PANEL if panels.serves(torch.bfloat16) else n


def pack(weight: Tensor, bits: Bits, *, native: bool = True) -> QuantizedWeight:
    """Quantize a weight [N, K]; scales keep its dtype. Raises ValueError if `why_not` has a reason."""
    n, k = weight.shape
    if native and (why := why_not((n, k), bits)):
        raise ValueError(f"a weight of {n} x {k} cannot be quantized to {bits} bits: {why}")
    group = 0 if bits == 8 else group_of(k) or k
    q, scale = reference.round8(weight) if bits == 8 else reference.round4(weight, group)
    data = arrange(q, bits, scale.dtype) if native else q if bits == 8 else reference.pack4(q)
    return QuantizedWeight(bits, group, (n, k), data, scale, native)


def arrange(q: Tensor, bits: Bits, dtype: torch.dtype) -> Tensor:
    """Arrange codes [N, K] in the order of the CPU kernel for inputs of `dtype`."""
    if panels.serves(dtype):
        return panels.arrange(q, bits)
    return q if bits == 8 else cpu.pack4(q)


def linear_quantized(x: Tensor, w: QuantizedWeight) -> Tensor:
    """Compute x [..., K] times the quantized weight, [..., N]."""
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"{x.shape[-1]} inputs for a weight of {w.shape[1]}")
    if x.dtype != w.scale.dtype:
        raise ValueError(f"inputs are {x.dtype}, the scales {w.scale.dtype}")
    rows = x.reshape(-1, x.shape[-1])  # [M, K]
    if w.is_native and x.device.type != "cpu":
        raise ValueError(f"packed for the CPU kernel, but the inputs are on {x.device.type}")
    if rows.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], w.shape[0])
    if w.is_native and panels.serves(x.dtype):
        y = panels.linear(rows, w.shape[0], w.bits, w.group, w.data, w.scale)
    else:
        y = (cpu.linear if w.is_native else reference.linear)(rows, w.bits, w.group, w.data, w.scale)
    return y.view(*x.shape[:-1], w.shape[0])


def explain() -> str:
    """Describe the implementation of quantized layers here; for `kvcli doctor`."""
    return "native kernel, float16 on torch" if panels.serves(torch.bfloat16) else cpu.explain()


__all__ = [
    "GROUPS",
    "Bits",
    "QuantizedWeight",
    "arrange",
    "explain",
    "group_of",
    "linear_quantized",
    "pack",
    "padded_outputs",
    "why_not",
]
