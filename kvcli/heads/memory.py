"""KV cache bytes at a context length: full, under the chosen policies, and under the head map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.schemas.heads import HeadsKv, HeadsSuggest

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.heads.prompt import Judged
    from kvcli.heads.request import ProbeRequest


def kv_bytes(
    model: Model, context: int, judged: Judged | None, chosen: Tensor | None, suggest: HeadsSuggest, ask: ProbeRequest
) -> HeadsKv:
    """Return the KV bytes of `context` tokens. Sets of policies grow with the text, protected tokens do not."""
    lm = model.lm
    token = 2 * lm.head_dim * model.new_session().cache.dtype.itemsize  # bytes per token of one head
    whole = torch.tensor([[float(_seen(context, w))] * lm.n_kv_heads for w in lm.windows])
    least = torch.minimum(whole, torch.tensor(float(suggest.sinks + suggest.window)))
    mapped = least.clone()
    for layer, head in suggest.full:
        mapped[layer, head] = whole[layer, head]
    sees_all = {layer for layer, w in enumerate(lm.windows) if w is None}
    for layer in set(range(lm.n_layers)) - set(suggested_layers(ask, lm.n_layers)) | set(range(lm.n_layers)) - sees_all:
        mapped[layer] = whole[layer]
    policy = None
    if judged is not None and chosen is not None:
        kept = _grown(judged, chosen, context, ask.settings.guarded)
        for layer in range(lm.n_layers):
            if float(judged.cost[-1, layer].max()) <= 0:  # not measured
                kept[layer] = whole[layer]
        policy = int(torch.minimum(kept, whole).sum()) * token
    return HeadsKv(context=context, whole=int(whole.sum()) * token, policy=policy, headmap=int(mapped.sum()) * token)


def suggested_layers(ask: ProbeRequest, n_layers: int) -> tuple[int, ...]:
    """Return the probed layers; the others keep the full cache."""
    return ask.layers or tuple(range(n_layers))


def _seen(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _grown(judged: Judged, chosen: Tensor, context: int, guard: int) -> Tensor:
    """Return the tokens [L, K] that the chosen candidates keep at `context`."""
    cost = judged.cost.gather(0, chosen.unsqueeze(0))[0]
    n = max(1.0, float(judged.cost[-1].max()))
    beyond = (cost - guard).clamp(min=0) * context / n
    return torch.where(chosen == judged.cost.shape[0] - 1, float(context), cost.clamp(max=guard) + beyond)
