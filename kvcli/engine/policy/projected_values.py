"""Norms of values after the output projection of their head: what a slot's value can add to the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcli.errors import BadModel

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # names of the output projection in transformers
BLOCK = 1024  # values projected at a time


class ProjectedValueNorms:
    """Norms of projected values. Weights are read when needed; quantized weights are dequantized."""

    def __init__(self, lm: LM, who: str) -> None:
        """`who`: the setting that needs the norms, as typed by the user. Raises BadModel if heads share what they
        store, or if there is no output projection per head."""
        self._modules = [_module(attends) for attends in lm.attentions]
        if None in self._modules or any(of.rank for of in lm.shapes):
            raise BadModel(
                f"{who} needs an output projection per head, and {lm.info.id} ({lm.info.family}) has none",
                code="policy_unsupported",
                lines=["its heads share latents, or the projection has another name"],
                try_=["leave it out", "--set policy.name=vatp, which uses the norm of values"],
            )
        self._heads, self._dtype = lm.heads, lm.dtype

    def __deepcopy__(self, memo: object) -> ProjectedValueNorms:
        """Return itself: the weights are the model's, and a forked sequence shares them."""
        return self

    def __call__(self, layer: int, v: Tensor, order: int) -> Tensor:
        """Return the norm (1 or 2) of each value after the output projection of each query head that reads it: v [K, S,
        D] -> [K, G, S]."""
        module = self._modules[layer]
        wide = torch.promote_types(v.dtype, torch.float32)
        (kv, n, d), group = v.shape, self._heads[layer] // v.shape[0]
        weight = _weight(module, kv * group * d, self._dtype, v.device).to(wide).view(kv, group, d, -1)  # [K, G, D, E]
        found = torch.zeros(kv, group, n, dtype=wide, device=v.device)
        for head in range(kv):
            for at in range(0, n, BLOCK):
                some = v[head, at : at + BLOCK].to(wide)
                for g, part in enumerate(weight[head]):
                    found[head, g, at : at + BLOCK] = (some @ part).norm(p=order, dim=1)
        return found


def _module(attends: Any) -> Any:
    return next((getattr(attends, name) for name in NAMES if hasattr(attends, name)), None)


def _weight(module: Any, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight [width, E], computed from unit inputs because quantized weights can be read in no other way."""
    with torch.no_grad():
        each = torch.eye(width, dtype=dtype, device=device)
        found: Tensor = module(each) - module(torch.zeros_like(each[:1]))
        return found
