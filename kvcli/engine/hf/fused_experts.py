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
    found = [module for module in root.modules() if not why_not_grouped(module) and _tensors(module)]
    if found:
        ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    for module in found:
        config: Any = module.config
        config._experts_implementation = NAME  # of all modules that share it; others are recognized at each call
    return len(found)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute rows [M, H], experts of each [M, T] and their weights [M, T] -> [M, H]."""
    if not (tensors := _tensors(self)):
        given: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return given
    # imported late, because there may be no Triton where nothing is supported
    from kvcli.kernels.moe_linear.fused import experts

    between = self._apply_gate if getattr(self, "has_gate", True) else self.act_fn
    return experts(hidden_states.contiguous(), top_k_index, top_k_weights, tensors[0], tensors[1], between)


def _tensors(module: Any) -> list[ExpertTensors]:
    """Return the weights before and after the activation; none if the kernels do not support the module."""
    names = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"
    given = module._parameters.get
    found = [_of(given(name), given(f"{name}_bias"), module.is_transposed) for name in names]
    is_more = any(vars(module).get(name) for name in ("has_post_expert_norm", "_is_expert_parallel"))
    return [] if is_more else [one for one in found if one is not None] * all(found)


def _of(weight: Tensor | None, bias: Tensor | None, is_turned: bool) -> ExpertTensors | None:
    if weight is None or triton_support.why_not(weight.device, weight.dtype):
        return None
    if isinstance(weight, Experts):
        made: ExpertTensors | None = getattr(weight.form, "tensors", lambda: None)()
    else:
        n, k = weight.shape[:0:-1] if is_turned else weight.shape[1:]
        made = ExpertTensors("plain", n, k, weight.detach(), None, 0, is_turned) if weight.is_contiguous() else None
    if made is None or made.k % 16:
        return None
    made.bias = None if bias is None else bias.detach()
    return made
