"""Experts of transformers' models on the kernels for GPUs, through its interface for experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from kvcli.kernels import triton_support
from kvcli.kernels.moe_linear import ExpertTensors, why_not_grouped
from kvcli.kernels.moe_linear.tensor import Experts

NAME = "kvcli"  # in transformers' registry


def serve_experts_(root: nn.Module) -> int:
    """Have the modules of experts below `root` run on the kernels, as far as these support them. Return how many."""
    found = [module for module in root.modules() if not why_not_grouped(module) and _tensors(module) is not None]
    if found:
        ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    for module in found:
        config: Any = module.config
        config._experts_implementation = NAME  # of all modules that share it; others are recognized at each call
    return len(found)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute rows [M, H], experts of each [M, T] and their weights [M, T] -> [M, H]."""
    tensors = _tensors(self)
    if tensors is None:
        given: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return given
    # imported late, because there may be no Triton where nothing is supported
    from kvcli.kernels.moe_linear import fused

    x, between = hidden_states.contiguous(), self._apply_gate if self.has_gate else self.act_fn
    return fused.experts(x, top_k_index, top_k_weights, *tensors, between)


def _tensors(module: nn.Module) -> tuple[ExpertTensors, ExpertTensors] | None:
    """Return the weights before and after the activation; None if the kernels do not support the module."""
    is_plain = getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False)
    names = ("gate_up_proj" if getattr(module, "has_gate", False) else "up_proj", "down_proj")
    weights = [module._parameters.get(name) for name in names]
    if is_plain or any(weight is None or weight.dim() != 3 for weight in weights):
        return None
    biases = [module._parameters.get(f"{name}_bias") for name in names]
    made = [_of(weight, bias, bool(module.is_transposed)) for weight, bias in zip(weights, biases, strict=True)]  # type: ignore[arg-type]
    return None if made[0] is None or made[1] is None else (made[0], made[1])


def _of(weight: Tensor, bias: Tensor | None, is_transposed: bool) -> ExpertTensors | None:
    if isinstance(weight, Experts):
        made = getattr(weight.form, "tensors", lambda: None)()
    else:
        n, k = weight.shape[:0:-1] if is_transposed else weight.shape[1:]
        made = ExpertTensors("plain", n, k, weight.detach(), None, 0, is_transposed) if weight.is_contiguous() else None
    if made is None or made.k % 16 or triton_support.why_not(made.data.device, weight.dtype):
        return None
    made.bias = None if bias is None else bias.detach()
    return made
