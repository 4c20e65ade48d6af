"""The prompt and the answer apart: each has a budget of its own (SCOPE, arXiv 2412.13649).

A prompt is compressed once, when it has been read (or after each of its chunks, which bounds memory while reading), and
then left alone. What is generated later has its own places, filled anew at each boundary: the newest tokens and, of the
others, those that the scorer likes best. A later prompt of a chat is compressed with what came since the one before.

Scores come from a scorer, places from an allocation. Protected slots count within the budget and always stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kinds import SYSTEM
from kvcli.policies import budgets, units
from kvcli.policies.allocs import Ask
from kvcli.policies.base import Guard, Plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcli.kv.slots import Slots
    from kvcli.model import LM
    from kvcli.policies.allocs import Alloc
    from kvcli.policies.base import Moment
    from kvcli.policies.scorers import Scorer
    from kvcli.policies.topk import TopK


@dataclass(frozen=True, slots=True)
class _Round:
    """Who competes at a boundary, and for how much."""

    first: int  # slots from this position on
    ask: Ask
    is_prompt: bool


class Phases(Plain):
    """What a scorer likes best, within the budgets of `settings`."""

    def __init__(self, settings: TopK, scorer: Scorer, alloc: Alloc) -> None:
        kinds = frozenset({SYSTEM}) if settings.protect else frozenset()
        self.guard = Guard(settings.sinks, settings.guard, kinds)
        self.recent = scorer.recent
        self.lasting = scorer.lasting and settings.keep_new > 0
        self.looks = alloc.looks
        self._settings, self._scorer, self._alloc = settings, scorer, alloc
        self._done: dict[int, int] = {}  # layer -> tokens of the prompts that were compressed
        self._forgot: set[int] = set()  # layers that lack something of this text

    def meet(self, lm: LM) -> None:
        """Raises BadModel for a model whose slots the scorer cannot judge."""
        self._scorer.meet(lm)

    def probes(self, n: int) -> Sequence[int]:
        """Those of the scorer."""
        return self._scorer.probes(n)

    def start(self) -> None:
        """No prompt was read yet."""
        self._done, self._forgot = {}, set()
        self._scorer.start()

    def rereads(self, n: int) -> Sequence[tuple[int, int]]:
        """What the scorer wants of the prompt that came last."""
        return self._scorer.rereads(min(self._done.values(), default=0), n)

    def reread(self, s: Slots, fresh: Slots, at: Moment) -> None:
        """For the scorer; a sliding layer keeps itself."""
        if at.window is None:
            self._scorer.reread(s, fresh, at)

    def look(self, s: Slots, at: Moment) -> None:
        """For budgets that are shared by all layers."""
        now = self._round(s, at)
        if at.window is not None or now is None or not now.is_prompt:
            return
        self._scorer.hear(s, at)
        score = self._score(s, at, now) if self._alloc.wants_scores else None
        self._alloc.see(at.layer, at.n_layers, score, s.pos, now.ask)

    def keep(self, s: Slots, at: Moment) -> Tensor:
        """All of a sliding layer; else what competes now and wins, and all that does not compete."""
        held = s.pos >= 0
        if at.window is not None:
            return held
        self._scorer.hear(s, at)
        now = self._round(s, at)
        if now is None:
            return held
        if not now.is_prompt:
            chosen = budgets.uniform(self._score(s, at, now), s.pos, now.ask.each)
        elif self._alloc.wants_scores:
            chosen = self._alloc.choose(at.layer, None, s.pos, now.ask)
        else:
            chosen = self._alloc.choose(at.layer, self._score(s, at, now), s.pos, now.ask)
        mask = held & (chosen | at.protected | (s.pos < now.first))
        if not torch.equal(mask, held):
            self._forgot.add(at.layer)
        # while nothing was forgotten, a text may be taken back and go on in another way: then all of it competes again
        if at.phase == "read" and at.layer in self._forgot:
            self._done[at.layer] = at.n_prompt
        return mask

    def _round(self, s: Slots, at: Moment) -> _Round | None:
        """None: nobody competes now."""
        own = self._settings
        if at.phase == "answering":
            first, each, most, is_prompt = at.n_prompt, own.keep_new, own.keep_new, False
        elif at.phase == "reading" and not own.per_chunk:
            return None
        elif own.budget:  # of all prompts together
            first, each, most, is_prompt = 0, own.budget, at.n_prompt, True
        else:
            first = self._done.get(at.layer, 0)
            most, is_prompt = at.n_prompt - first, True
            each = own.share(most)
        if each < 1 or most < 1:
            return None
        bound = at.protected & (s.pos >= first)
        return _Round(first, Ask(each, most, int(bound.sum(1).max()) if s.n_slots else 0), is_prompt)

    def _score(self, s: Slots, at: Moment, now: _Round) -> Tensor:
        """[K, S]: -inf for those who do not compete, +inf for those who need not."""
        competes = s.pos >= max(0, now.first)
        score = self._scorer(s, at)
        score = units.chunked(score, s.pos, self._settings.unit, competes & ~at.protected)
        score = score.masked_fill(at.protected, torch.inf)
        return score.masked_fill(~competes, -torch.inf)
