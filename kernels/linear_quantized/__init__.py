"""Linear layers with quantized weights, which remain quantized while they run on a CPU.

Layouts: x [..., K], weight [N, K], result [..., N] in x's dtype (bfloat16, float16 or float32).
  8 bits: w[n, k] = scale[n] * q[n, k],                          q in -127..127, one scale per output
  4 bits: w[n, k] = scale[n, k // g] * (q[n, k] - 8) + zero[n, k // g],  q in 0..15, one pair per g inputs
  blocks: the formats of llama.cpp (formats.py), on a CPU with the native kernel only
On a CPU the native kernel computes them; for the first two torch does if there is none, and for float16. `why_not`
rejects shapes for which torch's kernels would read or write out of bounds (they do not check), and a group that does
not divide K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvcli.kernels import native as built
from kvcli.kernels.linear import NativeWeight, WeightArena
from kvcli.kernels.linear_quantized import cpu, reference
from kvcli.kernels.linear_quantized.formats import PANEL, Format, arrange_panels, group_format, rows_of
from kvcli.kernels.moe_linear import ExpertTensors, Stack, weights_of
from kvcli.kernels.moe_linear.tensor import Experts

# Quantized linear layers by the native kernel: weights in its panels, one kernel for any number of rows.
#
# Each output is one chain over its row's inputs, as in `kvcli.kernels.linear`, so it is batch invariant. With bf16 on
# AVX2, and on CPUs with byte products, a row becomes integer digits for each group. All else is multiplied in float32
# (kernels/native/c/linear_quantized.c).


def serves(dtype: torch.dtype) -> bool:
    """True if inputs and scales of this dtype are supported."""
    return built.native() is not None and dtype in (torch.bfloat16, torch.float32)


def linear(x: Tensor, n: int, format: Format, data: Tensor, scale: Tensor, *, level: str | None = None) -> Tensor:
    """Compute x [M, K] times a weight of `n` outputs -> [M, N]. `level`: a lesser kind of CPU than the best here."""
    functions = built.native(level)
    assert functions is not None
    x = x.contiguous()
    y = x.new_empty(x.shape[0], n)
    functions.linear_quantized(
        x.data_ptr(), data.data_ptr(), scale.data_ptr(), y.data_ptr(), x.shape[0], n, x.shape[1], format.address,
        x.dtype == torch.float32,
    )  # fmt: skip
    return y


Bits = Literal[8, 4]
GROUPS = (128, 64, 32)  # groups of the int4 kernel; wider is smaller and faster, narrower is closer to the weights


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Quantized weight of one layer. `is_native`: `data` is in the order of the CPU kernel for its scales."""

    format: Format
    shape: tuple[int, int]  # N, K
    data: Tensor  # unless native: 8 bits [N, K] int8; 4 bits [N, K // 2] uint8, low nibble first
    scale: Tensor  # 8 bits: [N]; 4 bits: [K // g, N, 2], scale and zero; blocks: bytes by panel
    is_native: bool

    @property
    def bits(self) -> int:
        return self.format.bits

    @property
    def group(self) -> int:
        return self.format.group

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    @property
    def codes(self) -> Tensor:
        """The codes [N, K], int8 or 0..15. Raises TypeError if only a kernel reads their order."""
        if self.is_native:
            raise TypeError("weights packed for the CPU's kernel can only be multiplied")
        return self.data if self.bits == 8 else reference.unpack4(self.data)

    def plain(self) -> Tensor:
        """Return the dequantized weight [N, K], in float32."""
        if self.format.span:
            return self.rows(torch.arange(self.shape[0]))
        return reference.weight(self.bits, self.group, self.codes, self.scale)

    @property
    def memory(self) -> Tensor:
        return self.data

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x [..., K] -> [..., N]."""
        y = linear_quantized(x, self)
        return y if bias is None else y.add_(bias)

    def layer(self, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        """Return a layer that multiplies the weight."""
        return PackedLinear(self, bias, dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Dequantize the rows `index` [...] of blocks -> [..., K] float32."""
        return rows_of(index.flatten(), self.data, self.scale, self.format).view(*index.shape, -1)

    def native(self) -> QuantizedWeight:
        """Return the weight in the order of the CPU kernel for its scales."""
        if self.is_native:
            return self
        return replace(self, data=arrange(self.codes, self.bits, self.scale.dtype), is_native=True)


def why_not(shape: tuple[int, int], bits: Bits) -> str:
    """Return why a weight of this shape cannot be quantized; "" if it can."""
    n, k = shape
    if bits == 8:
        # torch reads 16 inputs at a time without a check: 13 inputs read numbers beyond the tensor, 97 crashed
        return f"{k} inputs are not a multiple of 16" if k % 16 else ""
    if group_of(k) == 0:
        return f"{k} inputs are not a multiple of {GROUPS[-1]}"
    return f"{n} outputs are not a multiple of 16" if n % 16 else ""


def of_blocks(blob: Tensor, format: Format, shape: tuple[int, int]) -> QuantizedWeight:
    """Return the weight whose codes and then scales, in panels, are the bytes of `blob`."""
    n_codes, _ = format.nbytes(*shape)
    panels, (_, k) = -(-shape[0] // PANEL), shape
    data = blob[:n_codes].view(panels, -1, PANEL, 4)
    return QuantizedWeight(format, shape, data, blob[n_codes:].view(panels, k // format.span, -1), True)


def group_of(k: int) -> int:
    """Return the inputs per 4-bit group for a layer of `k` inputs; 0 if no group divides `k`."""
    return next((g for g in GROUPS if k % g == 0), 0)


def padded_outputs(n: int) -> int:
    """Return the outputs stored in memory for a layer of `n` outputs, with the CPU kernel's padding."""
    return -(-n // PANEL) * PANEL if serves(torch.bfloat16) else n


def pack(weight: Tensor, bits: Bits, *, native: bool = True) -> QuantizedWeight:
    """Quantize a weight [N, K]; scales keep its dtype. Raises ValueError if `why_not` has a reason."""
    n, k = weight.shape
    if native and (why := why_not((n, k), bits)):
        raise ValueError(f"a weight of {n} x {k} cannot be quantized to {bits} bits: {why}")
    group = 0 if bits == 8 else group_of(k) or k
    q, scale = reference.round8(weight) if bits == 8 else reference.round4(weight, group)
    data = arrange(q, bits, scale.dtype) if native else q if bits == 8 else reference.pack4(q)
    return QuantizedWeight(group_format(bits, group), (n, k), data, scale, native)


def arrange(q: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Arrange codes [N, K] in the order of the CPU kernel for inputs of `dtype`."""
    if serves(dtype):
        return arrange_panels(q, bits)
    return q if bits == 8 else cpu.pack4(q)


def linear_quantized(x: Tensor, w: QuantizedWeight) -> Tensor:
    """Compute x [..., K] times the quantized weight, [..., N]."""
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"{x.shape[-1]} inputs for a weight of {w.shape[1]}")
    if not w.format.span and x.dtype != w.scale.dtype:
        raise ValueError(f"inputs are {x.dtype}, the scales {w.scale.dtype}")
    rows = x.reshape(-1, x.shape[-1])  # [M, K]
    if w.is_native and x.device.type != "cpu":
        raise ValueError(f"packed for the CPU kernel, but the inputs are on {x.device.type}")
    if rows.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], w.shape[0])
    if w.is_native and serves(x.dtype):
        y = linear(rows, w.shape[0], w.format, w.data, w.scale)
    elif w.format.span:  # no kernel multiplies float16
        y = linear(rows.float(), w.shape[0], w.format, w.data, w.scale).to(x.dtype)
    else:
        y = (cpu.linear if w.is_native else reference.linear)(rows, w.bits, w.group, w.data, w.scale)
    return y.view(*x.shape[:-1], w.shape[0])


def explain() -> str:
    """Describe the implementation of quantized layers here; for `kvcli doctor`."""
    return "native kernel, float16 on torch" if serves(torch.bfloat16) else cpu.explain()


# `nn.Linear` with quantized weights, and the replacement in a model.


class PackedLinear(nn.Module):
    """Replacement of one `nn.Linear`."""

    data: Tensor
    scale: Tensor

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of the inputs; default: that of the scales, which blocks need not have."""
        super().__init__()
        self.format, self.is_native, self.dtype = weight.format, weight.is_native, dtype or weight.scale.dtype
        self.out_features, self.in_features = weight.shape
        self.register_buffer("data", weight.data)
        self.register_buffer("scale", weight.scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @staticmethod
    def of(layer: nn.Linear, bits: Bits, device: torch.device | None = None) -> PackedLinear:
        """Quantize a layer for the CPU's kernels; on `device`, in the portable order, if one is given."""
        weight = layer.weight.detach()
        packed = pack(weight, bits) if device is None else pack(weight.to(device), bits, native=False)
        return PackedLinear(packed, layer.bias)

    @property
    def weights(self) -> QuantizedWeight:
        shape = (self.out_features, self.in_features)
        return QuantizedWeight(self.format, shape, self.data, self.scale, self.is_native)

    @property
    def as_weight(self) -> tuple[Tensor, Tensor, int] | None:
        return (self.data, self.scale, self.format.address) if self.is_native and serves(self.dtype) else None

    @property
    def weight(self) -> NativeWeight:
        """The weight for other code; `NativeWeight` describes the cost."""
        return NativeWeight(self.weights, (self.out_features, self.in_features), self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights.product(x, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.format}"


@dataclass(frozen=True, slots=True)
class Swap:
    """Result of `quantize_`."""

    packed: int  # layers replaced
    kept: dict[str, int]  # reason -> number of layers not replaced
    weights: int  # quantized numbers
    nbytes: int  # bytes of the quantized layers

    def __add__(self, other: Swap) -> Swap:
        kept = dict(Counter(self.kept) + Counter(other.kept))
        return Swap(self.packed + other.packed, kept, self.weights + other.weights, self.nbytes + other.nbytes)


def quantize_(
    root: nn.Module,
    bits: Bits,
    done_with: Callable[[Tensor], object] = lambda _: None,
    device: torch.device | None = None,
) -> Swap:
    """Quantize every plain `nn.Linear` below `root` by `swap_` and `PackedLinear.of`."""

    def packed(layer: nn.Linear) -> nn.Module | str:
        why = why_not((layer.out_features, layer.in_features), bits)
        return why or PackedLinear.of(layer, bits, device)

    return swap_(root, packed, done_with)


@torch.no_grad()
def swap_(
    root: nn.Module, other: Callable[[nn.Linear], nn.Module | str], done_with: Callable[[Tensor], object]
) -> Swap:
    """Replace every plain `nn.Linear` below `root`, one at a time, so that at most one layer exists twice.

    `other` returns the replacement, or why there is none. `done_with` gets each old weight, which is not read again.
    """
    packed, weights, nbytes = 0, 0, 0
    kept: Counter[str] = Counter()
    # a list of all modules would keep every replaced layer alive until the end
    for parent in [module for module in root.modules() if type(module) is not nn.Linear]:
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear:
                continue
            fresh = other(layer)
            if isinstance(fresh, str):
                kept[fresh] += 1
                continue
            setattr(parent, name, fresh)
            packed, weights = packed + 1, weights + layer.weight.numel()
            held = [*fresh.named_parameters(), *fresh.named_buffers()]
            nbytes += sum(t.nbytes for name, t in held if name != "bias")
            done_with(layer.weight)
            del layer
    return Swap(packed, dict(kept), weights, nbytes)


def packed_weights(root: nn.Module) -> int:
    """Return the number of quantized weights below `root` that are no parameter, as that of a tied embedding is."""
    shared = {p.untyped_storage().data_ptr() for p in root.parameters() if not hasattr(p, "to_local")}
    layers: list[Any] = [layer for layer in root.modules() if "data" in layer._buffers]
    return sum(p.in_features * p.out_features for p in layers if p.data.untyped_storage().data_ptr() not in shared)


# Quantized weights of experts, and the replacement in a model.


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
    def split(cls, whole: QuantizedWeight, n: int) -> Codes:
        """Return the native weights of `n` experts, which are one below the other in `whole`, whole panels each."""
        tensors = whole.data.unflatten(0, (n, -1)), whole.scale.unflatten(0, (n, -1))
        memory = whole.data.as_strided((n, whole.nbytes // n), (whole.nbytes // n, 1))
        one = replace(whole, shape=(whole.shape[0] // n, whole.shape[1]))
        return cls._in(Stack(memory, tensors), one)

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
        return replace(of, data=data[expert], scale=scale[expert])

    @property
    def memory(self) -> Tensor:
        return self.stack.memory

    def product(self, expert: int, x: Tensor) -> Tensor:
        return linear_quantized(x, self[expert])

    def plain(self) -> Tensor:
        return torch.stack([self[e].plain() for e in range(len(self))])

    def tensors(self) -> ExpertTensors | None:
        """Return the weights as kernels for GPUs read them; None in the order of the CPU kernel."""
        (n, k), (data, scale) = self.like.shape, self.stack.tensors
        is_four, group = self.like.bits == 4, self.like.group
        kind = "int4" if is_four else "int8"
        return None if self.like.is_native else ExpertTensors(kind, n, k, data, scale, group if is_four else 0)

    def to(self, device: torch.device) -> Codes:
        return self.over(self.memory.to(device))

    def over(self, memory: Tensor) -> Codes:
        """Return the same weights in another memory with their bytes."""
        return self._in(Stack.over(memory, [t[0] for t in self.stack.tensors]), self.like)

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
