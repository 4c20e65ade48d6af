"""Tokens that a prompt left behind come back while an answer is written, when its newest token looks at them.

LazyLLM's decoding (arXiv 2407.14057), with caps. Before a layer of the schedule, tokens that got no further are judged
by the attention of the newest row in the layer below, among all that have keys there; the highest of them go on from
where they stopped, as far as they are among those that the schedule lets on. Rows see all that their layers hold, where
the paper's see what it chose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.engine.behind import Moves
from kvcli.prune.narrowing import highest, looked_at

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.behind import Behind
    from kvcli.engine.gate import Live
    from kvcli.engine.lm import LM
    from kvcli.kv.slots import Store
    from kvcli.prune.lazy import Lazy


class Returning:
    """One pass of the newest row, its feed's last; in front of it are those behind, all of them dropped at once."""

    def __init__(self, lazy: Lazy, lm: LM, past: Store, behind: Behind, pos: Sequence[int]) -> None:
        self._lazy, self._lm, self._past, self._behind, self._pos = lazy, lm, past, behind, pos
        self._cuts = lazy.cuts(lm, lazy.spared)
        self._row = {p: row for row, p in enumerate(pos)}
        self._next: list[int] = []  # positions that come back into the layer to come
        self.moves = Moves()

    def before(self, layer: int, live: Live) -> Sequence[int] | None:
        """Those that came back and are still looked at, and the newest."""
        self._next = []
        if layer == 0:
            self.moves = Moves()
            return [len(self._pos) - 1]
        waiting = self._behind.at(layer)
        if layer not in self._cuts or not (waiting or len(live.rows) > 1):
            return None
        mass = looked_at(self._lm, self._past, layer - 1, live, self._pos)
        of = len(mass) if self._lazy.ratio_of == "prompt" else int((mass > 0).sum())
        order = highest(mass, math.ceil(self._cuts[layer] * of), self._lazy.mass)
        chosen = set(order)
        carried = [row for row in live.rows[:-1] if self._pos[row] in chosen]
        if waiting and float(mass[waiting].sum()) >= self._lazy.revive_min_mass:
            missing = set(waiting)
            room = max(0, self._lazy.revive_max - len(carried))
            self._next = [p for p in order if p in missing][:room]
        return [*carried, live.rows[-1]]

    def left(self, layer: int, rows: Sequence[int], hidden: Tensor) -> None:
        """Those that stop here; before the first layer they have not come yet."""
        if layer:
            self.moves.stopped[layer] = [self._pos[row] for row in rows], hidden

    def revive(self, layer: int) -> tuple[Sequence[int], Tensor] | None:
        """Those chosen."""
        if not self._next:
            return None
        self.moves.came |= set(self._next)
        return [self._row[p] for p in self._next], self._behind.hidden(layer, self._next)
