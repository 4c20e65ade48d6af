"""Multiply rows by the weights of their experts, for any storage of the weights.

x [M, K] in groups, one per expert, in order; `ends` [E]: end of each group; weights [E, N, K]; result [M, N], zeros
after the last group. Each group is a separate product by the op for the storage of the weights (linear,
linear_quantized, linear_skinny). A row is batch invariant if it is in that op, because its result does not depend on
which other rows use its expert, or how many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kvcli.kernels.linear import WeightArena

LINE = 64  # bytes; alignment of a tensor in a stack


class ExpertWeights(Protocol):
    """Storage of the weights [N, K] of E experts."""

    @property
    def memory(self) -> Tensor:
        """The memory of all experts' weights."""

    def product(self, expert: int, x: Tensor) -> Tensor:
        """Compute x [M, K] -> [M, N]."""

    def plain(self) -> Tensor:
        """Return the weights [E, N, K]; raises TypeError if they cannot be restored."""


@dataclass(slots=True)
class ExpertTensors:
    """Weights [N, K] of E experts as the kernels for GPUs read them."""

    kind: str  # plain, int8, int4
    n: int
    k: int
    data: Tensor  # plain [E, N, K], or [E, K, N] if turned; int8 [E, N, K]; int4 [E, N, K // 2] uint8, low nibble first
    scale: Tensor | None  # int8 [E, N]; int4 [E, K // group, N, 2], scale and zero
    group: int = 0
    is_turned: bool = False
    bias: Tensor | None = None  # [E, N]

    @property
    def step(self) -> int:
        """Inputs that a kernel multiplies at a time: a group, or as many as divide all."""
        return self.group or next(step for step in (128, 64, 32, 16) if self.k % step == 0)


def moe_linear(x: Tensor, form: ExpertWeights, n: int, ends: Sequence[int]) -> Tensor:
    """Compute x [M, K] -> [M, N] with weights of `n` outputs."""
    y, start = x.new_zeros(x.shape[0], n), 0
    for expert, end in enumerate(ends):
        if start < end:
            y[start:end] = form.product(expert, x[start:end])
            start = end
    return y


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal tensors for each of E experts, one expert after the other, so that a product reads contiguous data."""

    memory: Tensor  # [E, bytes] uint8
    tensors: tuple[Tensor, ...]  # [E, ...], views of it

    @classmethod
    def of(cls, each: Iterable[Sequence[Tensor]], n: int, room: WeightArena | None = None) -> Stack:
        """Stack the tensors of `n` experts, which are requested one by one."""
        made: Stack | None = None
        for i, those in enumerate(each):
            if made is None:
                words = n * sum(-(-t.nbytes // LINE) * LINE for t in those) // 4
                memory = room.empty((words,)) if room else those[0].new_empty(words, dtype=torch.int32)
                made = cls.over(memory.view(torch.uint8).view(n, -1), those)
            for into, one in zip(made.tensors, those, strict=True):
                into[i].copy_(one)
        assert made is not None, "no experts"
        return made

    @classmethod
    def over(cls, memory: Tensor, like: Sequence[Tensor]) -> Stack:
        """Return views of a memory as tensors like those of one expert."""
        found, at = [], 0
        for t in like:
            step, first = memory.shape[1] // t.itemsize, at // t.itemsize
            strides = torch.empty(t.shape, device="meta").stride()
            found.append(memory.view(-1).view(t.dtype).as_strided((len(memory), *t.shape), (step, *strides), first))
            at += -(-t.nbytes // LINE) * LINE
        return cls(memory, tuple(found))


def weights_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool | str]]:
    """Yield the plain expert weights in a module itself: name, parameter, and true if the layout is [E, N, K].

    They are recognized by their shape, and by what transformers' expert interface states about their module. The third
    value is a reason instead if the products cannot be computed here.
    """
    if type(module).__module__.startswith("torch."):  # convolutions have three dimensions, too
        return
    for name in list(module._parameters):  # by name: a list of weights would keep each alive until the end
        weight = module._parameters[name]
        if type(weight) is not nn.Parameter or weight.dim() != 3 or min(weight.shape) < 2:
            continue
        yield name, weight, why_not_grouped(module) or not module.is_transposed


def why_not_grouped(module: nn.Module) -> str:
    """Return why transformers does not multiply the module's experts in groups; "" if it does."""
    if not hasattr(module, "is_transposed"):
        return "their module does not say how it multiplies experts"
    how = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return "" if how == "grouped_mm" else f"experts are multiplied by {how}, not in groups"
