"""An assistant of Gemma 4: it reads what the model that writes has stored, and says by it what comes behind its next
token.

It stores nothing, so nothing of a text has to be read for it: packed, windowed, evicted, in host memory or not, what
its rows find is what the store has. All of them stand where the newest token does, whose own slot is not stored yet,
and none sees another: guesses go on from states alone (`SinglePositionMultiTokenCandidateGenerator` in transformers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.drafts.draft_models.hidden_state_head import HiddenStateHead
from kvcli.drafts.draft_models.mtp_head import recompute_hidden_states
from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.drafting.gemma4_assistant import kv_source_layers
from kvcli.engine.forward_request import ForwardRequest, Steps
from kvcli.engine.rows import Rows
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.stats import Step
    from kvcli.kernels.attend_invariant import NewRows
    from kvcli.kernels.merge_attention import PartialAttention
    from kvcli.kv.slots import AttentionParams, KVCache, Usage

_WIDER = 2  # tokens: a window is inclusive there, and counted from the newest slot, which is one before the rows


class BorrowedCache:
    """A store as layers of another model read it: each reads one of the model that writes, and its own rows not."""

    def __init__(self, kv: KVCache, layers: Sequence[int]) -> None:
        self._kv, self._layers, self.dtype = kv, layers, kv.dtype

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, N, D] at positions pos [N] -> parts over what is stored in the layer that stands for this one."""
        window = None if sight.window is None else sight.window + _WIDER
        return self._kv.attend(self._layers[layer], q, replace(sight, window=window, is_guess=True), pos)

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Why it needs the host."""
        return DeviceCache(why_not="an assistant reads the store of another model")

    def usage(self) -> list[Usage]:
        """Nothing: it is the store's."""
        return []


class AssistantHead(HiddenStateHead):
    """Follows a text by the state that led to its newest token."""

    n_uncovered = 1  # one row reads the text

    def __init__(self, lm: LM, head: LM) -> None:
        super().__init__(lm, head)
        self._layers = kv_source_layers(lm, head)

    def discard_cache(self) -> None:
        """The state is not known."""
        self._at, self._state = 0, torch.empty(0)  # [1, E]: of the token before the one at this position
        self._grown = self._state  # [1 + n, E]: that, then its own, of guesses

    def usage(self) -> list[Usage]:
        """It stores nothing."""
        return []

    # ---- what the text is ----

    def start(self, ids: Sequence[int]) -> None:
        """The text is now this one."""
        if self._text != list(ids):
            self.discard_cache()
        self._text = list(ids)

    def extend(self, new: Sequence[int]) -> None:
        """These joined it."""
        self._text += new

    def observe(self, step: Step) -> None:
        """The state that led to the newest of the tokens which are about to join the text."""
        if step.hidden is not None and step.path:
            row = step.path[-1]
            self._at, self._state = step.rows.pos[row] + 1, step.hidden[row : row + 1].clone()

    # ---- passes ----

    def prefill(self) -> Steps[None]:
        """Of a prompt it reads nothing."""
        yield from ()

    def catch_up(self, want: int = 1, most: float = math.inf) -> Steps[list[list[float]]]:
        """The hook output for the pending token's row; nothing where no token comes before it."""
        assert want == 1, "nothing else is passed over"
        end = self.length - 1
        if not end:
            return []
        if self._at != end:
            assert self._past is not None, "there is no past to read"
            _, states = yield from recompute_hidden_states(self._lm, self._past, self._text)
            self._at, self._state = end, states[-1:]
        made = yield from self._pass(self._text[-1:], self._state)
        self._grown = made[1]
        return made[0]

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Steps[list[list[float]]]:
        """The hook output for the rows of guesses behind it, each with its parent's state."""
        found, states = yield from self._pass(ids, self._grown[[parent + 1 for parent in parents]])
        self._grown = torch.cat([self._grown, states])
        return found

    def _pass(self, ids: Sequence[int], states: Tensor) -> Steps[tuple[list[list[float]], Tensor]]:
        """The hook output for tokens with these states [N, E] before them, and the states that follow."""
        assert self._past is not None, "there is no past to read"
        n = len(ids)
        rows = Rows(ids, [self.length - 1] * n, sees=None, tree=n, parent=())
        of = self._head, rows, BorrowedCache(self._past.cache, self._layers)
        made = yield ForwardRequest(*of, want=range(n), logits_hook=top, hidden=states, record_hidden_states=True)
        assert made.hidden is not None
        return [made.hook_output(i) for i in range(n)], made.hidden.clone()
