"""`nn.Linear` with quantized weights, and the replacement in a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvcli.kernels.linear_quantized import Bits, QuantizedWeight, linear_quantized, pack, why_not


class PackedLinear(nn.Module):
    """Replacement of one `nn.Linear`."""

    data: Tensor
    scale: Tensor

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.bits, self.group, self.is_native = weight.bits, weight.group, weight.is_native
        self.out_features, self.in_features = weight.shape
        self.register_buffer("data", weight.data)
        self.register_buffer("scale", weight.scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @staticmethod
    def of(layer: nn.Linear, bits: Bits, device: torch.device | None = None) -> PackedLinear:
        """Quantize a layer for the CPU's kernels; on `device`, in the portable order, if one is given."""
        weight = layer.weight.detach()
        packed = pack(weight, bits) if device is None else pack(weight.to(device), bits, native=False)
        return PackedLinear(packed, layer.bias)

    @property
    def weights(self) -> QuantizedWeight:
        shape = (self.out_features, self.in_features)
        return QuantizedWeight(self.bits, self.group, shape, self.data, self.scale, self.is_native)

    def forward(self, x: Tensor) -> Tensor:
        y = linear_quantized(x, self.weights)
        return y if self.bias is None else y.add_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}, group={self.group or self.in_features}"


@dataclass(frozen=True, slots=True)
class Swap:
    """Result of `quantize_`."""

    packed: int  # layers replaced
    kept: dict[str, int]  # reason -> number of layers not replaced
    weights: int  # quantized numbers
    nbytes: int  # bytes of the quantized layers

    def __add__(self, other: Swap) -> Swap:
        kept = dict(Counter(self.kept) + Counter(other.kept))
        return Swap(self.packed + other.packed, kept, self.weights + other.weights, self.nbytes + other.nbytes)


def quantize_(
    root: nn.Module,
    bits: Bits,
    done_with: Callable[[Tensor], object] = lambda _: None,
    device: torch.device | None = None,
) -> Swap:
    """Quantize every plain `nn.Linear` below `root` by `swap_` and `PackedLinear.of`."""

    def packed(layer: nn.Linear) -> nn.Module | str:
        why = why_not((layer.out_features, layer.in_features), bits)
        return why or PackedLinear.of(layer, bits, device)

    return swap_(root, packed, done_with)


@torch.no_grad()
def swap_(
    root: nn.Module, other: Callable[[nn.Linear], nn.Module | str], done_with: Callable[[Tensor], object]
) -> Swap:
    """Replace every plain `nn.Linear` below `root`, one at a time, so that at most one layer exists twice.

    `other` returns the replacement, or why there is none. `done_with` gets each old weight, which is not read again.
    """
    packed, weights, nbytes = 0, 0, 0
    kept: Counter[str] = Counter()
    # a list of all modules would keep every replaced layer alive until the end
    for parent in [module for module in root.modules() if type(module) is not nn.Linear]:
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear:
                continue
            fresh = other(layer)
            if isinstance(fresh, str):
                kept[fresh] += 1
                continue
            setattr(parent, name, fresh)
            packed, weights = packed + 1, weights + layer.weight.numel()
            held = [*fresh.named_parameters(), *fresh.named_buffers()]
            nbytes += sum(t.nbytes for name, t in held if name != "bias")
            done_with(layer.weight)
            del layer
    return Swap(packed, dict(kept), weights, nbytes)


@torch.no_grad()
def make_native_(root: nn.Module, done_with: Callable[[Tensor], object] = lambda _: None) -> None:
    """Arrange quantized 4-bit layers in portable order for this CPU's kernel, one at a time."""
    for layer in root.modules():
        if isinstance(layer, PackedLinear) and layer.bits == 4 and not layer.is_native:
            portable = layer.data
            layer.data, layer.is_native = layer.weights.native().data, True
            done_with(portable)


def packed_weights(root: nn.Module) -> int:
    """Return the number of quantized weights below `root`; none of them is a parameter."""
    return sum(p.in_features * p.out_features for p in root.modules() if isinstance(p, PackedLinear))
