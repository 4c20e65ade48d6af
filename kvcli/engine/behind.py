"""Tokens that stopped on their way through the layers, and may go on later: LazyLLM's Aux Cache (arXiv 2407.14057).

Those that go on into a layer are among those that were in the one below, so a token has keys and values in its lowest
layers and in none above: its depth and one hidden vector, what the next layer would have been given, are all it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.rows import Rows
from kvcli.kernels.attend import attend
from kvcli.kv.slots import Sight, Usage, alone

if TYPE_CHECKING:
    from kvcli.engine.gate import Live, Pruner
    from kvcli.kernels.attend_rows import Own
    from kvcli.kernels.merge import Part
    from kvcli.kv.slots import Store

AT_ONCE = 256  # rows that go on together: each has a mask over all that is stored

Stopped = dict[int, tuple[list[int], Tensor]]  # by the layer that they did not go into: positions, vectors [n, E]


@dataclass(slots=True)
class Moves:
    """What a pass changed: who went on from where they were, and who stopped, perhaps some of the same."""

    came: set[int] = field(default_factory=set)
    stopped: Stopped = field(default_factory=dict)


class Behind:
    """Of one text: who stopped where, and with which hidden vector."""

    def __init__(self) -> None:
        self._at: Stopped = {}  # positions rise

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

    def follow(self, moves: Moves) -> None:
        """A pass is over, and what it made is stored."""
        for layer in list(self._at):
            held = self._at[layer][0]
            if len(stay := [p for p in held if p not in moves.came]) < len(held):
                self._put(layer, stay, self.hidden(layer, stay))
        for layer, (pos, vectors) in moves.stopped.items():
            both, joined = [*self.at(layer), *pos], vectors
            if layer in self._at:
                joined = torch.cat((self._at[layer][1], vectors))
            order = sorted(range(len(both)), key=both.__getitem__)
            self._put(layer, [both[i] for i in order], joined[order])

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
        self.moves = Moves()

    def before(self, layer: int, live: Live) -> Sequence[int] | None:
        """As it says."""
        if layer == 0:  # a pass that broke is made again
            self.moves = Moves()
        return self._pruner.before(layer, live)

    def left(self, layer: int, rows: Sequence[int], hidden: Tensor) -> None:
        """Noted."""
        self.moves.stopped[layer] = [self._pos[row] for row in rows], hidden

    def revive(self, layer: int) -> tuple[Sequence[int], Tensor] | None:
        """As it says."""
        return self._pruner.revive(layer)


class Completing:
    """The pruner of a pass of these tokens alone: each goes on from where it stopped, to the last layer."""

    def __init__(self, behind: Behind, pos: Sequence[int]) -> None:
        self._behind, self._row = behind, {p: row for row, p in enumerate(pos)}
        self.moves = Moves(came=set(pos))

    def before(self, layer: int, live: Live) -> Sequence[int] | None:
        """In the first layer they have all been."""
        return [] if layer == 0 else None

    def left(self, layer: int, rows: Sequence[int], hidden: Tensor) -> None:
        """What the first layer would be given is of no use."""

    def revive(self, layer: int) -> tuple[Sequence[int], Tensor] | None:
        """Those that stopped here."""
        if not (pos := [p for p in self._behind.at(layer) if p in self._row]):
            return None
        return [self._row[p] for p in pos], self._behind.hidden(layer, pos)


class Older:
    """A store as tokens of any age see it: each what is older than itself. For a pass with some that come back."""

    def __init__(self, store: Store) -> None:
        self._store, self.dtype = store, store.dtype

    def attend(self, layer: int, q: Tensor, sight: Sight, pos: Sequence[int], own: Own | None = None) -> list[Part]:
        """q [H, N, D] of rows at positions pos [N] -> a part over what is stored, and those over their pass."""
        s = self._store.slots(layer)
        rows = torch.tensor(pos, dtype=s.pos.dtype, device=s.pos.device).view(1, -1, 1)
        at = s.pos.unsqueeze(1)  # [K, 1, S]
        shown = (at >= 0) & (at < rows)
        if sight.window is not None:
            shown &= at > rows - sight.window
        return [attend(q, s.k, s.v, sight.scale, softcap=sight.softcap, mask=shown), *alone(q, sight, own)]

    def usage(self) -> list[Usage]:
        """It holds nothing."""
        return []


def rows_of(ids: Sequence[int], pos: Sequence[int]) -> Rows:
    """The tokens of a text at these rising positions: each sees those before it."""
    return replace(Rows.chain([ids[p] for p in pos], 0), pos=list(pos))
