"""Quantized weights of experts, and the replacement in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from kvcli.kernels.linear.weight_arena import WeightArena
from kvcli.kernels.linear_quantized import Bits, QuantizedWeight, linear_quantized, pack, why_not
from kvcli.kernels.linear_quantized.module import Swap
from kvcli.kernels.moe_linear import Stack, weights_of
from kvcli.kernels.moe_linear.tensor import Experts


@dataclass(frozen=True, slots=True)
class Codes:
    """Weights of all experts, each quantized by `pack`."""

    stack: Stack  # data and scale
    like: QuantizedWeight  # the first expert's

    @classmethod
    def of(cls, weights: Tensor, bits: Bits, *, native: bool = True, device: torch.device | None = None) -> Codes:
        """Quantize the weights [E, N, K], one expert after the other; on `device`, where they remain, if given."""
        each = (pack(one.to(device).contiguous(), bits, native=native) for one in weights)
        return cls._of(each, len(weights))

    @classmethod
    def _of(cls, each: Iterator[QuantizedWeight], n: int) -> Codes:
        first = next(each)
        room = WeightArena() if first.data.device.type == "cpu" else None
        return cls._in(Stack.of(((p.data, p.scale) for p in chain([first], each)), n, room), first)

    @classmethod
    def _in(cls, stack: Stack, like: QuantizedWeight) -> Codes:
        data, scale = stack.tensors
        return cls(stack, replace(like, data=data[0], scale=scale[0]))  # views, so that nothing else is kept alive

    def __len__(self) -> int:
        return self.stack.memory.shape[0]

    def __getitem__(self, expert: int) -> QuantizedWeight:
        data, scale = self.stack.tensors
        of = self.like
        return QuantizedWeight(of.bits, of.group, of.shape, data[expert], scale[expert], of.is_native)

    @property
    def memory(self) -> Tensor:
        return self.stack.memory

    def product(self, expert: int, x: Tensor) -> Tensor:
        return linear_quantized(x, self[expert])

    def plain(self) -> Tensor:
        return torch.stack([self[e].plain() for e in range(len(self))])

    def to(self, device: torch.device) -> Codes:
        return self._in(self.stack.to(device), self.like)

    def native(self) -> Codes:
        """Return the weights in the order of this CPU's kernel."""
        return self if self.like.is_native else self._of((self[e].native() for e in range(len(self))), len(self))


def packed(
    weight: Tensor, turned: bool, bits: Bits, *, native: bool, device: torch.device | None = None
) -> Experts | str:
    """Quantize a parameter of experts, [E, K, N] or transposed; or return why it is not quantized."""
    plain = weight.detach() if turned else weight.detach().transpose(1, 2)
    if why := why_not((plain.shape[1], plain.shape[2]), bits):
        return why
    return Experts(Codes.of(plain, bits, native=native, device=device), weight.shape, weight.dtype, turned)


@torch.no_grad()
def quantize_experts_(
    root: nn.Module,
    bits: Bits,
    done_with: Callable[[Tensor], object] = lambda _: None,
    device: torch.device | None = None,
) -> Swap:
    """Quantize the weights of experts below `root` as `quantize_` quantizes layers, one parameter at a time.

    Weights that were quantized while loading are arranged for their device. Each expert counts as a layer.
    """
    found = Swap(0, {}, 0, 0)
    for module in root.modules():
        for name, old, fresh in _packed_in(module, bits, device):
            if isinstance(fresh, str):
                found += Swap(0, {fresh: len(old)}, 0, 0)
                continue
            setattr(module, name, nn.Parameter(fresh, requires_grad=False))
            found += Swap(len(old), {}, old.numel(), fresh.form.memory.nbytes)
            if type(old) is nn.Parameter:
                done_with(old)
            del old
    return found


def stay(root: nn.Module, why: str) -> Swap:
    """Return the result for experts of which none is quantized, for this reason."""
    return Swap(0, {why: n} if (n := sum(len(w) for m in root.modules() for _, w, _ in weights_of(m))) else {}, 0, 0)


def _packed_in(
    module: nn.Module, bits: Bits, device: torch.device | None
) -> Iterator[tuple[str, Tensor, Experts | str]]:
    for name, old, codes in codes_of(module):
        there = codes.native() if device is None else codes.to(device)
        yield name, old, Experts(there, old.shape, old.dtype, old.is_turned)
    for name, plain, turned in weights_of(module):
        if isinstance(turned, bool):
            yield name, plain, packed(plain, turned, bits, native=device is None, device=device)
        else:
            yield name, plain, turned


def codes_of(module: nn.Module) -> Iterator[tuple[str, Experts, Codes]]:
    """Yield the quantized parameters of a module."""
    for name in list(module._parameters):
        weight: Tensor | None = module._parameters[name]
        if isinstance(weight, Experts) and isinstance(weight.form, Codes):
            yield name, weight, weight.form
