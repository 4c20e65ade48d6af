"""Batch-invariant linear layers in bf16 and fp32 on a CPU.

x [..., K] -> x W^T + b [..., N], accumulated in float32 and rounded once. An output is one chain of fused products over
k, independent of other rows and outputs: a row alone, in a draft, or in a prompt of thousands gives the same bits. The
weight is stored in panels of 64 outputs, [ceil(N / 64), S, 64] words of 32 bits: one fp32, or two bf16. `why_not`
returns the reason why a weight is not supported.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcli.kernels import native as built

# Contiguous memory for the packed weights of a model, in large pages if the system has them.

PAGE = 2 << 20  # bytes of a large page
PIECE = 64 << 20  # bytes requested from the system at once; pages never written use no memory
LINE = 64  # alignment of a weight, in bytes


class WeightArena:
    """Allocator of weight memory. A piece is freed with the last tensor in it.

    A pass reads every weight once. With pages of 4 KiB a virtual machine walks two page tables for each page, and
    hardware prefetching ends at each page: large pages gave a sixth more bandwidth. Only Linux needs a request for
    them.
    """

    def __init__(self) -> None:
        self._piece: mmap.mmap | None = None
        self._at = self._end = 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate an int32 tensor of that shape, not initialized."""
        count = math.prod(shape)
        if not hasattr(mmap, "MADV_HUGEPAGE") or not count:
            return torch.empty(shape, dtype=torch.int32)
        if self._piece is None or self._at + 4 * count > self._end:
            size = max(PIECE, -(-4 * count // PAGE) * PAGE) + PAGE
            self._piece = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._piece.madvise(mmap.MADV_HUGEPAGE)
            self._at, self._end = -torch.frombuffer(self._piece, dtype=torch.uint8).data_ptr() % PAGE, size
        found = torch.frombuffer(self._piece, dtype=torch.int32, count=count, offset=self._at).view(shape)
        self._at += -(-4 * count // LINE) * LINE
        return found


PANEL = 64
SERVED = (torch.bfloat16, torch.float32)


def why_not(weight: Tensor) -> str:
    """Return why a weight [N, K] is not supported; "" if it is."""
    if built.native() is None:
        return built.why_not()
    if weight.device.type != "cpu" or weight.dtype not in SERVED:
        return f"{weight.dtype} on {weight.device.type}: only bf16 and float32 on a CPU"
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
        return f"{weight.shape[1]} inputs are not a multiple of 2"
    return ""


def pack(weight: Tensor, room: WeightArena | None = None) -> Tensor:
    """Arrange a weight [N, K] for `linear`: [ceil(N / 64), S, 64] words of 32 bits, as int32; in `room` if given."""
    words = weight.detach().contiguous().view(torch.int32)  # [N, S]
    n, s = words.shape
    shape = -(-n // PANEL), s, PANEL
    packed = words.new_empty(shape) if room is None else room.empty(shape)
    packed[-1].zero_()
    # one by one, because torch transposes a whole matrix in blocks
    for panel, rows in zip(packed, words.split(PANEL), strict=True):
        panel[:, : len(rows)].copy_(rows.T)
    return packed


def unpack(packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] of a packed weight."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:n].contiguous().view(dtype)


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, n: int, *, level: str | None = None) -> Tensor:
    """Compute x [..., K] times a weight from `pack` with `n` outputs, plus bias [N] -> [..., N]; all of one dtype.

    `level`: a lesser kind of CPU than the best available.
    """
    functions = built.native(level)
    assert functions is not None
    if x.dtype not in SERVED or x.shape[-1] * x.itemsize != packed.shape[1] * 4:
        raise ValueError(f"{x.shape[-1]} inputs in {x.dtype} for a weight of {packed.shape[1] * 4} bytes a row")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (n,)):
        raise ValueError(f"a bias of {tuple(bias.shape)} {bias.dtype} for {n} outputs in {x.dtype}")
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], n))
    functions.linear(
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        y.numel() // n,
        n,
        packed.shape[1],
        x.dtype == torch.float32,
    )
    return y


# `nn.Linear` on native products, a weight that other modules may share with it, and the replacement in a model.


class LinearWeight(Protocol):
    """Storage of a weight [N, K] that products and row lookups read."""

    @property
    def memory(self) -> Tensor:
        """A tensor in the memory of the weight."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x [..., K] -> [..., N]."""

    def rows(self, index: Tensor) -> Tensor:
        """Return the rows `index` [...] -> [..., K]: the lookup of an embedding with the same weight."""

    def plain(self) -> Tensor:
        """Return the weight [N, K]."""


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """Weight in 16 or 32 bits, in the order of `pack`."""

    memory: Tensor
    n: int
    dtype: torch.dtype

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.memory, bias, self.n)

    def rows(self, index: Tensor) -> Tensor:
        return self.memory[index // PANEL, :, index % PANEL].view(self.dtype)

    def plain(self) -> Tensor:
        return unpack(self.memory, self.n, self.dtype)


class NativeWeight(Tensor):
    """Weight [N, K] in another storage in place of a plain one, for an embedding that shares the weight with a head.

    Products and row lookups use the storage, the only one in memory. Any other operation unpacks the weight first: the
    result is right, but slow.
    """

    form: LinearWeight

    @staticmethod
    def __new__(cls, form: LinearWeight, shape: Sequence[int], dtype: torch.dtype) -> NativeWeight:
        made: NativeWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=form.memory.device)
        made.form = form
        return made

    @classmethod
    def of(cls, weight: Tensor, room: WeightArena | None = None) -> NativeWeight:
        return cls(PanelWeight(pack(weight, room), weight.shape[0], weight.dtype), weight.shape, weight.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and isinstance(args[1], cls):
            x, weight, bias = (*args, None)[:3]
            return weight.form.product(x, bias)
        if func is Tensor.untyped_storage:  # so that the memory is found, and counted once
            return args[0].form.memory.untyped_storage()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].form, args[0].shape, args[0].dtype)
        if func is torch.ops.aten.embedding.default:
            return args[0].rows(args[1])
        assert not func._schema.is_mutable, f"{func} would write to a copy"
        return func(*(plain(a) for a in args), **(kwargs or {}))

    def rows(self, index: Tensor) -> Tensor:
        """Return the rows `index` [...] -> [..., K], in the dtype of the weight."""
        return self.form.rows(index).to(self.dtype)


def plain(a: Any) -> Any:
    """Unpack a NativeWeight; return anything else unchanged."""
    return a.form.plain().to(a.dtype) if isinstance(a, NativeWeight) else a


@runtime_checkable
class KernelLinear(Protocol):
    """Linear layer on kernels of ours, so that one call can compute it with others."""

    dtype: torch.dtype  # of inputs

    @property
    def as_weight(self) -> Any:
        """The weight as such calls take it: on a GPU as `Weight` (linear_skinny); on a CPU in panels, with its scales
        and the address of its `Format`, 0 for numbers. None if it cannot be multiplied natively."""


class NativeLinear(nn.Module):
    """Replacement of one `nn.Linear`."""

    packed: Tensor

    def __init__(self, weight: NativeWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.register_buffer("packed", weight.form.memory, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.packed, self.bias, self.out_features)

    @property
    def as_weight(self) -> tuple[Tensor, None, int]:
        return self.packed, None, 0

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = plain(self.weight)  # unpacked, so that other programs can read the checkpoint

    @property
    def weight(self) -> NativeWeight:
        """The weight for other code; `NativeWeight` describes the cost."""
        n = self.out_features
        return NativeWeight(PanelWeight(self.packed, n, self.dtype), (n, self.in_features), self.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


@torch.no_grad()
def use_native_linear_(root: nn.Module, done_with: Callable[[Tensor], object] = lambda _: None) -> int:
    """Replace each supported `nn.Linear` below `root`, one at a time, so that at most one weight exists twice.

    Embeddings that share a weight (tied heads) share the packed weight. A weight that another kind of module shares is
    not replaced. `done_with` gets each old weight, which is not read here again. Returns the number replaced.
    """
    others: dict[int, list[nn.Module]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False) if type(module) is not nn.Linear else ():
            others.setdefault(id(parameter), []).append(module)
    packed: dict[int, NativeWeight] = {}
    room = WeightArena()
    done = 0
    # a list of all modules would keep every replaced layer alive until the end
    for parent in [module for module in root.modules() if type(module) is not nn.Linear]:
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear or why_not(layer.weight):
                continue
            key, old = id(layer.weight), layer.weight
            if not all(_looks_up(module) for module in others.get(key, ())):
                continue
            packed[key] = weight = packed[key] if key in packed else NativeWeight.of(old, room)
            setattr(parent, name, NativeLinear(weight, layer.bias))
            for module in others.pop(key, ()):
                module.weight = nn.Parameter(weight, requires_grad=False)
            done_with(old)
            del layer, old
            done += 1
    return done


def _looks_up(module: nn.Module) -> bool:
    """True if the module only reads rows of its weight."""
    return isinstance(module, nn.Embedding) and module.max_norm is None
