"""Token pruner for layer-wise prefill: before some layers, only the best-scoring and the protected rows continue."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.layerwise import ActiveRows
    from kvcli.kv.slots import KVCache

# (layer below a cut, its active rows) -> score per active row. No closure: a copied sequence has its own KV cache
Judge = Callable[[int, "ActiveRows"], "Tensor"]


class LayerPruner:
    """Token pruner of one prompt during prefill."""

    def __init__(
        self,
        cuts: Mapping[int, float],
        judge: Judge,
        always: set[int],
        n: int,
        *,
        mass: float = 0.0,
        n_layers: int = 1,
        pool: int = 1,
    ) -> None:
        """`cuts`: share of rows that continue, by layer, of n rows (0 = of the active rows); `mass`: least share of the
        score sum that the continuing rows have. A row's score is its highest one in the `n_layers` layers below a cut,
        but above the cut before, and then the highest one of `pool` neighbours, centred."""
        self._cuts, self._judge, self._always, self._n, self._mass = cuts, judge, always, n, mass
        self._n_layers, self._pool = n_layers, pool
        self._best: Tensor | None = None  # highest scores of the active rows so far

    def __call__(self, layer: int, live: ActiveRows) -> Sequence[int] | None:
        """Return the rows that continue into `layer`: the best by scores of the layer below, and the protected ones."""
        ahead = min((cut - layer for cut in self._cuts if cut >= layer), default=self._n_layers)
        if not layer or ahead >= self._n_layers:
            return None
        scores = self._judge(layer - 1, live)
        self._best = scores if self._best is None else scores.maximum(self._best)
        if ahead:
            return None
        scores, self._best = pooled(self._best, self._pool), None
        n = math.ceil(self._cuts[layer] * (self._n or len(live.rows)))
        return sorted(self._always | {live.rows[i] for i in highest(scores, n, self._mass)})


def at_first(rows: Sequence[int], layer: int, live: ActiveRows) -> Sequence[int] | None:
    """Return these rows as active in the first layer, and None (no change) for later layers."""
    return rows if layer == 0 else None


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

    return scores if pool == 1 else max_pool1d(scores[None], pool, 1, pool // 2)[0]


def attention_mass(
    lm: LM,
    cache: KVCache,
    layer: int,
    live: ActiveRows,
    pos: Sequence[int],
    n_scoring_rows: int = 1,
    over: Literal["mean", "max"] = "mean",
) -> Tensor:
    """Return the attention in this layer to each position up to the last row's, P: [P + 1]; rows at positions `pos`.

    It is the mean or maximum `over` query heads and the newest `n_scoring_rows` rows. Positions without a key in the
    layer get 0.
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
        live.queries[:, -n_scoring_rows:], newest, k, at, sight.scale, softcap=sight.softcap, over=over
    )  # [K, S]
    found = mass.new_zeros(pos[-1] + 2)  # the last one is for empty slots
    for head, places in zip(mass, at.long(), strict=True):
        found[places] = found[places] + head / mass.shape[0] if over == "mean" else found[places].maximum(head)
    return lm.ranks.reduce(found[:-1], over)
