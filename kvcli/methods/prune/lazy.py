"""LazyLLM: tokens that the end of a text hardly looks at stay behind, more of them in higher layers.

Fu et al., arXiv 2407.14057. Before a layer of the schedule each token is judged by the attention that the newest row
gave it in the layer below, averaged over the query heads; those judged lowest go no further. What stays behind has keys
and values in the layers that it reached, and none above; with scope = "prefill+decode" it may go on from there later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from kvcli.methods.prune.layer_pruner import LayerPruner, attention_mass, pooled
from kvcli.methods.prune.schedule import Schedule
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.aux_cache import AuxCache
    from kvcli.engine.prefill.prompt_pruner import ActiveRows, Choose
    from kvcli.engine.rows import Rows
    from kvcli.kv.slots import KVCache

SPARED = 4  # layers: what a token left behind misses there takes less memory than what it would be kept as


@dataclass(frozen=True)
class LazyLLM(Schedule):
    """Leave tokens of a prompt behind, layer by layer, by what its end looks at (LazyLLM, arXiv 2407.14057)."""

    score_queries: Annotated[int, Range(1)] = 1  # newest rows that judge
    pool: Annotated[int, Range(1)] = 1  # neighbours on their way whose highest score a token shares (FastKV)
    mass: Annotated[float, Range(0, below=1)] = 0.0  # attention that those which go on have at least; 0 = any
    scope: Literal["prefill", "prefill+decode"] = "prefill"  # left behind for good, or until an answer looks at it
    revive_max: Annotated[int, Range(0)] = 32  # tokens that come back in one pass at most
    revive_min_mass: Annotated[float, Range(0, 1)] = 0.02  # attention to missing ones below which none comes back
    revive_interval: Annotated[int, Range(1)] = 16  # tokens of an answer between two such passes
    idle_complete: bool = True  # what is still missing is brought back before the next prompt is read

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ValueError(f"pool = {self.pool}: as many neighbours on either side make an odd number")
        for of in fields(self) if self.scope == "prefill" else ():
            if of.name.startswith(("revive", "idle")) and getattr(self, of.name) != of.default:
                raise ValueError(f'{of.name} changes nothing with scope = "prefill": nobody comes back')

    @property
    def n_scoring_rows(self) -> int:
        """Those that judge."""
        return self.score_queries

    @property
    def compression_interval(self) -> int | None:
        """Tokens of an answer between two passes in which some may come back."""
        return self.revive_interval if self.scope == "prefill+decode" else None

    @property
    def revives_before_prompt(self) -> bool:
        """Whether the next prompt finds all of them brought back."""
        return self.compression_interval is not None and self.idle_complete

    @property
    def spared(self) -> int:
        """Last layers that have no cut before them."""
        return SPARED if self.compression_interval is not None else 0

    def n_deferred(self, n: int) -> int:
        """All that the schedule stops, if they may come back."""
        return 0 if self.compression_interval is None or n < self.min_prompt else n - math.ceil(self.last * n)

    def describe(self, lm: LM) -> str:
        """The same, and where one that stays behind takes more than the keys and values that it is spared."""
        said, layer = super().describe(lm), max(self.cuts(lm))
        width = lm.model.config.get_text_config().hidden_size
        spares = sum(of.numbers for of in lm.shapes[layer:])
        if self.compression_interval is None or spares >= width:
            return said
        return f"{said}; one left behind before layer {layer} is kept as {width:,} numbers, and spares {spares:,}"

    def bind(self, lm: LM, cache: KVCache, rows: Rows, must: set[int], part: int) -> LayerPruner | None:
        """None for a short prompt. Raises BadModel for a model that cannot be judged."""
        if rows.n_rows < self.min_prompt:
            return None
        n = rows.n_rows if self.ratio_of == "prompt" else 0
        judge = partial(self._judge, lm, cache, rows)
        return LayerPruner(self.cuts(lm), judge, must, n, mass=self.mass)

    def _judge(self, lm: LM, cache: KVCache, rows: Rows, layer: int, live: ActiveRows) -> Tensor:
        scores = attention_mass(lm, cache, layer, live, rows.pos, min(self.score_queries, rows.n_rows))
        return pooled(scores[[rows.pos[row] for row in live.rows]], self.pool)

    def bind_revival(self, lm: LM, cache: KVCache, behind: AuxCache) -> Choose:
        """Whom the newest token looks at."""
        from kvcli.methods.prune.revival import Revival

        return Revival(self, lm, cache, behind)
