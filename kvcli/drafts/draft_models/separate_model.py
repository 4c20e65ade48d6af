"""A second model over the same text: what it has read of it, and what it thinks comes next.

Of what it has read, first tokens and the newest stay, as in StreamingLLM (arXiv 2309.17453): drafts gain little from
more, and a pass over few tokens is what makes them cheap (SpecExtend, arXiv 2505.20776). Positions are those of the
text, or closed up where tokens went, so that a model made for short texts meets none beyond its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvcli.drafts.sources.logit_recycling import top
from kvcli.engine.drafting.draft_kv import DraftTreeKV
from kvcli.engine.forward_request import ForwardRequest, Steps
from kvcli.engine.hf.rope import rotaries
from kvcli.engine.rows import Hears, Rows
from kvcli.engine.sequence.commit import commit
from kvcli.kernels.rope import Rotary, rotate, unrotate
from kvcli.kv.recurrent_state import RecurrentStates
from kvcli.kv.slots import Slots, Usage
from kvcli.kv.tiers.dense import Dense

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.stats import Step

CHUNK = 512  # tokens read in one pass
CHECKPOINTS = 4  # of states, where some of its layers keep one
SPARE = 8  # of the newest tokens an eighth goes at once: letting them go copies the others


class SeparateDraftModel:
    """Reads a text in a store of its own. What it made of guesses is stored as far as the text takes them.

    Layers that keep a state know all that was read, tokens that did not stay among it, and none that was passed over.

    A token is covered if it is stored or was passed over. Stored positions are those of the text less `_gap`, from
    `_solid` on without holes.
    """

    def __init__(
        self, lm: LM, working: int = 0, sinks: int = 0, *, sees: int | None = None, closes: bool = False
    ) -> None:
        """`working`: tokens that stay, 0 = all, the first `sinks` of the text among them. `sees`: how many of the
        newest each chunk of a prompt finds, no fewer than stay, 0 = all; None = what would not stay is not read.
        `closes`: positions close up where tokens went; raises BadModel where no fixed table says how its keys turn."""
        self.lm, self._sees = lm, sees
        self._sinks, self._newest = sinks, working - sinks if working else math.inf
        self._turns: Sequence[Rotary | None] | None = rotaries(lm) if closes and working else None
        self._layers = [layer for layer, shape in enumerate(lm.shapes) if shape.shared_from is None]
        self._text: list[int] = []
        self.discard_cache()

    def discard_cache(self) -> None:
        """Nothing is read of the text: what is stored may be torn."""
        self._kv = Dense(self.lm.shapes, self.lm.dtype, self.lm.device)
        self._states = RecurrentStates(self.lm.mixers.like, CHECKPOINTS)
        self._n = self._solid = self._gap = 0
        self._guessed: DraftTreeKV | None = None  # behind the text

    @property
    def name(self) -> str:
        return self.lm.info.id

    @property
    def limit(self) -> int:
        return self.lm.limit

    @property
    def n_uncovered(self) -> int:
        """Tokens of the text that are not covered."""
        return len(self._text) - self._n

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    @property
    def needs(self) -> Hears:
        return ""

    def newest(self, n: int) -> list[int]:
        """The last n of them, or as many as may stay."""
        return self._text[-int(min(n, self._newest)) :]

    @property
    def max_depth(self) -> int:
        """How many guesses have a position that the model was made for, once the text is read."""
        stays = self._sinks + self._newest if self._turns is not None else math.inf
        return self.lm.limit - int(min(len(self._text) - self._gap, stays))

    def usage(self) -> list[Usage]:
        """What it stores, as a tier of its own."""
        return [replace(use, tier="draft") for use in (*self._kv.usage(), *self._states.usage())]

    # ---- what the text is ----

    def start(self, ids: Sequence[int]) -> None:
        """The text is now this one."""
        self._cut(min(shared(self._text, ids), len(ids) - 1))
        self._text = list(ids)

    def extend(self, new: Sequence[int]) -> None:
        """These joined it: guesses that were right have been read."""
        if self._guessed is not None:
            right = self._guessed.path(self._known(new[:-1]))
            self._guessed.commit_path(self._kv, right)
            self._n += len(right)
        self._guessed = None
        self._text += new

    def _cut(self, n: int) -> None:
        """Cover n tokens and no more; none at all, where what stands before them is gone."""
        if n < self._n:
            n = self._states.reaches(n)
            self._n = n if n >= self._solid else 0
            self._kv.crop(self._n and self._n - self._gap)
            self._states.crop(self._n)
            if not self._n:
                self._solid = self._gap = 0
        self._guessed = None

    def bind(self, past: DraftContext | None) -> None:
        """It reads a past of its own."""

    def observe(self, step: Step) -> None:
        """Nothing that `extend` does not say."""

    # ---- passes ----

    def prefill(self) -> Steps[None]:
        """Read the text but for its last token."""
        sees = self._sees
        if sees is None:
            yield from self._pass_over(self._newest)
        most, step = self._newest if sees is None else sees or math.inf, CHUNK
        if self._turns is not None:  # as far as it has positions
            most = min(most, max(self._newest, self.lm.limit // 2))
            step = min(step, self.lm.limit - self._sinks - int(most))
        while self.n_uncovered > 1:
            yield from self._feed(self._text[self._n : min(self._n + step, len(self._text) - 1)])
            self._settle(most)
        self._settle(self._newest)

    def catch_up(self, want: int = 1, most: float = math.inf) -> Steps[list[list[float]]]:
        """Cover the text to its end, by reading `most` of its newest tokens -> the hook output for the last `want`."""
        self._cut(len(self._text) - 1)  # it may be asked again, where the pass that was to check its guesses broke
        yield from self._pass_over(min(most, self._newest))
        while self.n_uncovered > max(CHUNK, want):
            self._make_room(CHUNK)
            yield from self._feed(self._text[self._n : self._n + CHUNK])
        self._make_room(self.n_uncovered)
        self._states.mark()
        return (yield from self._feed(self._text[self._n :], want))

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Steps[list[list[float]]]:
        """The hook output for the rows of guesses behind the text, which has been read."""
        if self._guessed is None:
            states = self._states if self.lm.mixers else None
            self._guessed = DraftTreeKV(self.lm, self._kv, self._n - self._gap, states)
        return (yield from self._guessed.grow(self._known(ids), parents, top))

    def _known(self, ids: Sequence[int]) -> list[int]:
        return [min(i, self.lm.vocab - 1) for i in ids]  # padded tokens of the other model have no row in this one

    def _feed(self, ids: Sequence[int], want: int = 0) -> Steps[list[list[float]]]:
        rows = Rows.chain(self._known(ids), self._n - self._gap)
        n = rows.n_rows
        assert want <= n, "what is asked for was not passed over"
        wanted = range(n - want, n)
        logits_hook = top if want else None
        made = yield ForwardRequest(
            self.lm, rows, self._kv, want=wanted, logits_hook=logits_hook, states=self._states, is_prompt=not want
        )
        commit(self._kv, rows, made, range(n))
        self._n += n
        return [made.hook_output(i) for i in range(want)]

    # ---- what stays ----

    def _pass_over(self, most: float) -> Steps[None]:
        """Leave out what is missing but for the first tokens of the text and `most` of the newest.

        Where those are all that may stay, what was stored before goes, too.
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
        """Of the newest tokens only so many stay that n more may be stored."""
        if self._kv.n_slots(self._layers[0]) + n > self._sinks + self._newest:
            self._settle(max(0, self._newest - max(n, self._newest // SPARE)))

    def _settle(self, newest: float) -> None:
        """Of what is stored the first tokens stay and so many of the newest."""
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
        """Keys behind the first tokens turned to where they now stand, `by` positions before."""
        new = pos.where(pos < self._sinks, pos - by)
        if rotary is None:
            return k, new
        wide = k.to(torch.promote_types(k.dtype, torch.float32))
        return rotate(unrotate(wide, pos, rotary), new, rotary).to(k.dtype), new


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """With how many tokens both begin."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
