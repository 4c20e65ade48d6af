"""Rotary position embedding of keys, and its inverse (RoFormer, arXiv 2104.09864).

Layouts: k [..., S, D], pos [..., S] or [S], integers. The first R = 2 * len(inv_freq) channels are rotated, the others
are copied. Pairs are (c, c + R/2) as in Llama, or (2c, 2c + 1) if `interleaved` (Cohere, GLM). Angles, cosines and
sines are computed in float32, as in transformers, and the rest in float32 or better; results have the dtype of k. The
inverse divides by cos² + sin², so that it restores a key up to the rounding of its dtype. A key stored unrotated in 16
bits is rounded once more than a key stored rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.rope import reference


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding of a layer, for any sequence length."""

    inv_freq: Tensor  # [R / 2] float32, radians per position
    scaling: float = 1.0  # factor of rotated keys (attention factor of YaRN and longrope)
    interleaved: bool = False


def rotate(k: Tensor, pos: Tensor, rotary: Rotary) -> Tensor:
    """Rotate keys from before RoPE, for attention."""
    return _turned(k, pos, rotary, back=False)


def unrotate(k: Tensor, pos: Tensor, rotary: Rotary) -> Tensor:
    """Restore keys before RoPE from rotated keys."""
    return _turned(k, pos, rotary, back=True)


def _turned(k: Tensor, pos: Tensor, rotary: Rotary, *, back: bool) -> Tensor:
    given = k, pos, rotary.inv_freq, rotary.scaling, rotary.interleaved
    if triton_support.serves(k):
        from kvcli.kernels.rope import fused  # imports Triton, which is not installed everywhere

        return fused.turned(*given, back=back)
    return reference.unrotate(*given) if back else reference.rotate(*given)
