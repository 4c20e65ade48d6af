"""Weights of experts and their routers in the panel layout of native linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.kernels.linear import NativeWeight, linear, pack, unpack, why_not
from kvcli.kernels.module_probe import REFUSALS
from kvcli.kernels.moe_linear import weights_of
from kvcli.kernels.moe_linear.tensor import Experts


@dataclass(frozen=True, slots=True)
class Panels:
    """Weights of all experts, each in the layout of `pack`."""

    memory: Tensor  # [E, panels, S, 64]
    n: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weights: Tensor) -> Panels:
        """Arrange the weights [E, N, K] of all experts."""
        first = pack(weights[0])
        memory = first.new_empty(weights.shape[0], *first.shape)
        for into, one in zip(memory, weights, strict=True):
            into.copy_(pack(one))
        return cls(memory, weights.shape[1], weights.dtype)

    def product(self, expert: int, x: Tensor) -> Tensor:
        return linear(x, self.memory[expert], None, self.n)

    def plain(self) -> Tensor:
        return torch.stack([unpack(one, self.n, self.dtype) for one in self.memory])


class _Strict(NativeWeight):
    """Probe weight that supports products only."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        raise NotImplementedError


@torch.no_grad()
def lay_out_experts_(root: nn.Module, done_with: Callable[[Tensor], object] = lambda _: None) -> int:
    """Arrange the plain weights of experts that transformers multiplies in groups, and the weights of routers.

    A module is a router if it only multiplies with its weight; a probe weight tests this. Returns the number of weights
    replaced.
    """
    done = 0
    for module in root.modules():
        for name, old, fresh in _laid_out(module):
            setattr(module, name, nn.Parameter(fresh, requires_grad=False))
            done_with(old)
            done += 1
            del old
    return done


def _laid_out(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield the supported weights of a module one by one: name, old, new."""
    for name, old, turned in weights_of(module):
        if isinstance(turned, bool):
            plain = old if turned else old.transpose(1, 2)
            if not why_not(plain[0]):
                yield name, old, Experts(Panels.of(plain), old.shape, old.dtype, turned)
    router = module._parameters.get("weight")
    if router is not None and router.dim() == 2 and not why_not(router) and _only_multiplies(module, router):
        yield "weight", router, NativeWeight.of(router)


def _only_multiplies(module: nn.Module, weight: nn.Parameter) -> bool:
    if isinstance(module, nn.Linear | nn.Embedding) or type(weight) is not nn.Parameter:
        return False
    try:
        module.weight = nn.Parameter(_Strict.of(weight), requires_grad=False)
        module(torch.ones(2, weight.shape[1], dtype=weight.dtype))
    except REFUSALS:
        return False  # needs more than rows, or uses its weight otherwise
    finally:
        module.weight = weight
    return True
