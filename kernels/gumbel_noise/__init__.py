"""Gumbel noise as a pure function of (seed, position, token): sampling that any drafter leaves untouched.

argmax(logp + gumbel) draws from softmax(logp) (the Gumbel-max trick). Because the noise of a token at a position does
not depend on how the engine got there, one seed gives one text with any drafter, any batch of rows and any order of
evaluation (coupled noise: arXiv 2408.07978).
"""

from __future__ import annotations

from torch import Tensor

from kvcli.kernels.gumbel_noise.reference import gumbel as _reference


def gumbel(seed: int | Tensor, pos: Tensor, ids: Tensor) -> Tensor:
    """pos [N] int64 and ids [N, C] or [C] int64 -> noise [N, C] float64. A seed on the device [] is int64."""
    return _reference(seed, pos, ids)
