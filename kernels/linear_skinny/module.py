"""Linear layers on the kernels for few rows, and the replacement of plain and quantized layers on a supported GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.kernels import triton_support
from kvcli.kernels.linear import NativeWeight
from kvcli.kernels.linear_quantized import PackedLinear
from kvcli.kernels.linear_skinny import Weight, linear_skinny, of_packed, pack_nf4, plain, reference, why_not

BLOCK = 64  # inputs per nf4 scale


class SkinnyLinear(nn.Linear):
    """Plain layer on the kernels. Its weight is unchanged and may be shared with an embedding."""

    arrivals: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return linear_skinny(x, self.as_weight, self.bias)

    @property
    def as_weight(self) -> Weight:
        return Weight("plain", (self.out_features, self.in_features), self.weight, self.arrivals)

    def be_part_of(self, weight: Weight, bias: Tensor | None, part: slice) -> None:
        """Compute a part of the outputs of this weight, which other layers may share."""
        self.weight = nn.Parameter(weight.data[part], requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype


@dataclass(frozen=True, slots=True)
class FragmentWeight:
    """Weight in the order of the kernels, for a `NativeWeight`."""

    weight: Weight
    part: range  # of its outputs

    @property
    def memory(self) -> Tensor:
        return self.weight.data

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = linear_skinny(x, self.weight)[..., self.part.start : self.part.stop]
        return y if bias is None else y + bias

    def rows(self, index: Tensor) -> Tensor:
        return reference.rows(self.weight, index.flatten() + self.part.start).view(*index.shape, -1)

    def layer(self, bias: Tensor | None, dtype: torch.dtype) -> SkinnyPacked:
        """Return a layer that multiplies the weight."""
        return SkinnyPacked(self.weight, bias, dtype)

    def plain(self) -> Tensor:
        return self.rows(torch.arange(len(self.part), device=self.memory.device))


class SkinnyPacked(nn.Module):
    """Quantized layer on the kernels."""

    data: Tensor
    arrivals: Tensor
    scale: Tensor
    factor: Tensor | None

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        """`dtype`: of inputs."""
        super().__init__()
        self.dtype = dtype
        self.out_features, self.in_features = weight.shape
        self.be_part_of(weight, bias, slice(None))

    def be_part_of(self, weight: Weight, bias: Tensor | None, part: slice) -> None:
        """Compute a part of the outputs of this weight, which other layers may share."""
        self.kind, self.group, self._shape, self._part = weight.kind, weight.group, weight.shape, part
        for name in ("data", "arrivals", "scale", "factor"):
            self.register_buffer(name, getattr(weight, name))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear_skinny(x, self.as_weight, self.bias)[..., self._part]

    @property
    def as_weight(self) -> Weight:
        return Weight(self.kind, self._shape, self.data, self.arrivals, self.scale, self.group, self.factor)

    @property
    def weight(self) -> NativeWeight:
        """The weight for other code; `NativeWeight` describes the cost."""
        held = FragmentWeight(self.as_weight, range(self._shape[0])[self._part])
        return NativeWeight(held, (self.out_features, self.in_features), self.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}"


@torch.no_grad()
def lay_out_skinny_(root: nn.Module, done_with: Callable[[Tensor], object] = lambda _: None) -> int:
    """Replace the supported linear layers below `root`, one at a time: plain layers, kvcli's quantized layers in
    portable order, and bitsandbytes' nf4. Return how many.

    `done_with` gets each old weight, which is not read here again.
    """
    done = 0
    for parent in list(root.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and not why_not(layer.weight):
                layer.__class__ = SkinnyLinear
                layer.register_buffer("arrivals", plain(layer.weight).arrivals, persistent=False)
            elif (weight := packed_of(layer)) is not None:
                dtype = layer.scale.dtype if isinstance(layer, PackedLinear) else layer.weight.quant_state.dtype  # type: ignore[union-attr]
                setattr(parent, name, SkinnyPacked(weight, layer.bias, dtype))  # type: ignore[arg-type]
                done_with(layer.data if isinstance(layer, PackedLinear) else layer.weight)  # type: ignore[arg-type]
            else:
                continue
            done += 1
    return done


def packed_of(layer: nn.Module) -> Weight | None:
    """Return the layer's weight in the order of the kernels; None if it is not quantized, or not supported."""
    if isinstance(layer, PackedLinear):
        if layer.is_native or triton_support.why_not(layer.data.device, layer.scale.dtype):
            return None
        return of_packed(layer.weights)
    weight = layer._parameters.get("weight")
    state: Any = getattr(weight, "quant_state", None)  # set by bitsandbytes once the weight is on its device
    if weight is None or (getattr(state, "quant_type", ""), getattr(state, "blocksize", 0)) != ("nf4", BLOCK):
        return None
    if triton_support.why_not(weight.device, state.dtype) or len(state.shape) != 2 or state.shape[1] % BLOCK:
        return None
    return pack_nf4(*of_bitsandbytes(weight.data, state))


def of_bitsandbytes(data: Tensor, state: Any) -> tuple[Tensor, Tensor]:
    """Return the codes [N, K] and the largest number per block, [N, K // 64], which bitsandbytes quantizes too."""
    n, k = state.shape
    q = torch.stack([data.flatten() >> 4, data.flatten() & 15], dim=1).view(n, k)  # the first code is in the high half
    largest = state.absmax
    if state.nested:
        of_block = state.state2.absmax.repeat_interleave(state.state2.blocksize)[: largest.numel()]
        largest = state.state2.code[largest.long()] * of_block + state.offset
    return q, largest.float().view(n, k // BLOCK)
