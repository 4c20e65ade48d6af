"""int4 layers by torch's own kernel, for CUDA devices without Triton, as on Windows.

`_weight_int4pack_mm` (tinygemm) reads kvcli's codes, scales and zeros, in an order of its own. It rounds each weight to
bfloat16 and multiplies any number of rows, 16 at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from kvcli.kernels import triton_support
from kvcli.kernels.linear_quantized import PackedLinear, QuantizedWeight


@cache
def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Return why torch's kernel does not multiply inputs of this dtype on this device; "" if it does."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"torch has no int4 for {device.type}"
    if dtype != torch.bfloat16:
        return f"torch's int4 needs bfloat16, not {str(dtype).removeprefix('torch.')}"
    is_old = torch.cuda.get_device_capability(device) < triton_support.LEAST
    return "torch's int4 needs compute capability 8.0" if is_old else ""


class TorchInt4(nn.Module):
    """Layer with 4-bit weights on torch's kernel."""

    data: Tensor
    scale: Tensor

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """`weight`: in portable order."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group = weight.group
        swapped = weight.data >> 4 | weight.data << 4  # torch expects the first of two codes in the high half
        tiles = next(n for n in (8, 4, 2) if self.in_features % (16 * n) == 0)
        self.register_buffer("data", torch.ops.aten._convert_weight_to_int4pack(swapped, tiles))
        self.register_buffer("scale", weight.scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        y: Tensor = torch.ops.aten._weight_int4pack_mm(rows, self.data, self.group, self.scale)
        y = y if self.bias is None else y.add_(self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


def lay_out_tinygemm_(root: nn.Module, done_with: Callable[[Tensor], object]) -> None:
    """Replace kvcli's 4-bit layers in portable order below `root`, one at a time; `done_with` gets the old codes."""
    for parent in list(root.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, PackedLinear) and not layer.is_native:
                setattr(parent, name, TorchInt4(layer.weights, layer.bias))
                done_with(layer.data)
