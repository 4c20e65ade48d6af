"""What a value adds to the residual stream: its head's part of the output projection, of any attention that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcli.errors import BadModel

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # what families of transformers call it
BLOCK = 1024  # values projected at a time


class ProjectedValueNorms:
    """Norms of projected values. Weights are asked for when somebody needs them, packed ones are unpacked for that."""

    def __init__(self, lm: LM, who: str) -> None:
        """`who` needs it, as the user typed. Raises BadModel where heads share what they store, or none is found."""
        self._modules = [_module(attends) for attends in lm.attentions]
        if None in self._modules or any(of.rank for of in lm.shapes):
            raise BadModel(
                f"{who} weighs values by the output projection, and {lm.info.id} ({lm.info.family}) has none by head",
                code="policy_unsupported",
                lines=["its heads share what is stored, or the projection has another name"],
                try_=["leave it out", "--set policy.name=vatp, which weighs values alone"],
            )
        self._heads, self._dtype = lm.heads, lm.dtype

    def __deepcopy__(self, memo: object) -> ProjectedValueNorms:
        """Itself: the weights are the model's, and a text that is forked shares them."""
        return self

    def __call__(self, layer: int, v: Tensor, order: int) -> Tensor:
        """[K, G, S]: the norm (1 or 2) of v [K, S, D] behind the projection of each query head that reads it."""
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
    """[width, E]: what it makes of each input alone, as packed weights show themselves in no other way."""
    with torch.no_grad():
        each = torch.eye(width, dtype=dtype, device=device)
        found: Tensor = module(each) - module(torch.zeros_like(each[:1]))
        return found
