"""Tokens that stopped on their way through the layers, and may go on later: LazyLLM's Aux Cache (arXiv 2407.14057).

Those that go on into a layer are among those that were in the one below, so a token has keys and values in its lowest
layers and in none above: its depth and one hidden vector, what the next layer would have been given, are all it takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.by_layers import ByLayers
from kvcli.engine.feed import Asks, Feed, Made, asked
from kvcli.engine.readback import Readback
from kvcli.engine.rows import Rows
from kvcli.engine.trip import Stopped, Trip
from kvcli.kv.slots import Store, Usage

if TYPE_CHECKING:
    from kvcli.engine.gate import Live, Pruner, Pruning
    from kvcli.engine.heard import Heard
    from kvcli.engine.lm import LM
    from kvcli.engine.sample import Draw

AT_ONCE = 256  # tokens that go on together to the last layer: each has a mask over all that is stored


class Behind:
    """Of one text: who stopped where, and with which hidden vector; and the ways on."""

    def __init__(self, lm: LM, pruning: Pruning | None) -> None:
        self._lm, self.pruning = lm, pruning
        self._at: Stopped = {}  # positions rise
        self._noting: Noting | None = None  # of the prompt under way
        self.is_torn = False  # some layers hold what came back, and others do not

    def __len__(self) -> int:
        return sum(len(pos) for pos, _ in self._at.values())

    @property
    def positions(self) -> list[int]:
        """Of all of them, rising."""
        return sorted(p for pos, _ in self._at.values() for p in pos)

    @property
    def depth(self) -> Mapping[int, int]:
        """By position: layers for which there are keys and values."""
        return {p: layer for layer, (pos, _) in self._at.items() for p in pos}

    def at(self, layer: int) -> list[int]:
        """Positions of those that stopped before this layer, rising."""
        return self._at[layer][0] if layer in self._at else []

    def hidden(self, layer: int, pos: Sequence[int]) -> Tensor:
        """[n, E] of those that stopped before this layer."""
        held, vectors = self._at[layer]
        place = {p: i for i, p in enumerate(held)}
        return vectors[[place[p] for p in pos]]

    def clear(self) -> None:
        """A text begins anew."""
        self._at, self._noting, self.is_torn = {}, None, False

    # ---- a prompt ----

    @property
    def comes_back(self) -> bool:
        """May what stops go on later?"""
        return self.pruning is not None and self.pruning.every is not None

    def before_prompt(self, kv: Store, ids: Sequence[int]) -> Asks[None]:
        """Another prompt is to be read behind what is stored."""
        if self.pruning is not None and self.pruning.completes:
            yield from self.complete(kv, ids)

    def prompt(self, kv: Store, ids: Sequence[int], start: int, part: int, heard: Heard) -> Asks[ByLayers]:
        """Of a text the tokens from `start` on, all but the last, or as many of them as are judged together."""
        yield from self.before_prompt(kv, ids)
        n, pruner, judge = len(ids) - 1 - start, None, range(0)
        if (pruning := self.pruning) is not None:
            n = pruning.takes(n, part)
            judge = range(max(0, n - pruning.hears), n)
        rows, hear = Rows.chain(ids[start : start + n], start), heard.of_chunk(start, n)
        if pruning is not None:
            pruner = yield from asked(pruning.over(self._lm, kv, rows, [*hear, *judge], part))
        self._noting = Noting(pruner, rows.pos) if pruner is not None and self.comes_back else None
        judge, pruner = judge if pruner is not None else range(0), self._noting or pruner
        return ByLayers(self._lm, kv, rows, part, hear, pruner, judge=judge, comes_back=self.comes_back)

    def read(self) -> None:
        """That prompt is stored."""
        if self._noting is not None:
            self.join(self._noting.stopped)
        self._noting = None

    # ---- the ways on ----

    def due(self, n: int) -> float:
        """Tokens until the pass in which some may come back, when an answer has n: with that pass the past changes."""
        every = self.pruning.every if self.pruning is not None and self else None
        return math.inf if every is None else (-n - 1) % every

    def step(self, kv: Store, ids: Sequence[int], how: Draw) -> Asks[tuple[Rows, Made, list[int], list[int]]]:
        """A pass of the pending token alone, beside which tokens come back that it looks at; ends as `walk` does."""
        assert self.pruning is not None, "somebody left them behind"
        last = len(ids) - 1
        trip, rows = Trip(self._lm, kv, ids, self, [last]), Rows.chain(ids[last:], last)
        made = yield from trip.go(self.pruning.back(self._lm, kv, self), wants=True)
        drawn = Readback(Feed(self._lm, rows, kv, draw=how), made.logits).drawn(0)
        trip.store()
        return rows, made, [0], [drawn]

    def complete(self, kv: Store, ids: Sequence[int]) -> Asks[None]:
        """All go on to the last layer, the oldest first."""
        while some := set(self.positions[:AT_ONCE]):
            trip = Trip(self._lm, kv, ids, self)
            yield from trip.go(partial(self._onward, some))
            trip.store()

    def _onward(
        self, some: set[int], layer: int, live: Live, pos: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        return pos, [p for p in self.at(layer) if p in some]

    def leave(self, came: set[int]) -> None:
        """These went on."""
        for layer, (pos, vectors) in list(self._at.items()):
            stay = [i for i, p in enumerate(pos) if p not in came]
            self._put(layer, [pos[i] for i in stay], vectors[stay])

    def join(self, stopped: Stopped) -> None:
        """These stopped."""
        for layer, (pos, vectors) in stopped.items():
            both, joined = [*self.at(layer), *pos], vectors
            if layer in self._at:
                joined = torch.cat((self._at[layer][1], vectors))
            self._put(layer, sorted(both), joined[sorted(range(len(both)), key=both.__getitem__)])

    def _put(self, layer: int, pos: list[int], vectors: Tensor) -> None:
        self._at[layer] = pos, vectors
        if not pos:
            del self._at[layer]

    def usage(self) -> list[Usage]:
        """Bytes, by the layer before which they stopped."""
        return [Usage(layer, "behind", len(pos), x.nbytes) for layer, (pos, x) in self._at.items()]


class Noting:
    """A pruner of rows at these positions, and a note of whom it leaves behind."""

    def __init__(self, pruner: Pruner, pos: Sequence[int]) -> None:
        self._pruner, self._pos = pruner, pos
        self.stopped: Stopped = {}

    def before(self, layer: int, live: Live) -> Sequence[int] | None:
        """As it says."""
        return self._pruner.before(layer, live)

    def left(self, layer: int, rows: Sequence[int], hidden: Tensor) -> None:
        """Noted."""
        self.stopped[layer] = [self._pos[row] for row in rows], hidden

    def revive(self, layer: int) -> tuple[Sequence[int], Tensor] | None:
        """As it says."""
        return self._pruner.revive(layer)
