"""LazyLLM: token pruning by attention from the end of the prompt, with more tokens deferred in higher layers.

Fu et al., arXiv 2407.14057. Before a layer of the schedule each token is scored by the attention of the newest row in
the layer below, averaged over query heads; the lowest-scoring tokens are deferred. A deferred token has keys and values
in the layers below and none above; with scope = "prefill+decode" it may be revived and continue from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.methods.prune.layer_pruner import LayerPruner, attention_mass, highest
from kvcli.methods.prune.schedule import Schedule
from kvcli.settings.profile import KV_OF_ALL, NOT_WHOLE, Needs
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.forward_request import Rows
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.layerwise import ActiveRows
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.slots import KVCache
    from kvcli.methods.prune.aux_cache import AuxCache, Selection
    from kvcli.methods.prune.pruned_prefill import PrunedPrefill


@dataclass(frozen=True)
class LazyLLM(Schedule):
    """LazyLLM (Fu et al., 2024, arXiv 2407.14057): prunes a prompt layer by layer, by attention from its end.

    Prefill of SmolLM2 is 1.5 times as fast, and lookups lose 5.56 points of accuracy (measurements/lab-log.md).
    """

    score_queries: Annotated[int, Range(1)] = 1  # newest tokens whose queries score the others
    pool: Annotated[int, Range(1)] = 1  # active neighbours over which scores are max-pooled; odd (FastKV)
    heads: Literal["mean", "max"] = "mean"  # of query heads; max = the score is that of the one that most looks
    score_layers: Annotated[int, Range(1)] = 1  # layers below whose scores are combined, by their maximum
    mass: Annotated[float, Range(0, below=1)] = 0.0  # minimum share of attention that continuing tokens have; 0 = any
    scope: Literal["prefill", "prefill+decode"] = "prefill"  # drop tokens for good, or revive them while answering
    revive_max: Annotated[int, Range(0)] = 32  # tokens revived per pass, at most
    revive_min_mass: Annotated[float, Range(0, 1)] = 0.02  # minimum total attention to deferred tokens for a revival
    revive_interval: Annotated[int, Range(1)] = 16  # generated tokens between two revival passes
    idle_complete: bool = True  # revive all deferred tokens before the next prompt
    attend_to: Literal["stored", "selected"] = "stored"  # in upper layers; selected = chosen anew at each revival pass

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ValueError(f"pool = {self.pool}: as many neighbours on either side make an odd number")
        for of in fields(self) if self.scope == "prefill" else ():
            if of.name.startswith(("revive", "idle", "attend")) and getattr(self, of.name) != of.default:
                raise ValueError(f'{of.name} has no effect with scope = "prefill": tokens are not revived')

    @property
    def n_scoring_rows(self) -> int:
        """Newest rows whose queries score the others."""
        return self.score_queries

    @property
    def needs(self) -> Needs | None:
        """Revived tokens attend to all older ones."""
        revives = self.compression_interval is not None
        return Needs(NOT_WHOLE | {"degrades"}, KV_OF_ALL, "scope") if revives else None

    @property
    def compression_interval(self) -> int | None:
        """Tokens of an answer between two revival passes; None = deferred tokens are not revived."""
        return self.revive_interval if self.scope == "prefill+decode" else None

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the hidden states of the tokens that the schedule defers, if they can be revived. Where rows attend to
        selected tokens, a layer's slots are there three more times while some of them rest and others return."""
        if self.compression_interval is None or n < self.min_prompt:
            return Footprint()
        moved = 3 * n * of.last_slot if self.attend_to == "selected" else 0
        return Footprint(beside=(n - math.ceil(self.last * n)) * of.hidden * of.number + moved)

    def describe(self, lm: LM) -> str:
        """Describe the schedule, and whether a deferred token's hidden state takes more memory than the KV it saves."""
        said, layer = super().describe(lm), max(self.cuts(lm))
        width = lm.model.config.get_text_config().hidden_size
        spares = sum(of.numbers for of in lm.shapes[layer:])
        if self.compression_interval is None or spares >= width:
            return said
        return f"{said}; a deferred token at layer {layer} takes {width:,} numbers to save {spares:,}"

    def bind(self, pair: ModelPair, text: GenerationSession, rows: Rows, must: set[int]) -> LayerPruner | None:
        """Return the pruner, or None for a short prompt. Raises BadModel if no layer can score tokens."""
        if rows.n_rows < self.min_prompt:
            return None
        n, lm = rows.n_rows if self.ratio_of == "prompt" else 0, pair.target
        judge = partial(self._judge, lm, text.cache, rows)
        return LayerPruner(self.cuts(lm), judge, must, n, mass=self.mass, n_layers=self.score_layers, pool=self.pool)

    def _judge(self, lm: LM, cache: KVCache, rows: Rows, layer: int, live: ActiveRows) -> Tensor:
        import torch

        if (
            lm.windows[layer] is not None
        ):  # one of several scoring layers; the one below a cut attends to the whole text
            return torch.zeros(len(live.rows), device=cache.slots(layer).k.device)
        scores = attention_mass(lm, cache, layer, live, rows.pos, min(self.score_queries, rows.n_rows), self.heads)
        return scores[[rows.pos[row] for row in live.rows]]

    def companion(self, pair: ModelPair) -> PrunedPrefill:
        """Return the companion of a sequence that prunes its prompts, and with `scope` revives tokens."""
        from kvcli.methods.prune.aux_cache import AuxCache

        if self.compression_interval is None:
            return super().companion(pair)
        revival, selects = partial(Revival, self), self.attend_to == "selected"
        settings = {"revives_before_prompt": self.idle_complete, "selects": selects}
        return AuxCache(pair, self, self.revive_interval, self.cuts(pair.target), revival, **settings)


class Revival:
    """Selector of the tokens to revive in one revival pass of the newest token.

    LazyLLM's decoding, with limits on the number of tokens. Before a layer of the schedule, tokens deferred there are
    scored by the attention of the newest row in the layer below, among all tokens that it attends to. The best of them
    continue from there, if they are among the tokens that the schedule lets continue. Rows attend to all slots of their
    layers or, as in the paper, only to the tokens selected so, up to the next layer of the schedule.
    """

    def __init__(self, lazy: LazyLLM, lm: LM, cache: KVCache, aux_cache: AuxCache) -> None:
        self._lazy, self._lm, self._cache, self._aux_cache = lazy, lm, cache, aux_cache
        self._cuts = lazy.cuts(lm)

    def __call__(self, layer: int, live: ActiveRows, pos: Sequence[int]) -> Selection:
        """Return the positions `pos` that continue (the newest always does), and the deferred positions to revive."""
        waiting, lazy, selects = self._aux_cache.at(layer), self._lazy, self._lazy.attend_to == "selected"
        if layer not in self._cuts or not (waiting or len(pos) > 1 or selects):
            return pos, (), None
        mass = attention_mass(self._lm, self._cache, layer - 1, live, pos)
        of = len(mass) if lazy.ratio_of == "prompt" else int((mass > 0).sum())
        order = highest(mass, math.ceil(self._cuts[layer] * of), lazy.mass)
        import torch

        selected = None
        if selects:  # positions without a key in the layer below were not selected there
            selected = mass.new_zeros(len(mass), dtype=torch.bool)
            selected[order] = mass[order] > 0
            order = [p for p in order if selected[p]]
        chosen, missing = set(order), set(waiting)
        on = [p for p in pos if p in chosen or p == pos[-1]]
        is_worth_it = waiting and float(mass[waiting].sum()) >= lazy.revive_min_mass
        room = max(0, lazy.revive_max + 1 - len(on)) if is_worth_it else 0
        return on, [p for p in order if p in missing][:room], selected
