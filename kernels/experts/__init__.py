"""Rows by the weight of the expert that each was sent to, whatever form the weights have.

x [M, K] in groups, one an expert, in their order; `ends` [E]: the row behind each group; weights [E, N, K]; result
[M, N], zeros behind the last group. A group is a product of its own, by the op whose form the weights have (linear,
linear_packed, linear_skinny): what a row gives depends on its own numbers and its expert's, as far as it does in a
linear layer of that op. Which rows go where, and how many, does not enter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kvcli.kernels.linear.room import Room

LINE = 64  # bytes; where a tensor of a stack may begin


class Form(Protocol):
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


def experts(x: Tensor, form: Form, n: int, ends: Sequence[int]) -> Tensor:
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
    like: tuple[Tensor, ...]  # shapes and types, without numbers

    @classmethod
    def of(cls, each: Iterable[Sequence[Tensor]], n: int, room: Room | None = None) -> Stack:
        """Of `n` experts, asked for one by one."""
        made: Stack | None = None
        for i, tensors in enumerate(each):
            if made is None:
                words = n * sum(-(-t.nbytes // LINE) * LINE for t in tensors) // 4
                memory = room.empty((words,)) if room else tensors[0].new_empty(words, dtype=torch.int32)
                made = cls(memory.view(torch.uint8).view(n, -1), tuple(t.to("meta") for t in tensors))
            for into, one in zip(made[i], tensors, strict=True):
                into.copy_(one)
        assert made is not None, "no experts"
        return made

    def __getitem__(self, expert: int) -> list[Tensor]:
        found, at, row = [], 0, self.memory[expert]
        for t in self.like:
            found.append(row[at : at + t.nbytes].view(t.dtype).view(t.shape))
            at += -(-t.nbytes // LINE) * LINE
        return found


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
