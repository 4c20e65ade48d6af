"""Revival of deferred tokens while decoding, by the attention of the newest token.

LazyLLM's decoding (arXiv 2407.14057), with limits on the number of tokens. Before a layer of the schedule, tokens
deferred there are scored by the attention of the newest row in the layer below, among all tokens with keys in it. The
best of them continue from there, if they are among the tokens that the schedule lets continue. Rows attend to all slots
of their layers; in the paper they attend to the selected tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.methods.prune.layer_pruner import attention_mass, highest

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.aux_cache import ActiveRows, AuxCache
    from kvcli.kv.slots import KVCache
    from kvcli.methods.prune.lazy import LazyLLM


class Revival:
    """Selector of the tokens to revive in one revival pass of the newest token."""

    def __init__(self, lazy: LazyLLM, lm: LM, cache: KVCache, aux_cache: AuxCache) -> None:
        self._lazy, self._lm, self._cache, self._aux_cache = lazy, lm, cache, aux_cache
        self._cuts = lazy.cuts(lm)

    def __call__(self, layer: int, live: ActiveRows, pos: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the positions `pos` that continue (the newest always does), and the deferred positions to revive."""
        waiting, lazy = self._aux_cache.at(layer), self._lazy
        if layer not in self._cuts or not (waiting or len(pos) > 1):
            return pos, ()
        mass = attention_mass(self._lm, self._cache, layer - 1, live, pos)
        of = len(mass) if lazy.ratio_of == "prompt" else int((mass > 0).sum())
        order = highest(mass, math.ceil(self._cuts[layer] * of), lazy.mass)
        chosen, missing = set(order), set(waiting)
        on = [p for p in pos if p in chosen or p == pos[-1]]
        if not waiting or float(mass[waiting].sum()) < lazy.revive_min_mass:
            return on, ()
        room = max(0, lazy.revive_max + 1 - len(on))
        return on, [p for p in order if p in missing][:room]
