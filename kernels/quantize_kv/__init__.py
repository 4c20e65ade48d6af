"""Quantize and dequantize keys and values of one KV head (KIVI, arXiv 2402.02750; 8 bits as in KVQuant's baselines).

Layouts, for S slots of head size D; a code is an unsigned step above `zero`, at 8 bits a signed multiple of `scale`:
  keys, 8 bits        codes [S, D] int8, scale [S], one per slot
  keys, 4 or 2 bits   codes [S, D * bits / 8] uint8, scale and zero [S / g, D]: g slots share them, by channel
  values, 8 bits      codes [D, S] int8, transposed, scale [S]; S is rounded up to a multiple of 16 with zeros
  values, 4 or 2      codes [S, D * bits / 8] uint8, scale and zero [S, D / c]: c channels share them, by slot
  8 bits, split       as 4 bits, and `fine` like codes: the lower half of each code (QuantSpec, arXiv 2502.10424)
  16 bits             codes [S, D] in the dtype of the input, no scale
A byte holds neighbouring channels, the first in its lowest bits. Scales and zeros are float16. Its 11 bits represent a
narrow range far from zero eight times as well as the 8 of bfloat16. Numbers beyond 65,504, which float16 cannot hold,
are clipped. Codes are rounded against the scales as stored. On GPUs that kernels/triton_support.py supports a kernel
gives the same codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels import triton_support
from kvcli.kernels.quantize_kv.reference import (
    hadamard,
    keys_of,
    round_halves,
    round_range,
    round_scaled,
    spread,
    squeeze,
    values_of,
    width_of,
)

LANES = 16  # slots; torch's quantized product reads so many at a time, without handling a remainder


@dataclass(frozen=True, slots=True)
class Rounded:
    """Quantized keys or values of one head, in one of the layouts above."""

    bits: int
    codes: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    fine: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that take memory."""
        return [t for t in (self.codes, self.scale, self.zero, self.fine) if t is not None]

    @property
    def coarse(self) -> Rounded:
        """The 4-bit codes without their lower halves."""
        return Rounded(self.bits, self.codes, self.scale, self.zero)


def pack_keys(k: Tensor, bits: int, group: int, *, halves: bool = False) -> Rounded:
    """Quantize keys [S, D]. With 4 or 2 bits S is a multiple of `group`, and D * bits one of 8. `halves`: split 8-bit
    codes into 4 bits and 4 finer ones."""
    if halves:
        upper, lower, scale, zero = round_halves(k.unflatten(0, (-1, group)), 1)
        codes, fine = (squeeze(half.flatten(0, 1), 4) for half in (upper, lower))
        return Rounded(4, codes, scale.squeeze(1), zero.squeeze(1), fine)
    if bits == 16:
        return Rounded(16, k)
    if triton_support.serves(k):
        from kvcli.kernels.quantize_kv import fused  # imports Triton, which is not installed everywhere

        return Rounded(
            bits, *(fused.round_scaled(k) if bits == 8 else fused.round_range(k.unflatten(0, (-1, group)), bits, 1))
        )
    if bits == 8:
        return Rounded(8, *round_scaled(k))
    codes, scale, zero = round_range(k.unflatten(0, (-1, group)), bits, 1)  # [S / g, g, D], [S / g, 1, D]
    return Rounded(bits, squeeze(codes.flatten(0, 1), bits), scale.squeeze(1), zero.squeeze(1))


def pack_values(v: Tensor, bits: int, group: int, *, halves: bool = False) -> Rounded:
    """Quantize values [S, D], by groups of at most `group` channels. `halves`: split codes, 4 bits and 4 finer bits."""
    if halves:
        upper, lower, scale, zero = round_halves(v.unflatten(1, (-1, width_of(v.shape[1], group))), 2)
        codes, fine = (squeeze(half.flatten(1), 4) for half in (upper, lower))
        return Rounded(4, codes, scale.squeeze(2), zero.squeeze(2), fine)
    if bits == 16:
        return Rounded(16, v)
    width = width_of(v.shape[1], group)
    if triton_support.serves(v) and width * bits % 8 == 0:
        from kvcli.kernels.quantize_kv import fused

        if bits == 8:
            return Rounded(8, *fused.round_scaled(v, -(-v.shape[0] // LANES) * LANES))
        codes, scale, zero = fused.round_range(v.unflatten(1, (-1, width)), bits, 2)
        return Rounded(bits, codes.view(v.shape[0], v.shape[1] * bits // 8), scale, zero)
    if bits == 8:
        codes, scale = round_scaled(v)
        return transposed(codes, scale)
    codes, scale, zero = round_range(v.unflatten(1, (-1, width)), bits, 2)  # [S, D / c, c]
    return Rounded(bits, squeeze(codes.flatten(1), bits), scale.squeeze(2), zero.squeeze(2))


def turned(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply x [.., D] by a Hadamard `matrix` [D, D], in the dtype of the matrix."""
    if triton_support.serves(x, matrix) and 16 <= x.shape[-1] <= 256:
        from kvcli.kernels.quantize_kv import fused

        return fused.turned(x)
    return x.to(matrix.dtype) @ matrix


def transposed(codes: Tensor, scale: Tensor) -> Rounded:
    """Build values of 8 bits from codes [S, D] and scale [S]."""
    return Rounded(8, *(pad(t, (0, -len(scale) % LANES)).contiguous() for t in (codes.T, scale)))


def unpack_keys(r: Rounded, like: Tensor) -> Tensor:
    """Dequantize to keys [S, D], in the dtype of `like`."""
    return keys_of(r.bits, r.codes, r.scale, r.zero, like.dtype, r.fine)


def unpack_values(r: Rounded, like: Tensor, n: int) -> Tensor:
    """Dequantize to the first n values [n, D], in the dtype of `like`."""
    return values_of(r.bits, r.codes, r.scale, r.zero, like.dtype, r.fine)[:n]


# imported for others, beside what is defined here
__all__ = ["hadamard", "round_range", "spread", "squeeze", "width_of"]
