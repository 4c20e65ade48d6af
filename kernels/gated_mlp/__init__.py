"""Gated MLP of a decoder layer, down(act(gate(x)) * up(x)), in one call on a CPU or two on a GPU (arXiv 2002.05202).

x [..., E] -> [..., E] in bf16 or float32, with weights in the layout of `kernels.linear` or `kernels.linear_quantized`.
Products and roundings equal those of the separate modules. e^x and tanh are implemented here, so an activation differs
by at most one rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, dtype, nn

from kvcli.kernels import native as built
from kvcli.kernels.gated_mlp.reference import ACTIVATIONS as KNOWN
from kvcli.kernels.linear import KernelLinear
from kvcli.kernels.linear_epilogue.module import merged, share_
from kvcli.kernels.linear_skinny import Weight, linear_skinny
from kvcli.kernels.linear_skinny.reference import BLOCK
from kvcli.kernels.module_probe import first_and_last, group_by_kind, kind, probe_output

# One linear layer as an argument of native calls that compute several products.


class Product(ctypes.Structure):
    """The struct of native/c/layer.c. It stores addresses, so it must not outlive the layer's tensors."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("N", "K")),
        ("format", ctypes.c_void_p),
    ]


def type_of(layer: Any) -> dtype | None:
    """Return the dtype of a linear layer's inputs; None if the module is no linear layer, or has no product of ours."""
    found = layer.dtype if isinstance(layer, KernelLinear) and layer.as_weight is not None else None
    return found if found is None or layer.bias is None or layer.bias.dtype == found else None


def product_of(layer: Any) -> tuple[Product, list[Tensor | None]]:
    """Return the struct for a layer on a CPU that has a `type_of`, and the tensors that own its memory."""
    *tensors, format = layer.as_weight
    keeps = [*tensors, layer.bias]
    at = (None if t is None else t.data_ptr() for t in keeps)
    return Product(*at, layer.out_features, layer.in_features, format), keeps


ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # in the order of native/c/layer.c


class Mlp(ctypes.Structure):
    """The struct of native/c/layer.c. It stores addresses, so it must not outlive the weights."""

    _fields_ = [
        ("gate", Product),
        ("up", Product),
        ("down", Product),
        ("act", ctypes.c_int32),
        ("is_wide", ctypes.c_int32),
    ]


def gated_mlp(x: Tensor, mlp: Mlp, *, level: str | None = None) -> Tensor:
    """Compute x [..., E] in the weights' dtype -> [..., E]. `level`: a lesser kind of CPU than the best available."""
    functions = built.native(level)
    assert functions is not None
    if x.shape[-1] != mlp.down.N or x.dtype != (torch.float32 if mlp.is_wide else torch.bfloat16):
        raise ValueError(f"rows of {x.shape[-1]} {x.dtype} for an MLP of {mlp.down.N}")
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], mlp.down.N)
    functions.mlp(ctypes.addressof(mlp), x.data_ptr(), y.data_ptr(), x.numel() // x.shape[-1])
    return y


# Replace a model's gated MLPs by one of ours, if both compute the same for probe rows.


class NativeMlp:
    """Forward of one MLP. It references its weights but no module, because a reference would keep the model alive."""

    def __init__(self, linears: Sequence[nn.Module], act: str, own: Callable[[Tensor], Tensor]) -> None:
        """Set up the MLP. `linears`: gate, up, down; `own`: the module's forward, for rows of another dtype."""
        products, self._keeps = zip(*map(product_of, linears), strict=True)
        self.dtype, self.device, self.n = type_of(linears[0]), torch.device("cpu"), linears[2].out_features
        self.mlp = Mlp(*products, ACTIVATIONS.index(act), self.dtype == torch.float32)
        self._own = WeakMethod(own)
        self.kind = (act, self.dtype, *((p.N, p.K, p.format) for p in products))

    def share_(self) -> None:
        """Do nothing: the weights are the module's."""

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == self.dtype:
            return gated_mlp(hidden, self.mlp)
        own: Any = self._own()
        return own(hidden)


class FusedMlp:
    """Forward of one MLP on a GPU, by copies of the weights of gate and up until `share_` has the module use these."""

    def __init__(self, linears: Sequence[nn.Module], act: str, own: Callable[[Tensor], Tensor]) -> None:
        gate_up, down = merged(linears[:2]), merged(linears[2:])
        if gate_up is None or down is None or down.weight.shape[1] % BLOCK:
            raise ValueError("gate and up cannot be one product")
        self.gate_up, self.down, self.act, self._linears = gate_up, down, act, linears[:2]
        self.dtype, self.device, self.n = type_of(linears[0]), down.weight.data.device, down.weight.shape[0]
        self._own = WeakMethod(own)
        self.kind = (act, self.dtype, *((p.weight.kind, p.weight.shape, p.weight.group) for p in (gate_up, down)))

    def share_(self) -> None:
        share_(self._linears, self.gate_up)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == self.dtype:
            return self.run(hidden.reshape(-1, hidden.shape[-1]).contiguous(), None).view(hidden.shape)
        own: Any = self._own()
        return own(hidden)

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute x [M, E] -> [M, E], added to `residual`."""
        # imported late, because there may be no Triton where nothing is supported
        from kvcli.kernels.linear_epilogue.fused import gated

        return linear_skinny(gated(x, self.gate_up, self.act), self.down.weight, self.down.bias, residual)


@torch.no_grad()
def mlp_(root: nn.Module) -> int:
    """Replace the forward of all MLPs below `root` that are found to be gated. Return how many."""
    done = 0
    for group in group_by_kind(filter(_may_be_gated, root.modules()), kind):
        if len(found := {_way(module) for module in first_and_last(group)}) > 1 or (way := found.pop()) is None:
            continue
        for module in group:
            module.forward = way.of(module)
            module.forward.share_()
        done += len(group)
    return done


@dataclass(frozen=True, slots=True)
class Way:
    """Structure of an MLP: which of its linear layers are gate, up and down, and the activation."""

    order: tuple[int, ...]
    act: str

    def of(self, module: nn.Module) -> NativeMlp | FusedMlp:
        linears = self.linears(module)
        return (FusedMlp if isinstance(linears[0].as_weight, Weight) else NativeMlp)(linears, self.act, module.forward)

    def linears(self, module: nn.Module) -> list[Any]:
        return [_linears(module)[i] for i in self.order]


def _linears(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if type_of(child) is not None]


def _may_be_gated(module: nn.Module) -> bool:
    linears = _linears(module)
    if len(linears) != 3 or len(list(module.children())) != 4 or "forward" in vars(module):
        return False
    return len({*map(type_of, linears)}) == 1 and not list(module.parameters(recurse=False))


def _way(module: nn.Module) -> Way | None:
    """Return the structure; None if the MLP is not gated, or if several orders agree, as with constant weights."""
    (other,) = (child for child in module.children() if type_of(child) is None)
    if (act := _activation(other)) is None:
        return None
    ways = [way for order in permutations(range(3)) if _is_same(module, way := Way(order, act))]
    return ways[0] if len(ways) == 1 else None


def _activation(module: nn.Module) -> str | None:
    """Return the name of the activation, if it is a known one."""
    x = torch.linspace(-30, 30, 4001)
    found = probe_output(module, x)
    return next((name for name, act in KNOWN.items() if found is not None and torch.equal(found, act(x))), None)


def _is_same(module: nn.Module, way: Way) -> bool:
    """True if both agree on random rows, up to the few numbers whose activation is rounded differently."""
    linears = way.linears(module)
    gate, up, down = ((linear.out_features, linear.in_features) for linear in linears)
    if gate != up or gate != (down[1], down[0]):
        return False
    try:
        mlp = way.of(module)
    except ValueError:
        return False
    assert mlp.dtype is not None
    x = torch.randn(3, gate[1], generator=torch.Generator().manual_seed(0)).to(mlp.device, mlp.dtype)
    theirs, ours = probe_output(module, x), mlp(x)
    if theirs is None or theirs.shape != ours.shape:
        return False
    within = 1e-5 if mlp.dtype == torch.float32 else torch.finfo(mlp.dtype).eps / 2
    return bool((ours - theirs).float().norm() <= within * theirs.float().norm())
