"""MTP head: a draft head that reads hidden states of the target model to draft after the pending token.

For each accepted token the head gets the hidden state that predicted it (`Step.hidden`) and stores one layer's KV.
Draft tokens continue from the head's own hidden states, as in EAGLE (arXiv 2401.15077). Hidden states that were not
recorded, of a prompt or of passes without drafts, leave holes. Those of the newest tokens are recomputed without
changing the KV cache. If the model has recurrent layers they cannot be recomputed, and the head drafts nothing until
one more step is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.drafts.draft_models.hidden_state_head import HiddenStateHead
from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.drafting.draft_kv import DraftTreeKV
from kvcli.engine.forward_request import LAST_STATE, ForwardRequest, Passes, Rows
from kvcli.engine.sequence.commit import commit
from kvcli.engine.sequence.state import shared_length
from kvcli.kv.tiers.dense import Dense

if TYPE_CHECKING:
    from kvcli.engine.stats import Step
    from kvcli.kv.slots import Usage
    from kvcli.kv.tiers.draft_buffers import DraftBuffers

MOST = 256  # hidden states waiting for the head's next pass; older ones become a hole


class MtpHead(HiddenStateHead):
    """Draft head with a KV cache. Its row at position p takes token p and the hidden state of the token before it."""

    def discard_cache(self) -> None:
        """Discard the stored KV, which may be incomplete, and all hidden states."""
        self._kv = Dense(self._head.shapes, self._head.dtype, self._head.device)
        self._buffers: DraftBuffers | None = None
        self._end = 0  # no position is stored from this one on
        self._at: list[int] = []  # positions waiting for the head's pass, rising
        self._states = torch.empty(0)  # [len(at), E], of the tokens before these, in the model's dtype
        self._last = self._states  # [1, E], of the last row in the cache
        self._context = None
        self._drop()

    def _drop(self) -> None:
        """Discard the running draft."""
        self._ahead: DraftTreeKV | None = None
        self._grown = torch.empty(0)  # [1 + n, E]: hidden states of the head, of the sequence's end and of draft tokens

    @property
    def n_uncovered(self) -> int:
        """Number of tokens after those that are stored; `catch_up` leaves out those without a hidden state."""
        return max(1, self.length - self._end)

    def usage(self) -> list[Usage]:
        """Memory of the head's KV cache, as tier "draft"."""
        return [replace(use, tier="draft") for use in self._kv.usage()]

    def newest(self, n: int) -> list[int]:
        """Return the last n tokens, or as many as have a hidden state waiting; at least the pending token."""
        end = self.length - 1
        waiting = sum(at == end - i for i, at in enumerate(reversed(self._at[-n:])))
        return self._text[-max(1, waiting) :]

    # ---- the sequence ----

    def start(self, ids: Sequence[int]) -> None:
        """Set the sequence to `ids`."""
        n = min(shared_length(self._text, ids), len(ids) - 1)
        if n < self._end:
            self._kv.crop(n)
            self._end = n
        kept = [at for at in self._at if at < n]
        self._at, self._states = kept, self._states[: len(kept)]
        self._text = list(ids)
        self._drop()

    def extend(self, new: Sequence[int]) -> None:
        """Append `new` to the sequence."""
        self._text += new
        self._context = None  # the cache is no longer that of the sequence
        self._drop()

    def observe(self, step: Step) -> None:
        """Queue the hidden states that predicted the accepted tokens."""
        if step.hidden is not None:
            path = torch.tensor(step.path, device=step.hidden.device)
            self._wait([step.rows.pos[row] + 1 for row in step.path], step.hidden.index_select(0, path))

    def _wait(self, at: Sequence[int], states: Tensor) -> None:
        """Queue hidden states of positions after all that are stored or queued."""
        self._at = [*self._at, *at][-MOST:]
        self._states = torch.cat([self._states.to(states), states])[-MOST:] if len(self._states) else states

    # ---- passes ----

    def catch_up(self, want: int = 1, most: float = math.inf) -> Passes[list[list[float]]]:
        """Return the hook output of the last `want` rows; empty if the hidden state before the last is unknown."""
        self._drop()
        if self._end == self.length:  # called again after the verification pass failed
            self._kv.crop(self.length - 1)
            self._end, self._at, self._states = self.length - 1, [self.length - 1], self._last
        elif not self._at or self._at[-1] < self.length - 1:
            if self._lm.recurrent_layers:
                return []
            yield from self._fill_up()
        n = int(min(most, MOST))
        at, states = self._at[-n:], self._states[-n:]
        rows = Rows([self._text[p] for p in at], at, tree_mask=None, tree=len(at), parent=())
        result = yield ForwardRequest(
            self._head, rows, self._kv, want=range(len(at))[-want:], logits_hook=top, hidden=self._given(states),
            record_hidden_states=LAST_STATE, grows=self.limit - at[0],
        )  # fmt: skip
        assert result.hidden is not None
        commit(self._kv, rows, result, range(len(at)))
        self._end, self._last, self._grown = at[-1] + 1, states[-1:], result.hidden[-1:].clone()
        self._at, self._states = [], states[:0]
        self._ahead = DraftTreeKV(self._head, self._kv, self.length, buffers=self._buffers)
        self._buffers = self._ahead.buffers
        return [result.hook_output(i) for i in range(want)]

    def _given(self, states: Tensor) -> Tensor:
        """Return what the head's rows get of these hidden states."""
        return states

    def _fill_up(self) -> Passes[None]:
        """Queue the hidden states of the newest tokens, computed again."""
        end = self.length - 1
        if not end:  # the first token has no token before it
            width = len(self.needs.states) * self._lm.model.config.get_text_config().hidden_size
            self._wait([0], torch.zeros(1, width, dtype=self._lm.dtype))
            return
        first, states = yield from self._hear_again()
        known = max([self._end, *(at + 1 for at in self._at)])
        new = range(max(first + 1, known), end + 1)
        self._wait(new, states[-len(new) :].clone())

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Passes[list[list[float]]]:
        """Return the hook output of the next draft rows, each with its parent's hidden state."""
        assert self._ahead is not None, "`continue_from` runs before `catch_up`"
        states = self._grown[[parent + 1 for parent in parents]]
        result = yield from self._ahead.add(ids, parents, logits_hook=top, hidden=states, shows=LAST_STATE)
        assert result.hidden is not None
        self._grown = torch.cat([self._grown, result.hidden])
        return [result.hook_output(i) for i in range(len(ids))]
