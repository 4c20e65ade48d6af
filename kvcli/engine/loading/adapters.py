"""LoRA adapters in a loaded model: merged into plain weights, or computed beside quantized ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from kvcli.errors import BadModel
from kvcli.models.adapters import Adapter

MERGED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class AdaptedLinear(nn.Module):
    """A linear layer whose weight stays quantized, with the low-rank branch of its adapters: base(x) + B (A x)."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor) -> None:
        """`a` [R, K] and `b` [N, R]: of all adapters, their scales included."""
        super().__init__()
        self.base = base
        self.in_features, self.out_features = a.shape[1], b.shape[0]
        # linear layers, so that they get the kernels of their device, which are batch invariant
        self.down = nn.Linear(a.shape[1], a.shape[0], bias=False, device="meta")
        self.up = nn.Linear(b.shape[1], b.shape[0], bias=False, device="meta")
        self.down.weight, self.up.weight = (nn.Parameter(w, requires_grad=False) for w in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


@torch.no_grad()
def apply_adapters(model: Any, adapters: Sequence[Adapter], done_with: Callable[[Tensor], object]) -> None:
    """Add adapters to a model, layer by layer: W + sum of s B A, in float32, rounded once. Raises BadModel.

    `done_with` gets each weight that was replaced. A weight shared with another module is not changed there.
    """
    modules = dict(model.named_modules())
    _refuse_unmatched(model, modules, adapters)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(one.file.path, "pt")) for one in adapters]
        for one, file in zip(adapters, files, strict=True):
            for name, tensor in one.saved.items():
                layer, _, parameter = name.rpartition(".")
                _replace(modules[layer], parameter, file.get_tensor(tensor), one)
        for layer in dict.fromkeys(name for one in adapters for name in one.pairs):
            pairs = [(one, file) for one, file in zip(adapters, files, strict=True) if layer in one.pairs]
            a, b = (
                torch.cat([file.get_tensor(one.pairs[layer][i]).float() for one, file in pairs], dim=i) for i in (0, 1)
            )  # [R, K], [N, R]
            ranks = [one.file.tensors[one.pairs[layer][0]].shape[0] for one, _ in pairs]
            scales = torch.tensor([one.scales[layer] for one, _ in pairs]).repeat_interleave(torch.tensor(ranks))
            parent, _, last = layer.rpartition(".")
            if (fresh := _adapted(modules[layer], a, b * scales, layer, model.dtype, done_with)) is not None:
                setattr(modules[parent], last, fresh)


def _adapted(
    module: nn.Module, a: Tensor, b: Tensor, layer: str, dtype: torch.dtype, done_with: Callable[[Tensor], object]
) -> nn.Module | None:
    """Merge B A into the weight of a module; return the module to use instead if its weight is quantized."""
    weight = getattr(module, "weight", None)
    is_linear, shape = isinstance(module, nn.Linear), (b.shape[0], a.shape[1])
    if isinstance(module, nn.Linear | nn.Embedding | Conv1D) and isinstance(weight, Tensor) and weight.dtype in MERGED:
        wanted = tuple(weight.shape if is_linear else weight.shape[::-1])
    else:
        wanted = tuple(getattr(module, key, 0) for key in ("out_features", "in_features"))
        weight = None
    if shape != wanted:
        what = f"is for {shape[0]} x {shape[1]} weights, and the model has {wanted[0]} x {wanted[1]}"
        raise _mismatch(f"layer {layer} {what if all(wanted) else 'is for no linear layer'}")
    if weight is not None:
        change = b @ a if is_linear else (b @ a).T
        fresh = change.to(weight.device).add_(weight.float()).to(weight.dtype)
        module.weight = nn.Parameter(fresh.contiguous(), requires_grad=False)
        done_with(weight)
        return None
    held = next(t for t in (*module.buffers(), *module.parameters()))
    odd = len(b.T) % 2  # kernels take inputs in pairs
    a, b = functional.pad(a, (0, 0, 0, odd)), functional.pad(b, (0, odd))
    return AdaptedLinear(module, *(w.to(held.device, dtype).contiguous() for w in (a, b)))


def _replace(module: nn.Module, parameter: str, fresh: Tensor, adapter: Adapter) -> None:
    old = getattr(module, parameter)
    if old.shape != fresh.shape or old.dtype not in MERGED:
        sizes = " and ".join(str(list(one.shape)) for one in (fresh, old))
        raise _mismatch(f"{adapter.name} replaces {parameter} of a module: {sizes}, or it is quantized")
    setattr(module, parameter, nn.Parameter(fresh.to(old.device, old.dtype), requires_grad=False))


def _refuse_unmatched(model: Any, modules: dict[str, nn.Module], adapters: Sequence[Adapter]) -> None:
    """Raise BadModel if layers of an adapter are not in the model, or two adapters replace one parameter."""
    for i, one in enumerate(adapters):
        names = [*one.pairs, *one.saved]
        lost = [name for name in one.pairs if name not in modules]
        lost += [n for n in one.saved if getattr(modules.get(n.rpartition(".")[0]), n.rpartition(".")[2], None) is None]
        if lost:
            raise _mismatch(f"{len(lost)} of {len(names)} layers of {one.name} are not in it", lost)
        if both := [name for other in adapters[:i] for name in other.saved if name in one.saved]:
            raise _mismatch(f"two adapters replace {both[0]}")


def _mismatch(why: str, lines: Sequence[str] = ()) -> BadModel:
    try_ = ["the model that the adapter was trained on: base_model_name_or_path in its adapter_config.json"]
    return BadModel(
        f"the adapter does not fit the model: {why}",
        code="adapter_mismatch",
        lines=[line[:200] for line in lines[:3]],
        try_=try_,
    )
