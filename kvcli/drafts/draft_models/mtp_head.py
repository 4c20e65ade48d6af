"""A head that reads hidden states of the model that writes, and says by them what comes behind its next token.

Of each accepted token it is handed the state that led to it (`Step.hidden`), and stores one layer's keys and values of
it. Guesses go on from its own states, as in EAGLE (arXiv 2401.15077). States that nobody heard, of a prompt or of
passes without drafts, leave holes; those of the newest tokens are made again, beside the store. Where layers keep a
state of the text they cannot be, and the head says nothing until it has heard one more step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.drafts.draft_models.hidden_state_head import HiddenStateHead
from kvcli.drafts.draft_models.layer_skip import SEEN, newest_before
from kvcli.drafts.draft_models.separate_model import shared
from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.drafting.draft_kv import DraftTreeKV
from kvcli.engine.forward_request import ForwardRequest, Steps
from kvcli.engine.rows import Rows
from kvcli.engine.sequence.commit import commit
from kvcli.kv.tiers.dense import Dense

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.stats import Step
    from kvcli.kv.slots import Usage

MOST = 256  # states that wait to be read; older ones become a hole


class MtpHead(HiddenStateHead):
    """Follows a text by what it hears of it. A row at position p is token p and the state of the one before it."""

    def discard_cache(self) -> None:
        """Nothing is read of the text: what is stored may be torn."""
        self._kv = Dense(self._head.shapes, self._head.dtype, self._head.device)
        self._end = 0  # no position from here on is stored
        self._at: list[int] = []  # positions that wait to be read, rising
        self._states = torch.empty(0)  # [len(at), E], of the tokens before these, in the numbers of the model
        self._last = self._states  # [1, E], of the last row that was read
        self._past = None
        self._drop()

    def _drop(self) -> None:
        """The draft under way."""
        self._ahead: DraftTreeKV | None = None
        self._grown = torch.empty(0)  # [1 + n, E]: its own states, of the text's end and of guesses behind it

    @property
    def n_uncovered(self) -> int:
        """Those that wait."""
        return max(1, len(self._at))

    def usage(self) -> list[Usage]:
        """What it stores, as a tier of its own."""
        return [replace(use, tier="draft") for use in self._kv.usage()]

    # ---- what the text is ----

    def start(self, ids: Sequence[int]) -> None:
        """The text is now this one."""
        n = min(shared(self._text, ids), len(ids) - 1)
        if n < self._end:
            self._kv.crop(n)
            self._end = n
        kept = [at for at in self._at if at < n]
        self._at, self._states = kept, self._states[: len(kept)]
        self._text = list(ids)
        self._drop()

    def extend(self, new: Sequence[int]) -> None:
        """These joined it."""
        self._text += new
        self._past = None  # it has changed
        self._drop()

    def observe(self, step: Step) -> None:
        """The states that led to the tokens which are about to join the text."""
        if step.hidden is not None:
            path = torch.tensor(step.path, device=step.hidden.device)
            self._wait([step.rows.pos[row] + 1 for row in step.path], step.hidden.index_select(0, path))

    def _wait(self, at: Sequence[int], states: Tensor) -> None:
        """For positions behind all that are stored or wait."""
        self._at = [*self._at, *at][-MOST:]
        self._states = torch.cat([self._states.to(states), states])[-MOST:] if len(self._states) else states

    # ---- passes ----

    def prefill(self) -> Steps[None]:
        """States of a prompt are not kept."""
        yield from ()

    def catch_up(self, want: int = 1, most: float = math.inf) -> Steps[list[list[float]]]:
        """The hook output for the pending token's row; nothing where what led to it is not known."""
        assert want == 1, "nothing else is passed over"
        self._drop()
        if self._end == self.length:  # it may be asked again, where the pass that was to check its guesses broke
            self._kv.crop(self.length - 1)
            self._end, self._at, self._states = self.length - 1, [self.length - 1], self._last
        elif not self._at or self._at[-1] < self.length - 1:
            if self._lm.mixers:
                return []
            yield from self._hear_again()
        at, states = self._at, self._states
        rows = Rows([self._text[p] for p in at], at, sees=None, tree=len(at), parent=())
        made = yield ForwardRequest(
            self._head, rows, self._kv, want=[len(at) - 1], logits_hook=top, hidden=states, record_hidden_states=True
        )
        assert made.hidden is not None
        commit(self._kv, rows, made, range(len(at)))
        self._end, self._last, self._grown = at[-1] + 1, states[-1:], made.hidden.clone()
        self._at, self._states = [], states[:0]
        self._ahead = DraftTreeKV(self._head, self._kv, self.length)
        return [made.hook_output(0)]

    def _hear_again(self) -> Steps[None]:
        """Of its newest tokens."""
        assert self._past is not None, "there is no past to read"
        end = self.length - 1
        if not end:  # before the first token there is none
            self._wait([0], torch.zeros(1, self._lm.model.config.get_text_config().hidden_size, dtype=self._lm.dtype))
            return
        first, states = yield from recompute_hidden_states(self._lm, self._past, self._text)
        known = max([self._end, *(at + 1 for at in self._at)])
        new = range(max(first + 1, known), end + 1)
        self._wait(new, states[-len(new) :].clone())

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Steps[list[list[float]]]:
        """The hook output for the rows of guesses behind it, each with its parent's state."""
        assert self._ahead is not None, "read first"
        states = self._grown[[parent + 1 for parent in parents]]
        made = yield from self._ahead.add(ids, parents, logits_hook=top, hidden=states, shows=True)
        assert made.hidden is not None
        self._grown = torch.cat([self._grown, made.hidden])
        return [made.hook_output(i) for i in range(len(ids))]


def recompute_hidden_states(lm: LM, past: DraftContext, text: Sequence[int]) -> Steps[tuple[int, Tensor]]:
    """States [n, E] of the newest tokens but for the pending one, and the position of the first: by a pass of the model
    that writes, with part of their past."""
    end = len(text) - 1
    first = max(0, end - SEEN)
    before = newest_before(lm, past.cache, first, range(lm.n_layers))
    rows = Rows.chain(text[first:end], first)
    made = yield ForwardRequest(lm, rows, before, want=range(rows.n_rows), record_hidden_states=True)
    assert made.hidden is not None
    return first, made.hidden
