"""Pruned prefill: layer-wise prefill of prompts, in which fewer tokens run through the upper layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcli.engine.forward_request import Rows, await_passes
from kvcli.engine.prefill.layer_by_layer import LayerByLayer
from kvcli.engine.prefill.layerwise import LayerwisePrefill
from kvcli.engine.sequence.state import kinds_of

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.slots import Loss
    from kvcli.kv.snapshot import SnapshotReader, State
    from kvcli.methods.prune.protected_tokens import PruneSettings


class PrunedPrefill(LayerByLayer):
    """Pruned prefill of the prompts of a sequence. Deferred tokens are dropped."""

    def __init__(self, pair: ModelPair, pruning: PruneSettings) -> None:
        """Raises BadModel if rows cannot be stopped between the layers, or if no layer can score tokens."""
        pruning.describe(pair.target)
        super().__init__(pair.target)
        self._pair, self._pruning = pair, pruning
        self.has_deferred = False  # a pruner ever deferred a token, even one that was revived later

    def reaches(self, n: int, of: int) -> int:
        """Return n, or 0 if tokens before n may lack KV."""
        return super().reaches(n, of) if n == of or not self.has_deferred else 0

    def rewind(self, n: int, of: int) -> None:
        """Abandon a prompt under way. A sequence that begins anew lacks no token."""
        super().rewind(n, of)
        self.has_deferred = self.has_deferred and n > 0

    def begin(self, text: GenerationSession, end: int) -> Passes[LayerwisePrefill]:
        """Return the prefill of the next tokens that are pruned together, up to `end`."""
        start, pruning = text.committed, self._pruning
        n = pruning.group_size(end - start, text.chunk_rows)
        rows = Rows.chain(text.ids[start : start + n], start)
        recorded = text.query_recorder.rows_to_record_in_chunk(start, n)
        query_rows, guard = sorted({*recorded, *range(max(0, n - pruning.n_scoring_rows), n)}), pruning.guard
        kinds = kinds_of(text.ids[: start + n], text.kinds, text.kind_spans if guard.kinds else ())
        covered = guard.covers(torch.arange(start, start + n), kinds).nonzero().flatten().tolist()
        pruner = yield from await_passes(pruning.bind(self._pair, text, rows, {*query_rows, *covered}))
        recorded, part = recorded if pruner is None else query_rows, text.chunk_rows
        return LayerwisePrefill(self._lm, text.cache, rows, part, recorded, pruner, may_revive=self.may_revive)

    def finish(self, text: GenerationSession, prompt: LayerwisePrefill) -> None:
        """Note that tokens were deferred."""
        super().finish(text, prompt)
        if prompt.pruner is not None:
            text.stored_kv.is_whole, self.has_deferred = False, True

    def loss(self, n: int) -> Loss | None:
        """Return "forgotten" if a token was deferred."""
        return "forgotten" if self.has_deferred else None

    def snapshot(self) -> State:
        """Return whether a token was deferred."""
        return {"has_deferred": self.has_deferred}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot. Raises SnapshotMismatch."""
        self.has_deferred = bool(given.number("has_deferred", 1))
