"""Assistant of Gemma 4: a draft model that reads the target model's KV cache to draft after the pending token.

It stores no KV, so it needs no prefill, and it works with every KV cache: quantized, windowed, evicted or offloaded.
All of its rows are at the position of the newest token, whose own slot is not stored yet, and no row attends to
another. Draft tokens continue from hidden states alone (`SinglePositionMultiTokenCandidateGenerator` in transformers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcli.drafts.draft_models.hidden_state_head import HiddenStateHead
from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.drafting.gemma4_assistant import kv_source_layers
from kvcli.engine.forward_request import LAST_STATE, ForwardRequest, Passes, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.stats import Step
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, KVCache
from kvcli.kv.tiers.device_tables import DeviceCache
from kvcli.kv.views.borrowing import BorrowingReader

_WIDER = 2  # tokens; the assistant's window is inclusive and counted from the newest slot, one before its rows


class BorrowedCache(BorrowingReader):
    """KV cache of the target model as read by another model: each layer reads one target layer, and no new KV."""

    def __init__(self, kv: KVCache, layers: Sequence[int], rows: int) -> None:
        """`rows`: rows of the pass over it."""
        self._kv, self._layers, self._rows, self.dtype = kv, layers, rows, kv.dtype

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the device tables of the target layers, without new KV."""
        tables = self._kv.device_tables(0, more)
        layers = [tables.layers[layer] for layer in self._layers if tables.layers]
        below = [tables.below[layer] for layer in self._layers if tables.below]
        sees = [()] * self._rows
        return replace(tables, layers=layers, below=below, owners=(), sees=sees, wider=_WIDER)

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over the target layer that this layer reads."""
        window = None if params.window is None else params.window + _WIDER
        return self._kv.attend(self._layers[layer], q, replace(params, window=window, is_draft=True), pos)


class AssistantHead(HiddenStateHead):
    """Draft head of an assistant; it starts from the hidden state that predicted the newest token."""

    n_uncovered = 1  # one row attends to the cache

    def __init__(self, lm: LM, head: LM) -> None:
        super().__init__(lm, head)
        self._layers = kv_source_layers(lm, head)

    def discard_cache(self) -> None:
        """Discard the hidden state."""
        self._at, self._state = 0, torch.empty(0)  # [1, E]: hidden state of the token before this position
        self._grown = self._state  # [1 + n, E]: that state, then those of draft tokens

    # ---- the sequence ----

    def start(self, ids: Sequence[int]) -> None:
        """Set the sequence to `ids`."""
        if self._text != list(ids):
            self.discard_cache()
        self._text = list(ids)

    def extend(self, new: Sequence[int]) -> None:
        """Append `new` to the sequence."""
        self._text += new

    def observe(self, step: Step) -> None:
        """Keep the hidden state that predicted the newest of the accepted tokens."""
        if step.hidden is not None and step.path:
            row = step.path[-1]
            self._at, self._state = step.rows.pos[row] + 1, step.hidden[row : row + 1].clone()

    # ---- passes ----

    def catch_up(self, want: int = 1, most: float = math.inf) -> Passes[list[list[float]]]:
        """Return the hook output of the pending token's row; empty if no token comes before it."""
        assert want == 1, "more than one hook output is wanted"
        end = self.length - 1
        if not end:
            return []
        if self._at != end:
            _, states = yield from self._hear_again()
            self._at, self._state = end, states[-1:]
        result = yield from self._pass(self._text[-1:], self._state)
        self._grown = result[1]
        return result[0]

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Passes[list[list[float]]]:
        """Return the hook output of the next draft rows, each with its parent's hidden state."""
        found, states = yield from self._pass(ids, self._grown[[parent + 1 for parent in parents]])
        self._grown = torch.cat([self._grown, states])
        return found

    def _pass(self, ids: Sequence[int], states: Tensor) -> Passes[tuple[list[list[float]], Tensor]]:
        """Return the hook output of tokens with the hidden states [N, E] before them, and the new hidden states."""
        assert self._context is not None, "no KV cache is bound"
        n = len(ids)
        rows = Rows(ids, [self.length - 1] * n, tree_mask=None, tree=n, parent=())
        of = self._head, rows, BorrowedCache(self._context.cache, self._layers, n)
        result = yield ForwardRequest(
            *of, want=range(n), logits_hook=top, hidden=states, record_hidden_states=LAST_STATE
        )
        assert result.hidden is not None
        return [result.hook_output(i) for i in range(n)], result.hidden.clone()
