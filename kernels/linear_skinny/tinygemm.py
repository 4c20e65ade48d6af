"""int4 layers by torch's own kernel, for CUDA devices without Triton, as on Windows.

`_weight_int4pack_mm` (tinygemm) reads kvcli's codes, scales and zeros, in an order of its own. It rounds each weight to
bfloat16 and multiplies any number of rows, 16 at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcli.kernels import triton_support
from kvcli.kernels.linear_quantized import pack, why_not


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """True if torch's kernel multiplies inputs of this dtype on this device."""
    if device.type != "cuda" or torch.version.hip is not None or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= triton_support.LEAST


class TorchInt4(nn.Module):
    """Layer with 4-bit weights on torch's kernel."""

    data: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        super().__init__()
        w = pack(layer.weight.detach().to(device), 4, native=False)
        self.out_features, self.in_features = w.shape
        swapped = w.data >> 4 | w.data << 4  # torch expects the first of two codes in the high half
        tiles = next(n for n in (8, 4, 2) if self.in_features % (16 * n) == 0)
        self.register_buffer("data", torch.ops.aten._convert_weight_to_int4pack(swapped, tiles))
        self.register_buffer("scale", w.scale)
        self.group, self.bias = w.group, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        y: Tensor = torch.ops.aten._weight_int4pack_mm(rows, self.data, self.group, self.scale)
        return (y if self.bias is None else y.add_(self.bias)).view(*x.shape[:-1], self.out_features)


def packed(layer: nn.Linear, device: torch.device) -> nn.Module | str:
    """Quantize a layer, or return why it is not quantized."""
    return why_not((layer.out_features, layer.in_features), 4) or TorchInt4(layer, device)
