"""Rotary position embedding of keys, and its inverse (RoFormer, arXiv 2104.09864).

Layouts: k [..., S, D], pos [..., S] or [S], integers. The first R = 2 * len(inv_freq) channels turn, the others pass.
Pairs are (c, c + R/2) as in Llama, or (2c, 2c + 1) where `interleaved` (Cohere, GLM). Angles, cosines and sines are
taken in float32, as transformers takes them, and the rest in float32 or better; results in the type of k. The inverse
divides by cos² + sin², so that a key comes back to the rounding of its own type. A key stored in 16 bits un-rotated is
rounded once more than one stored rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.rope import reference


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a layer turns its keys, at any length of text."""

    inv_freq: Tensor  # [R / 2] float32, radians per position
    scaling: float = 1.0  # of rotated keys (YaRN's and longrope's attention factor)
    interleaved: bool = False


def rotate(k: Tensor, pos: Tensor, rotary: Rotary) -> Tensor:
    """Keys as attention reads them, from keys before RoPE."""
    return _turned(k, pos, rotary, back=False)


def unrotate(k: Tensor, pos: Tensor, rotary: Rotary) -> Tensor:
    """Keys before RoPE, from keys as attention reads them."""
    return _turned(k, pos, rotary, back=True)


def _turned(k: Tensor, pos: Tensor, rotary: Rotary, *, back: bool) -> Tensor:
    given = k, pos, rotary.inv_freq, rotary.scaling, rotary.interleaved
    if triton_support.serves(k):
        from kvcli.kernels.rope import fused  # brings Triton, which is not everywhere

        return fused.turned(*given, back=back)
    return reference.unrotate(*given) if back else reference.rotate(*given)
