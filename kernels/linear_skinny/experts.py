"""Quantized weights of experts for the kernels for few rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcli.kernels.linear_quantized.experts import Codes
from kvcli.kernels.linear_skinny import Weight, linear_skinny, of_packed, reference
from kvcli.kernels.moe_linear import Stack


@dataclass(frozen=True, slots=True)
class SkinnyCodes:
    """Weights of all experts, each in the order of the kernels."""

    stack: Stack  # data and scale
    like: Weight  # the first expert's

    @classmethod
    def of(cls, codes: Codes) -> SkinnyCodes:
        """Convert from the portable order."""
        n = len(codes)
        like = of_packed(codes[0])
        stack = Stack.of((of_packed(codes[e]).tensors for e in range(n)), n)
        return cls(stack, replace(like, data=stack.tensors[0][0], scale=stack.tensors[1][0]))

    def __getitem__(self, expert: int) -> Weight:
        data, scale = self.stack.tensors
        return replace(self.like, data=data[expert], scale=scale[expert])

    @property
    def memory(self) -> Tensor:
        return self.stack.memory

    def product(self, expert: int, x: Tensor) -> Tensor:
        return linear_skinny(x, self[expert])

    def plain(self) -> Tensor:
        return torch.stack([reference.weight(self[e]) for e in range(self.memory.shape[0])])
