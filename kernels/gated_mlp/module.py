"""Replace a model's gated MLPs by the native one, if both compute the same for probe rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from kvcli.kernels.gated_mlp import ACTIVATIONS, Mlp, gated_mlp
from kvcli.kernels.gated_mlp.product import product_of, type_of
from kvcli.kernels.gated_mlp.reference import ACTIVATIONS as KNOWN
from kvcli.kernels.module_probe import first_and_last, group_by_kind, kind, probe_output


class NativeMlp:
    """Forward of one MLP. It references its weights but no module, because a reference would keep the model alive."""

    def __init__(self, linears: Sequence[nn.Module], act: str, own: Callable[[Tensor], Tensor]) -> None:
        """Set up the MLP. `linears`: gate, up, down; `own`: the module's forward, for rows of another dtype."""
        products, self._keeps = zip(*map(product_of, linears), strict=True)
        self.dtype = type_of(linears[0])
        self.mlp = Mlp(*products, ACTIVATIONS.index(act), self.dtype == torch.float32)
        self._own = WeakMethod(own)
        self.kind = (act, self.dtype, *((p.N, p.K, p.bits, p.group) for p in products))

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == self.dtype:
            return gated_mlp(hidden, self.mlp)
        own = self._own()
        assert own is not None
        return own(hidden)


@torch.no_grad()
def mlp_(root: nn.Module) -> int:
    """Replace the forward of all MLPs below `root` that are found to be gated. Return how many."""
    done = 0
    for group in group_by_kind(filter(_may_be_gated, root.modules()), kind):
        if len(found := {_way(module) for module in first_and_last(group)}) > 1 or (way := found.pop()) is None:
            continue
        for module in group:
            module.forward = way.of(module)
        done += len(group)
    return done


@dataclass(frozen=True, slots=True)
class Way:
    """Structure of an MLP: which of its linear layers are gate, up and down, and the activation."""

    order: tuple[int, ...]
    act: str

    def of(self, module: nn.Module) -> NativeMlp:
        linears = _linears(module)
        return NativeMlp([linears[i] for i in self.order], self.act, module.forward)


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
    ways = [way for order in permutations(range(3)) if _is_same(module, (way := Way(order, act)).of(module))]
    return ways[0] if len(ways) == 1 else None


def _activation(module: nn.Module) -> str | None:
    """Return the name of the activation, if it is a known one."""
    x = torch.linspace(-30, 30, 4001)
    found = probe_output(module, x)
    return next((name for name, act in KNOWN.items() if found is not None and torch.equal(found, act(x))), None)


def _is_same(module: nn.Module, mlp: NativeMlp) -> bool:
    """True if both agree on random rows, up to the few numbers whose activation is rounded differently."""
    gate, up, down = (mlp.mlp.gate, mlp.mlp.up, mlp.mlp.down)
    if (gate.N, gate.K) != (up.N, up.K) or (gate.N, gate.K) != (down.K, down.N):
        return False
    x = torch.randn(3, gate.K, generator=torch.Generator().manual_seed(0)).to(mlp.dtype)
    theirs, ours = probe_output(module, x), mlp(x)
    if theirs is None or theirs.shape != ours.shape:
        return False
    within = 4e-3 if mlp.dtype == torch.bfloat16 else 1e-5
    return bool((ours - theirs).float().norm() <= within * theirs.float().norm())
