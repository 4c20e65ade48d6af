"""Replacement of a plain parameter of experts, which directs transformers' grouped product to `experts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.moe_linear import ExpertWeights, moe_linear

GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")  # the latter if torch has no such product


class Experts(Tensor):
    """Weights of E experts in any storage, [E, K, N] for a grouped product, or transposed, [E, N, K].

    Any other operation restores all weights first: the result is right, but slow. It fails if the storage cannot
    restore them.
    """

    form: ExpertWeights
    is_turned: bool

    @staticmethod
    def __new__(cls, form: ExpertWeights, shape: torch.Size, dtype: torch.dtype, is_turned: bool) -> Experts:
        made: Experts = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=form.memory.device)
        made.form, made.is_turned = form, is_turned
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.untyped_storage:  # so that the memory is found, and counted once
            return args[0].form.memory.untyped_storage()
        if func is Tensor.transpose and sorted(d % 3 for d in args[1:]) == [1, 2]:
            e, a, b = args[0].shape
            return cls(args[0].form, torch.Size((e, b, a)), args[0].dtype, not args[0].is_turned)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return cls(args[0].form, args[0].shape, args[0].dtype, args[0].is_turned)
        if func._schema.name in GROUPED and isinstance(args[1], cls) and not args[1].is_turned:
            rows, weight, ends = (*args, kwargs.get("offs"))[:3]
            if not any(args[3:]) and ends is not None:
                return moe_linear(rows, weight.form, weight.shape[2], ends.tolist())
        assert not func._schema.is_mutable, f"{func} would write to a copy"
        return func(*(a.plain() if isinstance(a, cls) else a for a in args), **kwargs)

    def plain(self) -> Tensor:
        weights = self.form.plain().to(self.dtype)
        return weights if self.is_turned else weights.transpose(1, 2)
