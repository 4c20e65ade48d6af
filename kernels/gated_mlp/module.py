"""The native gated MLP in the place of a model's own, wherever both are found to compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from kvcli.kernels.gated_mlp import ACTIVATIONS, Mlp, gated_mlp
from kvcli.kernels.gated_mlp.product import product_of, type_of
from kvcli.kernels.gated_mlp.reference import ACTIVATIONS as KNOWN
from kvcli.kernels.trial import tried


class NativeMlp:
    """The forward of one MLP. Holds its weights and no module: a module that held itself would outlive its model."""

    def __init__(self, linears: Sequence[nn.Module], act: str, own: Callable[[Tensor], Tensor]) -> None:
        """`linears`: gate, up and down; `own`: the module's forward, for rows of another type than its weights'."""
        products, self._keeps = zip(*map(product_of, linears), strict=True)
        self.dtype = type_of(linears[0])
        self.mlp = Mlp(*products, ACTIVATIONS.index(act), self.dtype == torch.float32)
        self._own = WeakMethod(own)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == self.dtype:
            return gated_mlp(hidden, self.mlp)
        own = self._own()
        assert own is not None
        return own(hidden)


@torch.no_grad()
def mlp_(root: nn.Module) -> int:
    """Have all MLPs below `root` computed natively that are found to be gated ones. Returns how many."""
    done = 0
    for module in root.modules():
        linears = [child for child in module.children() if type_of(child) is not None]
        others = [child for child in module.children() if type_of(child) is None]
        if len(linears) != 3 or len(others) != 1 or "forward" in vars(module) or len({*map(type_of, linears)}) > 1:
            continue
        if list(module.parameters(recurse=False)) or (act := _activation(others[0])) is None:
            continue
        for order in permutations(linears):
            mlp = NativeMlp(order, act, module.forward)
            if _is_same(module, mlp):
                module.forward = mlp
                done += 1
                break
    return done


def _activation(module: nn.Module) -> str | None:
    """Which of ours it is."""
    x = torch.linspace(-30, 30, 4001)
    found = tried(module, x)
    return next((name for name, act in KNOWN.items() if found is not None and torch.equal(found, act(x))), None)


def _is_same(module: nn.Module, mlp: NativeMlp) -> bool:
    """On random rows, but for the few numbers whose activation is rounded to the other side."""
    gate, up, down = (mlp.mlp.gate, mlp.mlp.up, mlp.mlp.down)
    if (gate.N, gate.K) != (up.N, up.K) or (gate.N, gate.K) != (down.K, down.N):
        return False
    x = torch.randn(3, gate.K, generator=torch.Generator().manual_seed(0)).to(mlp.dtype)
    theirs, ours = tried(module, x), mlp(x)
    if theirs is None or theirs.shape != ours.shape:
        return False
    within = 4e-3 if mlp.dtype == torch.bfloat16 else 1e-5
    return bool((ours - theirs).float().norm() <= within * theirs.float().norm())
