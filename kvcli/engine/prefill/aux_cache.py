"""Deferred tokens, which stopped before a layer and may be revived later: LazyLLM's Aux Cache (arXiv 2407.14057).

The rows of a layer are a subset of those of the layer below, so a token has KV in its lowest layers and in none above.
Its depth and one hidden state, the input of the next layer, are all that is stored.
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

AT_ONCE = 256  # tokens revived together up to the last layer: each has a mask over all slots


class AuxCache:
    """Aux cache of one sequence (LazyLLM): for each deferred token, the layer where it stopped and its hidden state
    there."""

    def __init__(self, lm: LM, pruning: PromptPruning | None) -> None:
        self._lm, self._pruning = lm, pruning
        self._at: Stopped = {}  # positions rise
        self.is_torn = False  # a revival failed midway: only some layers have the KV of the revived tokens

    def __len__(self) -> int:
        return sum(len(pos) for pos, _ in self._at.values())

    @property
    def positions(self) -> list[int]:
        """Positions of all deferred tokens, rising."""
        return sorted(p for pos, _ in self._at.values() for p in pos)

    @property
    def depth(self) -> Mapping[int, int]:
        """Number of layers with KV, by position."""
        return {p: layer for layer, (pos, _) in self._at.items() for p in pos}

    def at(self, layer: int) -> list[int]:
        """Return the positions of the tokens that stopped before this layer, rising."""
        return self._at[layer][0] if layer in self._at else []

    def hidden(self, layer: int, pos: Sequence[int]) -> Tensor:
        """Return the hidden states [n, E] of tokens that stopped before this layer."""
        held, vectors = self._at[layer]
        place = {p: i for i, p in enumerate(held)}
        return vectors[[place[p] for p in pos]]

    def clear(self) -> None:
        """Drop all deferred tokens, for a new sequence."""
        self._at, self.is_torn = {}, False

    # ---- a prompt ----

    @property
    def comes_back(self) -> bool:
        """True if deferred tokens may be revived later."""
        return self._pruning is not None and self._pruning.compression_interval is not None

    def before_prompt(self, kv: KVCache, ids: Sequence[int]) -> Steps[None]:
        """Revive all tokens before the prefill of another prompt, if pruning says so."""
        if self._pruning is not None and self._pruning.revives_before_prompt:
            yield from self.revive_all(kv, ids)

    # ---- revival ----

    @property
    def compression_interval(self) -> int | None:
        """Tokens of an answer between two compression points that may revive tokens; None = tokens are never
        revived."""
        return self._pruning.compression_interval if self._pruning is not None and self else None

    def revive(self, kv: KVCache, ids: Sequence[int], written: int) -> Steps[None]:
        """Revive the tokens that the pending token attends to, at this point of the answer. The pending token runs in
        the same pass; its KV is not committed."""
        if self._pruning is None or self.compression_interval is None or written % self.compression_interval:
            return
        revival_pass = RevivalPass(self._lm, kv, ids, self, [len(ids) - 1])
        yield from revival_pass.go(self._pruning.bind_revival(self._lm, kv, self))
        revival_pass.store()

    def revive_all(self, kv: KVCache, ids: Sequence[int]) -> Steps[None]:
        """Revive all tokens up to the last layer, oldest first."""
        while some := set(self.positions[:AT_ONCE]):
            revival_pass = RevivalPass(self._lm, kv, ids, self)
            yield from revival_pass.go(partial(self._onward, some))
            revival_pass.store()

    def _onward(
        self, some: set[int], layer: int, live: ActiveRows, pos: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        return pos, [p for p in self.at(layer) if p in some]

    def remove(self, came: set[int]) -> None:
        """Remove revived tokens."""
        for layer, (pos, vectors) in list(self._at.items()):
            stay = [i for i, p in enumerate(pos) if p not in came]
            self._put(layer, [pos[i] for i in stay], vectors[stay])

    def add(self, stopped: Stopped) -> None:
        """Add deferred tokens."""
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
        """Return a snapshot; between passes only."""
        found: dict[str, State] = {}
        for layer, (pos, vectors) in self._at.items():
            found[str(len(found))] = {"layer": layer, "pos": torch.tensor(pos, dtype=torch.int32), "x": vectors}
        return found

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot. Raises SnapshotMismatch."""
        self.clear()
        width = self._lm.model.config.get_text_config().hidden_size
        starts = {span.start for span in spans(self._lm.shapes)[1:]}
        for one in given.parts(self._lm.n_layers):
            pos = one.positions("pos", None).tolist()
            layer = one.number("layer", self._lm.n_layers - 1)
            if layer not in starts or pos != sorted(set(pos)) or not self.depth.keys().isdisjoint(pos):
                raise SnapshotMismatch("no token stops at that layer")
            vectors = one.tensor("x", self._lm.dtype, len(pos), width)
            self._put(layer, pos, vectors.to(self._lm.device, copy=True))

    def usage(self) -> list[Usage]:
        """Return the bytes, by the layer before which the tokens stopped."""
        return [Usage(layer, "behind", len(pos), x.nbytes) for layer, (pos, x) in self._at.items()]
