"""LazyLLM: tokens that the end of a prompt hardly looks at stay behind, more of them in higher layers.

Fu et al., arXiv 2407.14057, for reading. Before a layer of the schedule each token is judged by the attention that the
prompt's last row gave it in the layer below, averaged over the query heads; those judged lowest go no further. What
stays behind has keys and values in the layers that it reached, and none above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.errors import BadModel
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.gate import Live, Pruner
    from kvcli.engine.lm import LM
    from kvcli.kv.slots import Store


@dataclass(frozen=True)
class Lazy:
    """Leave tokens of a prompt behind, layer by layer, by what its end looks at (LazyLLM, arXiv 2407.14057)."""

    start_prune_layer: Annotated[float, Range(above=0, below=1)] = 0.3  # first layer that fewer reach, share of depth
    end_prune_layer: Annotated[float, Range(above=0, below=1)] = 0.9  # last such layer, share of depth
    num_prune: Annotated[int, Range(1)] = 3  # such layers, spread evenly
    start_keep_ratio: Annotated[float, Range(above=0, most=1)] = 0.7  # of the prompt, that reaches the first
    end_keep_ratio: Annotated[float, Range(above=0, most=1)] = 0.3  # of the prompt, that reaches the last
    mass: Annotated[float, Range(0, below=1)] = 0.0  # attention that those which go on have at least; 0 = any
    recent: Annotated[int, Range(1)] = 64  # newest tokens that always go on
    sinks: Annotated[int, Range(0)] = 4  # first tokens that always go on
    least: Annotated[int, Range(1)] = 1024  # tokens of a prompt below which all go on

    def __post_init__(self) -> None:
        if self.end_prune_layer < self.start_prune_layer:
            raise ValueError(f"end_prune_layer = {self.end_prune_layer} is below start_prune_layer")
        if self.end_keep_ratio > self.start_keep_ratio:
            raise ValueError(f"end_keep_ratio = {self.end_keep_ratio} is above start_keep_ratio: nobody comes back")

    @property
    def reads(self) -> str:
        return f"{self.end_keep_ratio:.0%} of a prompt of {self.least:,} tokens or more in the upper layers"

    def about(self, lm: LM) -> str:
        """Which layers fewer reach, and who always does. Raises BadModel for a model that cannot be judged."""
        cuts, every = self.cuts(lm), range(1, lm.n_layers)
        shares = ", ".join(f"{share:.0%} go on from layer {layer}" for layer, share in cuts.items())
        wanted = {_nearest(every, at) for at in self._wanted(lm.n_layers)}
        layers = ", ".join(map(str, sorted(wanted)))
        moved = f" (not {layers}, as the layer below must see all of a text)" if wanted != set(cuts) else ""
        always = f"the first {self.sinks} and the newest {self.recent} always do"
        return f"of prompts of {self.least:,} tokens or more {shares}{moved}; {always}"

    def over(self, lm: LM, past: Store, start: int, n: int, must: Sequence[int]) -> Pruner | None:
        """None for a short prompt. Raises BadModel for a model that cannot be judged."""
        if n < self.least:
            return None
        always = {*must, *range(min(n, max(0, self.sinks - start))), *range(max(0, n - self.recent), n)}
        return _Reading(
            lm, past, start, {layer: math.ceil(r * n) for layer, r in self.cuts(lm).items()}, always, self.mass
        )

    def cuts(self, lm: LM) -> Mapping[int, float]:
        """By layer that fewer reach: which share of the prompt does. The layer below shows the whole text."""
        from kvcli.kv.slots import spans

        starts = [span.start for span in spans(lm.shapes)[1:]]
        shown = [i for i in starts if lm.windows[i - 1] is None and lm.shapes[i - 1].shares is None]
        if not shown:
            raise BadModel(
                f"prune.method = lazy judges tokens in layers that see all of a text, and {lm.info.id} has none",
                code="no_pruning",
                try_=["--set prune.method=none"],
            )
        first, last = self._ends(lm.n_layers)
        found = {}
        for at in self._wanted(lm.n_layers):
            layer = _nearest(shown, at)
            along = 0.0 if last == first else min(1.0, max(0.0, (layer - first) / (last - first)))
            found[layer] = self.start_keep_ratio + (self.end_keep_ratio - self.start_keep_ratio) * along
        return found

    def _wanted(self, n_layers: int) -> list[float]:
        """Where the layers of the schedule would be, if all could show the text."""
        first, last = self._ends(n_layers)
        return [first + (last - first) * i / max(1, self.num_prune - 1) for i in range(self.num_prune)]

    def _ends(self, n_layers: int) -> tuple[float, float]:
        return self.start_prune_layer * n_layers, self.end_prune_layer * n_layers


def _nearest(layers: Sequence[int], at: float) -> int:
    """The lower of two that are as near."""
    return min(layers, key=lambda layer: (abs(layer - at), layer))


class _Reading:
    """One prompt being read."""

    def __init__(
        self, lm: LM, past: Store, start: int, keeps: Mapping[int, int], always: set[int], mass: float
    ) -> None:
        self._lm, self._past, self._start = lm, past, start
        self._keeps, self._always, self._mass = keeps, always, mass

    def before(self, layer: int, live: Live) -> Sequence[int] | None:
        """Those that the last row looked at most in the layer below, and those that always go on."""
        if layer not in self._keeps:
            return None
        mass, rows = self._judged(layer - 1, live), live.rows
        of_rows = mass[list(rows)]
        order = of_rows.argsort(descending=True, stable=True)
        n = self._keeps[layer]
        if self._mass:
            n = max(n, 1 + int((of_rows[order].cumsum(0) < self._mass * of_rows.sum()).sum()))
        return sorted(self._always | {rows[i] for i in order[:n].tolist()})

    def left(self, layer: int, rows: Sequence[int], hidden: Tensor) -> None:
        """They stay behind for good."""

    def revive(self, layer: int) -> None:
        """Nobody comes back."""

    def _judged(self, layer: int, live: Live) -> Tensor:
        """[n]: attention of the last row to each row of the prompt in this layer, the mean over query heads."""
        import torch

        from kvcli.kernels.column_mass import column_mass

        assert live.queries is not None, "the last row is heard"
        lm, s = self._lm, self._past.slots(layer)
        k, pos = s.k, s.pos
        if live.fresh is not None:
            rows = live.rows if live.fresh.rows is None else live.fresh.rows
            fresh_pos = torch.tensor(rows, dtype=pos.dtype, device=pos.device) + self._start
            k, pos = torch.cat((k, live.fresh.k), 1), torch.cat((pos, fresh_pos.expand(pos.shape[0], -1)), 1)
        sight, n = lm.sights[layer], max(live.rows) + 1
        at = torch.tensor([self._start + n - 1], device=k.device)
        mass = column_mass(live.queries[:, -1:], at, k, pos, sight.scale, softcap=sight.softcap)  # [K, S]
        found = mass.new_zeros(n)
        for heads, places in zip(mass, pos, strict=True):
            mine = places >= self._start
            found.index_add_(0, places[mine].long() - self._start, heads[mine])
        return found / mass.shape[0]
