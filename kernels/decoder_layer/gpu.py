"""Standard decoder layer on a GPU in few launches: three before its attention, four after it.

The norms, roundings and order of operations are those of reference.py; products are those of kernels/linear_epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvcli.kernels.gated_mlp import FusedMlp
from kvcli.kernels.linear_epilogue import Heads, MergedLinear
from kvcli.kernels.linear_skinny import linear_skinny
from kvcli.kernels.rms_norm.reference import RMS


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """Weights of a layer."""

    first: RMS
    second: RMS
    of_attention: RMS | None  # norms of the outputs of attention and MLP (Gemma 2), both or none
    of_mlp: RMS | None
    qkv: MergedLinear
    heads: Heads
    o: MergedLinear
    mlp: FusedMlp

    def before(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute x [N, E] -> q [H, N, D], k, v [K, N, D], views of [N, .., D]; cos, sin [N, R]; None = no rotation."""
        # imported late, because there may be no Triton where nothing is supported
        from kvcli.kernels.linear_epilogue.fused import heads
        from kvcli.kernels.rms_norm.fused import rms_norm

        q, kv = heads(rms_norm(x, self.first), self.qkv, self.heads, cos, sin)
        k, v = kv.transpose(0, 1).chunk(2)
        return q.transpose(0, 1), k, v

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """Compute x [N, E], attention output [N, H, D] -> [N, E]."""
        from kvcli.kernels.rms_norm.fused import add_normed, rms_norm

        y, o = attended.flatten(1), self.o
        if self.of_attention is None or self.of_mlp is None:
            x = linear_skinny(y, o.weight, o.bias, x)
            return self.mlp.run(rms_norm(x, self.second), x)
        x, normed = add_normed(x, linear_skinny(y, o.weight, o.bias), self.of_attention, self.second)
        return add_normed(x, self.mlp.run(normed, None), self.of_mlp)[0]
