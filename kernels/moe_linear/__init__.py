"""Rows by the weight of the expert that each was sent to, whatever form the weights have.

x [M, K] in groups, one an expert, in their order; `ends` [E]: the row behind each group; weights [E, N, K]; result
[M, N], zeros behind the last group. A group is a product of its own, by the op whose form the weights have (linear,
linear_quantized, linear_skinny): what a row gives depends on its own numbers and its expert's, as far as it does in a
linear layer of that op. Which rows go where, and how many, does not enter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kvcli.kernels.linear.weight_arena import WeightArena

LINE = 64  # bytes; where a tensor of a stack may begin


class ExpertWeights(Protocol):
    """How the weights [N, K] of E experts lie."""

    @property
    def memory(self) -> Tensor:
        """All of it."""
        ...

    def product(self, expert: int, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        ...

    def plain(self) -> Tensor:
        """[E, N, K]; TypeError where nobody can tell any more."""
        ...


def moe_linear(x: Tensor, form: ExpertWeights, n: int, ends: Sequence[int]) -> Tensor:
    """x [M, K] -> [M, N] by weights of `n` outputs."""
    y, start = x.new_zeros(x.shape[0], n), 0
    for expert, end in enumerate(ends):
        if start < end:
            y[start:end] = form.product(expert, x[start:end])
            start = end
    return y


@dataclass(frozen=True, slots=True)
class Stack:
    """The same tensors for each of E experts, those of one side by side: what a row's product reads lies together."""

    memory: Tensor  # [E, bytes] uint8
    tensors: tuple[Tensor, ...]  # [E, ...], views of it

    @classmethod
    def of(cls, each: Iterable[Sequence[Tensor]], n: int, room: WeightArena | None = None) -> Stack:
        """Of `n` experts, asked for one by one."""
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
        """Views of tensors like those of one expert."""
        found, at = [], 0
        for t in like:
            step, first = memory.shape[1] // t.itemsize, at // t.itemsize
            strides = torch.empty(t.shape, device="meta").stride()
            found.append(memory.view(-1).view(t.dtype).as_strided((len(memory), *t.shape), (step, *strides), first))
            at += -(-t.nbytes // LINE) * LINE
        return cls(memory, tuple(found))

    def to(self, device: torch.device) -> Stack:
        return self.over(self.memory.to(device), [t[0] for t in self.tensors])


def weights_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool | str]]:
    """Plain weights of experts that a module holds itself: name, parameter, and whether it is [E, N, K].

    Known by their shape, and by what transformers' interface for experts says of their module. In place of the last
    the reason why their products cannot be made here.
    """
    if type(module).__module__.startswith("torch."):  # convolutions have three dimensions, too
        return
    how = getattr(getattr(module, "config", None), "_experts_implementation", None)
    for name in list(module._parameters):  # by name: a list of weights would keep each alive until the last is done
        weight = module._parameters[name]
        if type(weight) is not nn.Parameter or weight.dim() != 3 or min(weight.shape) < 2:
            continue
        if not hasattr(module, "is_transposed"):
            yield name, weight, "their module does not say how it multiplies experts"
        elif how != "grouped_mm":
            yield name, weight, f"experts are multiplied by {how}, not in groups"
        else:
            yield name, weight, not module.is_transposed
