"""Linear layers for few rows on a GPU with what follows them in a decoder layer, in one launch.

`heads`: q, k and v as one product, norms of heads and rotary embedding, as `before` of decoder_layer/reference.py.
`gated`: gate and up as one product, the activation and the product of both, as in gated_mlp/reference.py. x [M, K] in
bfloat16 or float16. Rows are batch invariant as in kernels/linear_skinny; larger passes use its fastest product, and a
launch for the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvcli.kernels.linear_skinny.reference import Weight
from kvcli.kernels.rms_norm.reference import RMS


@dataclass(frozen=True, slots=True)
class MergedLinear:
    """A linear layer, or several of the same inputs whose weights are stored as one."""

    weight: Weight  # [N, K]
    bias: Tensor | None  # [N]


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, then key heads, then as many value heads among the outputs of a product."""

    n_query: int
    d: int
    of_q: RMS | None = None  # norms of single heads, of one form; both or none
    of_k: RMS | None = None
