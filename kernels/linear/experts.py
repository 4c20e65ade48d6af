"""Weights of experts on native products: what transformers' grouped product finds in place of a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.kernels.linear import linear, pack, unpack, why_not
from kvcli.kernels.linear.module import NativeWeight
from kvcli.kernels.trial import REFUSALS


class NativeExperts(Tensor):
    """The packed weights of E experts, [E, K, N] as a grouped product takes them, or turned, [E, N, K].

    Each group of rows is a product of its own. Whatever else is asked unpacks all: right for every use, and slow.
    """

    packed: Tensor  # [E, panels, S, 64]
    is_turned: bool

    @staticmethod
    def __new__(cls, packed: Tensor, shape: torch.Size, dtype: torch.dtype, is_turned: bool) -> NativeExperts:
        made: NativeExperts = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        made.packed, made.is_turned = packed, is_turned
        return made

    @classmethod
    def of(cls, weight: Tensor, is_turned: bool) -> NativeExperts:
        first = pack(weight[0] if is_turned else weight[0].T)
        packed = first.new_empty(weight.shape[0], *first.shape)
        for into, one in zip(packed, weight, strict=True):
            into.copy_(pack(one if is_turned else one.T))
        return cls(packed, weight.shape, weight.dtype, is_turned)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.untyped_storage:
            return args[0].packed.untyped_storage()
        if func is Tensor.transpose and sorted(d % 3 for d in args[1:]) == [1, 2]:
            e, a, b = args[0].shape
            return cls(args[0].packed, torch.Size((e, b, a)), args[0].dtype, not args[0].is_turned)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func is aten.detach.default:
            return cls(args[0].packed, args[0].shape, args[0].dtype, args[0].is_turned)
        if func is aten._grouped_mm.default and isinstance(args[1], cls) and not args[1].is_turned:
            rows, weight, ends = (*args, kwargs.get("offs"))[:3]
            if not any(args[3:]) and ends is not None:
                return _products(rows, weight, ends.tolist())
        assert not func._schema.is_mutable, f"{func} would write to a copy"
        return func(*(a.plain() if isinstance(a, cls) else a for a in args), **kwargs)

    def plain(self) -> Tensor:
        n, dtype = self.shape[1 if self.is_turned else 2], self.dtype
        turned = torch.stack([unpack(one, n, dtype) for one in self.packed])
        return turned if self.is_turned else turned.transpose(1, 2)


def _products(rows: Tensor, weight: NativeExperts, ends: list[int]) -> Tensor:
    """rows [M, K], those of expert e up to ends[e] -> [M, N]."""
    y = rows.new_zeros(rows.shape[0], weight.shape[2])
    for packed, start, end in zip(weight.packed, [0, *ends], ends, strict=False):
        if start < end:
            y[start:end] = linear(rows[start:end], packed, None, weight.shape[2])
    return y


class _Strict(NativeWeight):
    """Serves products alone."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        raise NotImplementedError


@torch.no_grad()
def lay_out_experts_(root: nn.Module, done_with: Callable[[Tensor], object] = lambda _: None) -> int:
    """Pack the weights of experts that transformers multiplies in groups, and of what routes rows to them.

    Experts are known by what transformers' interface for them sets; a router by doing nothing with its weight but
    multiply, which is tried. Returns how many weights were replaced.
    """
    done = 0
    for module in root.modules():
        is_grouped = getattr(getattr(module, "config", None), "_experts_implementation", None) == "grouped_mm"
        for name, old in list(module.named_parameters(recurse=False)):
            if old.dim() == 3 and is_grouped and hasattr(module, "is_transposed"):
                is_turned = not module.is_transposed
                if why_not(old[0] if is_turned else old[0].T):
                    continue
                fresh: Tensor = NativeExperts.of(old, is_turned)
            elif old.dim() == 2 and name == "weight" and not why_not(old) and _only_multiplies(module, old):
                fresh = NativeWeight.of(old)
            else:
                continue
            setattr(module, name, nn.Parameter(fresh, requires_grad=False))
            done_with(old)
            done += 1
    return done


def _only_multiplies(module: nn.Module, weight: nn.Parameter) -> bool:
    if isinstance(module, nn.Linear | nn.Embedding) or type(weight) is not nn.Parameter:
        return False
    try:
        module.weight = nn.Parameter(_Strict.of(weight), requires_grad=False)
        module(torch.ones(2, weight.shape[1], dtype=weight.dtype))
    except REFUSALS:
        return False  # wants more than rows, or more of its weight
    finally:
        module.weight = weight
    return True
