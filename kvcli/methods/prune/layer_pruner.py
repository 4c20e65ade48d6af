"""Token pruner for layer-wise prefill: before some layers, only the best-scoring and the protected rows continue."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.layerwise import ActiveRows
    from kvcli.kv.slots import KVCache

# (layer below a cut, its active rows) -> score per active row. No closure: a copied sequence has its own KV cache
Judge = Callable[[int, "ActiveRows"], "Tensor"]


class LayerPruner:
    """Token pruner of one prompt during prefill."""

    def __init__(self, cuts: Mapping[int, float], judge: Judge, always: set[int], n: int, *, mass: float = 0.0) -> None:
        """`cuts`: share of rows that continue, by layer, of n rows (0 = of the active rows); `mass`: least share of the
        score sum that the continuing rows have."""
        self._cuts, self._judge, self._always, self._n, self._mass = cuts, judge, always, n, mass

    def __call__(self, layer: int, live: ActiveRows) -> Sequence[int] | None:
        """Return the rows that continue into `layer`: the best by scores of the layer below, and the protected ones."""
        if layer not in self._cuts:
            return None
        scores = self._judge(layer - 1, live)
        n = math.ceil(self._cuts[layer] * (self._n or len(live.rows)))
        return sorted(self._always | {live.rows[i] for i in highest(scores, n, self._mass)})


def highest(scores: Tensor, n: int, mass: float = 0.0) -> list[int]:
    """Return the n highest of scores [N], highest first; more if their sum is below the share `mass` of all scores."""
    order = scores.argsort(descending=True, stable=True)
    if mass:
        n = max(n, 1 + int((scores[order].cumsum(0) < mass * scores.sum()).sum()))
    found: list[int] = order[:n].tolist()
    return found


def pooled(scores: Tensor, pool: int) -> Tensor:
    """Return the maximum over `pool` neighbours, centred, of each of scores [N]."""
    from torch.nn.functional import max_pool1d

    return max_pool1d(scores[None], pool, 1, pool // 2)[0]


def attention_mass(
    lm: LM, cache: KVCache, layer: int, live: ActiveRows, pos: Sequence[int], n_scoring_rows: int = 1
) -> Tensor:
    """Return the attention in this layer to each position up to the last row's, P: [P + 1]; rows at positions `pos`.

    It is the mean over query heads and the newest `n_scoring_rows` rows. Positions without a key in the layer get 0.
    """
    import torch

    from kvcli.kernels.attention_mass import attention_mass

    assert live.queries is not None, "queries of the newest rows are recorded"
    s = cache.slots(layer)
    k, at = s.k, s.pos
    if live.fresh is not None:
        fresh_at = torch.tensor([pos[row] for row in live.rows], dtype=at.dtype, device=at.device)
        k, at = torch.cat((k, live.fresh.k), 1), torch.cat((at, fresh_at.expand(at.shape[0], -1)), 1)
    sight = lm.attention_params[layer]
    newest = torch.tensor(pos[len(pos) - n_scoring_rows :], device=k.device)
    mass = attention_mass(
        live.queries[:, -n_scoring_rows:], newest, k, at, sight.scale, softcap=sight.softcap
    )  # [K, S]
    found = mass.new_zeros(pos[-1] + 1)
    for heads, places in zip(mass, at, strict=True):
        found.index_add_(0, places.long().clamp_min(0), heads)  # empty slots have no mass
    return lm.ranks.mean(found / mass.shape[0])
