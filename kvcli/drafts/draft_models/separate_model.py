"""Separate draft model with a KV cache of the same sequence.

Its KV cache keeps the first and the newest tokens, as in StreamingLLM (arXiv 2309.17453). Drafts gain little from more
tokens, and passes over few tokens are cheap (SpecExtend, arXiv 2505.20776). Positions are those of the sequence, or
contiguous after evictions, so that a model with a short context window gets no position beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvcli.drafts.draft_models.draft_model import DraftModel
from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.drafting.draft_kv import DraftTreeKV
from kvcli.engine.forward_request import ChosenRows, ForwardRequest, ForwardResult, Passes, RanRow, Rows
from kvcli.engine.hf.rope import rotaries
from kvcli.engine.sequence.commit import commit
from kvcli.engine.sequence.state import shared_length
from kvcli.kernels.rope import Rotary, rotate, unrotate
from kvcli.kv.recurrent_state import RecurrentStates
from kvcli.kv.slots import Slots, Usage
from kvcli.kv.tiers.dense import Dense

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.hf.lm import LM
    from kvcli.kv.tiers.draft_buffers import DraftBuffers

CHUNK = 512  # tokens of one prefill pass
CHECKPOINTS = 4  # saved recurrent states, if the model has recurrent layers
SPARE = 8  # an eighth of the newest tokens is evicted at once, because eviction copies the others


class SeparateDraftModel(DraftModel):
    """Draft model with a KV cache of its own. KV of draft tokens is committed when the tokens are accepted.

    Recurrent states include all tokens of its passes, also evicted ones, and no skipped tokens.

    A token is covered if it is stored or was skipped. Stored positions are those of the sequence less `_gap`, without
    holes from `_solid` on.
    """

    def __init__(
        self, lm: LM, working: int = 0, sinks: int = 0, *, sees: int | None = None, closes: bool = False
    ) -> None:
        """`working`: tokens kept, including the first `sinks`; 0 = all. `sees`: newest tokens that each chunk of a
        prompt attends to, at least the kept ones; 0 = all; None = tokens that would be evicted are not prefilled.
        `closes`: positions are contiguous after evictions; raises BadModel if keys cannot be rotated by a fixed
        table."""
        self.lm, self._sees = lm, sees
        self._sinks, self._newest = sinks, working - sinks if working else math.inf
        self._turns: Sequence[Rotary | None] | None = rotaries(lm) if closes and working else None
        self._layers = [layer for layer, shape in enumerate(lm.shapes) if shape.shared_from is None]
        self._buffers: DraftBuffers | None = None
        self._text: list[int] = []
        self.discard_cache()

    def discard_cache(self) -> None:
        """Discard the stored KV, which may be incomplete; no token is covered afterwards."""
        self._kv = Dense(self.lm.shapes, self.lm.dtype, self.lm.device)
        self._states = RecurrentStates(self.lm.recurrent_layers.like, CHECKPOINTS)
        self._n = self._solid = self._gap = 0
        self._guessed: DraftTreeKV | None = None  # draft tokens after the sequence

    @property
    def name(self) -> str:
        return self.lm.info.id

    @property
    def limit(self) -> int:
        return self.lm.limit

    @property
    def n_uncovered(self) -> int:
        """Tokens of the sequence that are not covered."""
        return len(self._text) - self._n

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self._text)

    def newest(self, n: int) -> list[int]:
        """Return the last n tokens, or as many as may be kept."""
        return self._text[-int(min(n, self._newest)) :]

    @property
    def max_depth(self) -> int:
        """Return how many draft tokens have a position in the context window, once the sequence is covered."""
        stays = self._sinks + self._newest if self._turns is not None else math.inf
        return self.lm.limit - int(min(len(self._text) - self._gap, stays))

    def usage(self) -> list[Usage]:
        """Memory of its KV cache and recurrent states, as tier "draft"."""
        return [replace(use, tier="draft") for use in (*self._kv.usage(), *self._states.usage())]

    # ---- the sequence ----

    def start(self, ids: Sequence[int]) -> None:
        """Set the sequence to `ids`."""
        self._cut(min(shared_length(self._text, ids), len(ids) - 1))
        self._text = list(ids)

    def extend(self, new: Sequence[int]) -> None:
        """Append `new` to the sequence, and commit the KV of accepted draft tokens."""
        if self._guessed is not None:
            right = self._guessed.path(self._known(new[:-1]))
            self._guessed.commit_path(self._kv, right)
            self._n += len(right)
        self._guessed = None
        self._text += new

    def _cut(self, n: int) -> None:
        """Cover n tokens and no more, or none if tokens before n were evicted."""
        if n < self._n:
            n = self._states.reaches(n)
            self._n = n if n >= self._solid else 0
            self._kv.crop(self._n and self._n - self._gap)
            self._states.rewind(self._n)
            if not self._n:
                self._solid = self._gap = 0
        self._guessed = None

    # ---- passes ----

    def prefill(self) -> Passes[None]:
        """Prefill the sequence except for its last token."""
        sees = self._sees
        if sees is None:
            yield from self._pass_over(self._newest)
        most, step = self._newest if sees is None else sees or math.inf, CHUNK
        if self._turns is not None:  # contiguous positions: stay inside the model's context window
            most = min(most, max(self._newest, self.lm.limit // 2))
            step = min(step, self.lm.limit - self._sinks - int(most))
        while self.n_uncovered > 1:
            yield from self._feed(self._text[self._n : min(self._n + step, len(self._text) - 1)])
            self._settle(most)
        self._settle(self._newest)

    def catch_up(self, want: int = 1, most: float = math.inf) -> Passes[list[list[float]]]:
        """Cover the sequence to its end by a prefill of at most `most` of its newest tokens -> the hook output of the
        last `want` rows."""
        ((result, _),) = yield from self.draft_ahead((), want, most)
        return [result.hook_output(i) for i in range(want)]

    def draft_ahead(self, rows: ChosenRows, want: int = 1, most: float = math.inf) -> Passes[Sequence[RanRow]]:
        """Cover the sequence as `catch_up`, and run these rows while passes are captured."""
        self._cut(len(self._text) - 1)  # `catch_up` is called again after the verification pass failed
        yield from self._pass_over(min(most, self._newest))
        while self.n_uncovered > max(CHUNK, want):
            self._make_room(CHUNK)
            yield from self._feed(self._text[self._n : self._n + CHUNK])
        self._make_room(self.n_uncovered)
        self._states.mark()
        result = yield from self._feed(self._text[self._n :], want)
        return (yield from self._tree().grow_by_choices(result, rows, top))

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Passes[list[list[float]]]:
        """Return the hook output of draft rows after the sequence, which must be covered."""
        return (yield from self._tree().grow(self._known(ids), parents, top))

    def _tree(self) -> DraftTreeKV:
        """Return the tree of draft tokens after the sequence."""
        if self._guessed is None:
            states = self._states if self.lm.recurrent_layers else None
            self._guessed = DraftTreeKV(self.lm, self._kv, self._n - self._gap, states, self._buffers)
            self._buffers = self._guessed.buffers
        return self._guessed

    def _known(self, ids: Sequence[int]) -> list[int]:
        # padding ids of the other vocabulary have no embedding in this model
        return [min(i, self.lm.vocab - 1) for i in ids]

    def _feed(self, ids: Sequence[int], want: int = 0) -> Passes[ForwardResult]:
        rows = Rows.chain(self._known(ids), self._n - self._gap)
        n = rows.n_rows
        assert want <= n, "hook outputs of rows outside the pass"
        wanted = range(n - want, n)
        logits_hook = top if want else None
        result = yield ForwardRequest(
            self.lm, rows, self._kv, want=wanted, logits_hook=logits_hook, states=self._states, is_prompt=not want,
            grows=int(max(0, min(self._sinks + self._newest, self.lm.limit) - self._kv.n_slots(self._layers[0]))),
        )  # fmt: skip
        commit(self._kv, rows, result, range(n))
        self._n += n
        return result

    # ---- the tokens that are kept ----

    def _pass_over(self, most: float) -> Passes[None]:
        """Skip the uncovered tokens except for the first tokens of the sequence and `most` of the newest.

        If those are all that may be kept, earlier slots are evicted, too.
        """
        if self.n_uncovered <= most:
            return
        if self._n < self._sinks:
            yield from self._feed(self._text[self._n : min(self._sinks, len(self._text) - int(most))])
        if most >= self._newest and self._n > self._sinks:
            self._kv.crop(self._sinks)
            self._n, self._gap = self._sinks, 0
        hole = self.n_uncovered - int(most)
        self._n += hole
        self._states.skip_tokens(self._n)
        self._solid = self._n
        self._gap += hole if self._turns is not None else 0

    def _make_room(self, n: int) -> None:
        """Evict the oldest tokens after the first ones if n more would exceed the limit."""
        if self._kv.n_slots(self._layers[0]) + n > self._sinks + self._newest:
            self._settle(max(0, self._newest - max(n, self._newest // SPARE)))

    def _settle(self, newest: float) -> None:
        """Evict all stored tokens except for the first ones and `newest` of the newest."""
        stored = self._kv.n_slots(self._layers[0])
        if (gone := stored - self._sinks - newest) <= 0:
            return
        at = torch.tensor([*range(self._sinks), *range(stored - int(newest), stored)], device=self.lm.device)
        for layer in self._layers:
            s = self._kv.slots(layer)
            k, v, pos = s.k[:, at], s.v[:, at], s.pos[:, at]
            if self._turns is not None:
                k, pos = self._moved(k, pos, self._turns[layer], int(gone))
            self._kv.put(layer, Slots(k, v, pos))
        self._solid = max(self._solid, self._n - int(newest))
        self._gap += int(gone) if self._turns is not None else 0

    def _moved(self, k: Tensor, pos: Tensor, rotary: Rotary | None, by: int) -> tuple[Tensor, Tensor]:
        """Return the keys after the first tokens rotated to positions lower by `by`, and the new positions."""
        new = pos.where(pos < self._sinks, pos - by)
        if rotary is None:
            return k, new
        wide = k.to(torch.promote_types(k.dtype, torch.float32))
        return rotate(unrotate(wide, pos, rotary), new, rotary).to(k.dtype), new
