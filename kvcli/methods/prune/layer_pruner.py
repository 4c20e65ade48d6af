"""Before some layers, the rows of a prompt that are judged highest go on, and those that always do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.prompt_pruner import ActiveRows
    from kvcli.kv.slots import KVCache

# layer below a cut, what it made -> a score of each live row. No closure: a text that is copied has a store of its own
Judge = Callable[[int, "ActiveRows"], "Tensor"]


class LayerPruner:
    """One prompt being read."""

    def __init__(self, cuts: Mapping[int, float], judge: Judge, always: set[int], n: int, *, mass: float = 0.0) -> None:
        """`cuts`: by layer, which share goes on, of n rows (0 = of those on their way); `mass`: of all scores, that
        those which go on have at least."""
        self._cuts, self._judge, self._always, self._n, self._mass = cuts, judge, always, n, mass

    def __call__(self, layer: int, live: ActiveRows) -> Sequence[int] | None:
        """Those judged highest by the layer below."""
        if layer not in self._cuts:
            return None
        scores = self._judge(layer - 1, live)
        n = math.ceil(self._cuts[layer] * (self._n or len(live.rows)))
        return sorted(self._always | {live.rows[i] for i in highest(scores, n, self._mass)})


def highest(scores: Tensor, n: int, mass: float = 0.0) -> list[int]:
    """The n highest of scores [N], or as many more as have this share of their sum; the highest first."""
    order = scores.argsort(descending=True, stable=True)
    if mass:
        n = max(n, 1 + int((scores[order].cumsum(0) < mass * scores.sum()).sum()))
    found: list[int] = order[:n].tolist()
    return found


def pooled(scores: Tensor, pool: int) -> Tensor:
    """[N]: of each of scores [N] the highest of `pool` neighbours, itself in the middle."""
    from torch.nn.functional import max_pool1d

    return max_pool1d(scores[None], pool, 1, pool // 2)[0]


def attention_mass(
    lm: LM, cache: KVCache, layer: int, live: ActiveRows, pos: Sequence[int], n_scoring_rows: int = 1
) -> Tensor:
    """[P + 1]: attention in this layer to each position up to the last row's, P; of rows at positions `pos`.

    The mean over query heads, and over the newest `hears` rows. Positions of which the layer has no key get none.
    """
    import torch

    from kvcli.kernels.attention_mass import attention_mass

    assert live.queries is not None, "the newest rows are heard"
    s = cache.slots(layer)
    k, at = s.k, s.pos
    if live.fresh is not None:
        fresh_at = torch.tensor([pos[row] for row in live.rows], dtype=at.dtype, device=at.device)
        k, at = torch.cat((k, live.fresh.k), 1), torch.cat((at, fresh_at.expand(at.shape[0], -1)), 1)
    sight = lm.sights[layer]
    newest = torch.tensor(pos[len(pos) - n_scoring_rows :], device=k.device)
    mass = attention_mass(
        live.queries[:, -n_scoring_rows:], newest, k, at, sight.scale, softcap=sight.softcap
    )  # [K, S]
    found = mass.new_zeros(pos[-1] + 1)
    for heads, places in zip(mass, at, strict=True):
        found.index_add_(0, places.long().clamp_min(0), heads)  # empty slots have no mass
    return found / mass.shape[0]
