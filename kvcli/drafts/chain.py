"""What a second model says comes next, token by token, as far as another pass of it pays.

Its guesses are ranked with the noise that the sampler will add (coupled sampling, Daliri et al., arXiv 2408.07978). A
guess is trusted by how far it leads the next one, at the rate at which such guesses came true lately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from statistics import median_low
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvcli.drafts.odds import Odds
from kvcli.drafts.successors import NAMES, START, cell, ranked
from kvcli.drafts.tree import Offer
from kvcli.kv.shortage import lacking

if TYPE_CHECKING:
    from kvcli.drafts.sibling import Sibling
    from kvcli.engine.feed import Asks
    from kvcli.engine.report import Accepted
    from kvcli.engine.sample import Sampler

_LOOK = 64  # tokens of a look
_SHARE = 0.005  # of the time of plain decoding, spent on looks
_FEW = 4  # rows of a pass that counts as one of drafting
_START_MEAN = 0.6  # share of first choices that come true, before any is known

Pays = Callable[[Sequence[float]], bool]  # chances of the guesses so far -> is another one worth its pass?


class Chain:
    """A source that asks for passes: `ahead` comes before the tree is grown.

    What it would have said of tokens that came without it is found out now and then (a look): one pass over the newest
    of them, in which every row is a guess. So drafting goes on when it would pay, and is not tried to find that out.
    """

    name = "model"

    def __init__(
        self, sibling: Sibling, *, depth: int, sees: int | None, vocab: int, share: float, ends: Collection[int] = ()
    ) -> None:
        """`depth`: guesses in a row, at most; `sees`: of a prompt, as of the sibling's `study`; `vocab`: of the model
        that writes; `share`: what a pass takes of one of that model's, until it is measured."""
        self.sampler: Sampler | None = None  # how tokens will be drawn; None = greedily
        self.sibling = sibling
        self.spent = 0.0  # seconds of passes before the step under way
        self.why = ""  # why it says nothing, in words
        self.depth, self._sees, self._vocab, self._share, self._ends = depth, sees, vocab, share, frozenset(ends)
        self._seconds: deque[float] = deque(maxlen=9)  # of a pass of few rows
        self._look, self._waited = 0.0, 0  # seconds of the last one, and passes since it was asked anything
        self._places: list[tuple[list[int], list[float]]] = []  # choices, the best first, and their scores
        self._seen: set[int] | None = None  # tokens of the text, where the sampler punishes those
        self._odds, self._all = Odds(START, NAMES), Odds(((_START_MEAN,),), ("all",))

    @property
    def mean(self) -> float:
        """How often first choices came true lately."""
        return self._all.chance(0, 0)

    def cost(self, plain: float) -> float:
        """One of its passes in plain ones, which take `plain` seconds."""
        return median_low(self._seconds) / plain if plain and len(self._seconds) > 1 else self._share

    # ---- the text ----

    def start(self, ids: Sequence[int]) -> None:
        self.sibling.start(ids)
        self._places, self.spent, self.why = [], 0.0, ""
        self._seen = set(ids) if self.sampler is not None and self.sampler.needs_text else None

    def extend(self, ids: Sequence[int]) -> None:
        self.sibling.extend(ids)
        self._waited = 0 if self.spent else self._waited + 1
        self._places, self.spent = [], 0.0
        if self._seen is not None:
            self._seen.update(ids)

    # ---- passes ----

    def study(self) -> Asks[None]:
        """Read a prompt."""
        if self._can_go_on():
            with lacking() as lacks:
                yield from self.sibling.study(self._sees)
            self._give_up(bool(lacks))

    def ahead(self, room: int, pays: Pays, plain: float) -> Asks[bool]:
        """Draft the next tokens, at most `room`, while that pays; else perhaps take a look: True if it was taken."""
        began, looked = perf_counter(), False
        if not self._can_go_on():
            return False
        with lacking() as lacks:
            if room > 0 and pays(()):
                yield from self._draft(min(room, self.depth, self.sibling.room), pays)
            elif looked := self._is_due(plain):
                yield from self._take_a_look(began)
            else:
                return False
        self._give_up(bool(lacks))
        self.spent = perf_counter() - began
        return looked

    def _draft(self, most: int, pays: Pays) -> Asks[None]:
        chances: list[float] = []
        while True:
            began, rows = perf_counter(), self.sibling.missing
            if not chances:
                (gleaned,) = yield from self.sibling.read()
            else:
                gleaned = yield from self.sibling.go_on(self._places[-1][0][0])
            if rows <= _FEW:
                self._seconds.append(perf_counter() - began)
            ids, scores = self._choices(gleaned, len(self._places))
            if not ids:
                return
            self._places.append((ids, scores))
            chances.append((chances[-1] if chances else 1.0) * self._odds.chance(*cell(scores, 0)))
            if len(chances) >= most or ids[0] in self._ends or not pays(chances):
                return

    def _take_a_look(self, began: float) -> Asks[None]:
        newest = self.sibling.newest(_LOOK)
        found = yield from self.sibling.read(len(newest), most=len(newest))
        for i, gleaned in enumerate(found[:-1]):
            ids, scores = self._choices(gleaned, i + 1 - len(newest))
            if ids:
                self._learn(cell(scores, 0), ids[0] == newest[i + 1])
        self._look = perf_counter() - began

    def _is_due(self, plain: float) -> bool:
        """A look is due when the passes since it was last asked took long enough."""
        units = self._look / plain if self._look and plain else 4 * self._share
        return plain > 0 and self.sibling.missing >= _LOOK and self._waited >= units / _SHARE

    def _choices(self, gleaned: Sequence[float], depth: int) -> tuple[list[int], list[float]]:
        """What may come `depth` tokens behind the text's end, in the sampler's order, and the scores."""
        wide, at = len(gleaned) // 2, self.sibling.length - 1 + depth
        known = [(lp, int(i)) for i, lp in zip(gleaned[:wide], gleaned[wide:], strict=True) if i < self._vocab]
        if self._seen is not None and self.sampler is not None:
            text, by = self._seen.union(ids[0] for ids, _ in self._places), self.sampler.repetition_penalty
            known = [((lp / by if lp > 0 else lp * by) if i in text else lp, i) for lp, i in known]
            known.sort(reverse=True)
        return ranked([i for _, i in known], [lp for lp, _ in known], at, self.sampler)

    def _can_go_on(self) -> bool:
        if self.sibling.room > 0:
            return not self.why
        lm = self.sibling.lm
        self.why = f"{lm.info.id}, which drafts, was made for {lm.limit:,} tokens"
        return False

    def _give_up(self, lacks: bool) -> None:
        if lacks:
            self.why, self._places = f"no memory for {self.sibling.lm.info.id}, which drafts", []
            self.sibling.forget()

    # ---- a source of the tree ----

    def root(self, depth: int) -> Any:
        """A state is a place."""
        return 0 if self._places else None

    def offers(self, state: Any, depth: int, branches: int) -> Sequence[Offer]:
        ids, scores = self._places[state]
        below = state + 1 if state + 1 < len(self._places) else None
        found = []
        for rank, token in enumerate(ids[:branches]):
            row, column = cell(scores, rank)
            found.append(Offer(token, self._odds.chance(row, column), None if rank else below, (row, column)))
        return found

    def safe(self, offer: Offer) -> int:
        """They were drafted because they pay."""
        return len(self._places)

    def learn(self, offer: Offer, was_right: bool) -> None:
        self._learn(offer.about, was_right)

    def _learn(self, about: tuple[int, int], was_right: bool) -> None:
        row, column = about
        self._odds.learn(row, column, was_right, is_first=not column)
        if not column:
            self._all.learn(0, 0, was_right)

    def record(self) -> tuple[Accepted, ...]:
        return self._odds.record()
