"""`nn.Linear` on native products, a weight that other modules may share with it, and the replacement in a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcli.kernels.linear import linear, pack, rows_of, unpack, why_not
from kvcli.kernels.linear.weight_arena import WeightArena


class NativeWeight(Tensor):
    """Packed weight [N, K] in place of a plain one, for an embedding that shares the weight with a head.

    Products and row lookups use the packed form, the only one in memory. Any other operation unpacks the weight first:
    the result is right, but slow.
    """

    packed: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> NativeWeight:
        made: NativeWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        made.packed = packed
        return made

    @classmethod
    def of(cls, weight: Tensor, room: WeightArena | None = None) -> NativeWeight:
        return cls(pack(weight, room), weight.shape, weight.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and isinstance(args[1], cls):
            x, weight, bias = (*args, None)[:3]
            return linear(x, weight.packed, bias, weight.shape[0])
        if func is Tensor.untyped_storage:  # so that the memory is found, and counted once
            return args[0].packed.untyped_storage()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].shape, args[0].dtype)
        if func is torch.ops.aten.embedding.default:
            weight, index = args[:2]
            return rows_of(weight.packed, index, weight.dtype)
        assert not func._schema.is_mutable, f"{func} would write to a copy"
        return func(*(plain(a) for a in args), **(kwargs or {}))


def plain(a: Any) -> Any:
    """Unpack a NativeWeight; return anything else unchanged."""
    return unpack(a.packed, a.shape[0], a.dtype) if isinstance(a, NativeWeight) else a


class NativeLinear(nn.Module):
    """Replacement of one `nn.Linear`."""

    packed: Tensor

    def __init__(self, weight: NativeWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.register_buffer("packed", weight.packed, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.packed, self.bias, self.out_features)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = plain(self.weight)  # unpacked, so that other programs can read the checkpoint

    @property
    def weight(self) -> NativeWeight:
        """The weight for other code; `NativeWeight` describes the cost."""
        return NativeWeight(self.packed, (self.out_features, self.in_features), self.dtype)

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
