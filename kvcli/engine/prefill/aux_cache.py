"""Tokens that stopped on their way through the layers, and may go on later: LazyLLM's Aux Cache (arXiv 2407.14057).

Those that go on into a layer are among those that were in the one below, so a token has keys and values in its lowest
layers and in none above: its depth and one hidden vector, what the next layer would have been given, are all it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.forward_request import Steps
from kvcli.engine.prefill.revival_pass import RevivalPass, Stopped
from kvcli.kv.slots import KVCache, Usage, spans
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, State

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.prompt_pruner import ActiveRows, PromptPruning

AT_ONCE = 256  # tokens that go on together to the last layer: each has a mask over all that is stored


class AuxCache:
    """Of one text: who stopped where, and with which hidden vector; and the ways on."""

    def __init__(self, lm: LM, pruning: PromptPruning | None) -> None:
        self._lm, self._pruning = lm, pruning
        self._at: Stopped = {}  # positions rise
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
        self._at, self.is_torn = {}, False

    # ---- a prompt ----

    @property
    def comes_back(self) -> bool:
        """May what stops go on later?"""
        return self._pruning is not None and self._pruning.compression_interval is not None

    def before_prompt(self, kv: KVCache, ids: Sequence[int]) -> Steps[None]:
        """Another prompt is to be read behind what is stored."""
        if self._pruning is not None and self._pruning.revives_before_prompt:
            yield from self.revive_all(kv, ids)

    # ---- the ways on ----

    @property
    def compression_interval(self) -> int | None:
        """Tokens of an answer between two boundaries at which some may come back; None = nobody does."""
        return self._pruning.compression_interval if self._pruning is not None and self else None

    def revive(self, kv: KVCache, ids: Sequence[int], written: int) -> Steps[None]:
        """So far into an answer those go on that its pending token looks at. It goes along; nothing of it is stored."""
        if self._pruning is None or self.compression_interval is None or written % self.compression_interval:
            return
        trip = RevivalPass(self._lm, kv, ids, self, [len(ids) - 1])
        yield from trip.go(self._pruning.bind_revival(self._lm, kv, self))
        trip.store()

    def revive_all(self, kv: KVCache, ids: Sequence[int]) -> Steps[None]:
        """All go on to the last layer, the oldest first."""
        while some := set(self.positions[:AT_ONCE]):
            trip = RevivalPass(self._lm, kv, ids, self)
            yield from trip.go(partial(self._onward, some))
            trip.store()

    def _onward(
        self, some: set[int], layer: int, live: ActiveRows, pos: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        return pos, [p for p in self.at(layer) if p in some]

    def remove(self, came: set[int]) -> None:
        """These went on."""
        for layer, (pos, vectors) in list(self._at.items()):
            stay = [i for i, p in enumerate(pos) if p not in came]
            self._put(layer, [pos[i] for i in stay], vectors[stay])

    def add(self, stopped: Stopped) -> None:
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

    def state(self) -> State:
        """As it stands between passes."""
        found: dict[str, State] = {}
        for layer, (pos, vectors) in self._at.items():
            found[str(len(found))] = {"layer": layer, "pos": torch.tensor(pos, dtype=torch.int32), "x": vectors}
        return found

    def restore(self, given: SnapshotReader) -> None:
        """Become what gave this. Raises SnapshotMismatch."""
        self.clear()
        width = self._lm.model.config.get_text_config().hidden_size
        starts = {span.start for span in spans(self._lm.shapes)[1:]}
        for one in given.parts(self._lm.n_layers):
            pos = one.positions("pos", None).tolist()
            layer = one.number("layer", self._lm.n_layers - 1)
            if layer not in starts or pos != sorted(set(pos)) or not self.depth.keys().isdisjoint(pos):
                raise SnapshotMismatch("nobody stops there")
            vectors = one.tensor("x", self._lm.dtype, len(pos), width)
            self._put(layer, pos, vectors.to(self._lm.device, copy=True))

    def usage(self) -> list[Usage]:
        """Bytes, by the layer before which they stopped."""
        return [Usage(layer, "behind", len(pos), x.nbytes) for layer, (pos, x) in self._at.items()]
