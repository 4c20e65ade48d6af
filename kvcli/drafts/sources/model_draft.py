"""What a second model says comes next, pass by pass, as far as another one pays.

Its guesses are ranked with the noise that the sampler will add (coupled sampling, Daliri et al., arXiv 2408.07978). A
guess is trusted by how far it leads the next one, at the rate at which such guesses came true lately.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from statistics import median_low
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvcli.drafts.sources.logit_recycling import NAMES, START, cell, rank_with_noise
from kvcli.drafts.tree.acceptance_rates import AcceptanceRates
from kvcli.drafts.tree.growth import Growth, Leaf, TreeNode, TreeShape, sequoia
from kvcli.drafts.tree.tree import DraftCandidate
from kvcli.errors import KvcliError
from kvcli.kv.out_of_memory import as_cache_full

if TYPE_CHECKING:
    from kvcli.drafts.draft_models.draft_model import DraftModel
    from kvcli.drafts.sources.prompt_lookup import PromptLookup
    from kvcli.engine.drafting.report import AcceptanceByMatch
    from kvcli.engine.forward_request import Steps
    from kvcli.engine.sequence.sampler import Sampler

log = logging.getLogger("kvcli.drafts")

LOOK = 64  # tokens of a look
_FIRST = 5  # and of the one that comes before anything is drafted
_SHARE = 0.005  # of the time of plain decoding, spent on looks
_FEW = 5  # rows of a pass that counts as one of drafting
_START_MEAN = 0.6  # share of first choices that come true, before any is known
_PLAN = 32  # drafts after which a fixed shape is made anew
_COPY = 0.5  # chance of a copied token below which it is not checked beside a guess

Pays = Callable[[Sequence[float]], bool]  # chances of the guesses so far -> is another one worth its pass?
Costs = Callable[[int], Sequence[float]]  # n -> plain passes of one with 1, 2, ... n rows


class ModelDraft:
    """A source that asks for passes: `extend_draft` comes before the tree is grown.

    What it would have said of tokens that came without it is found out now and then (a look): one pass over the newest
    of them, in which every row is a guess. So drafting begins and goes on when it would pay, and is not tried to find
    that out.
    """

    def __init__(
        self,
        guesser: DraftModel,
        *,
        depth: int,
        vocab: int,
        share: float,
        ends: Collection[int] = (),
        growth: Growth | None = None,
        cascade: tuple[PromptLookup, int] | None = None,
        name: str = "model",
    ) -> None:
        """`depth`: guesses in a row, at most; `vocab`: of the model that writes; `share`: what a pass takes of one of
        that model's, until it is measured. `cascade`: who guesses for the one that guesses, and how many tokens."""
        self.name = name
        self.sampler: Sampler | None = None  # how tokens will be drawn; None = greedily
        self.guesser = guesser
        self.spent = 0.0  # seconds of passes before the step under way
        self.why = ""  # why it says nothing, in words
        self.fault = ""  # what broke in this text
        self.depth, self._vocab, self._share, self._ends = depth, vocab, share, frozenset(ends)
        self._seconds: deque[float] = deque(maxlen=9)  # of a pass of few rows
        self._look, self._waited = 0.0, 0  # seconds of the last one, and passes since it was asked anything
        self._growth, self._cascade = growth or Growth(), cascade
        self._places: list[TreeNode] = []  # of the text's end, and of guesses that passes were made of
        self._shape: TreeShape | None = None  # of all trees, where that is fixed
        self._until_plan = 0  # drafts
        self._n_rows = 0  # of passes over guesses
        self._seen: set[int] | None = None  # tokens of the text, where the sampler punishes those
        self._odds, self._all = AcceptanceRates(START, NAMES), AcceptanceRates(((_START_MEAN,),), ("all",))
        # by rank: a shape that is the same wherever the text is asks for no more
        self._ranks = AcceptanceRates(([_START_MEAN * 0.3**rank for rank in range(self._growth.branches)],), ("all",))

    @property
    def mean(self) -> float:
        """How often first choices came true lately."""
        return self._all.chance(0, 0)

    def cost(self, plain: float) -> float:
        """One of its passes in plain ones, which take `plain` seconds."""
        return median_low(self._seconds) / plain if plain and self._seconds else self._share

    @property
    def is_untried(self) -> bool:
        """Was it asked nothing yet, though tokens of the text can be looked at?"""
        return not self._seconds and not self._look and len(self.guesser.newest(2)) > 1

    # ---- the text ----

    def start(self, ids: Sequence[int]) -> None:
        self.guesser.start(ids)
        self._places, self.spent, self.why, self.fault = [], 0.0, "", ""
        self._seen = set(ids) if self.sampler is not None and self.sampler.needs_text else None

    def extend(self, ids: Sequence[int]) -> None:
        self.guesser.extend(ids)
        self._waited = 0 if self.spent else self._waited + 1
        self._places, self.spent = [], 0.0
        if self._seen is not None:
            self._seen.update(ids)

    # ---- passes ----

    def study(self) -> Steps[None]:
        """Read a prompt."""
        if self._can_go_on():
            with self._giving_up():
                yield from self.guesser.prefill()

    def extend_draft(self, room: int, pays: Pays, plain: float, costs: Costs) -> Steps[bool]:
        """Draft the next tokens, at most `room` deep, while that pays; else perhaps take a look: True if it was taken.

        `plain`: seconds of a plain pass; `costs`: of verification."""
        began, looked = perf_counter(), False
        if not self._can_go_on():
            return False
        with self._giving_up():
            if room > 0 and pays(()):
                self._plan(plain, costs)
                yield from self._draft(min(room, self.depth, self.guesser.max_depth), pays)
            elif looked := self._is_due(plain):
                yield from self._take_a_look(began)
            else:
                return False
        self.spent = perf_counter() - began
        return looked

    def _draft(self, most: int, pays: Pays) -> Steps[None]:
        growth, newest, promised = self._growth, 0, 0.0
        chances = list[float]()  # that the text gets behind one of the guesses of a level
        while True:
            began, rows = perf_counter(), self.guesser.n_uncovered
            found = yield from self.guesser.catch_up()
            if not found:
                return
            self._time(rows, began)
            # what a pass takes is weighed from the first draft on, and the first one timed includes its preparation
            if len(self._seconds) != 1:
                break
        self._n_rows = 0
        self._add(found[0], -1, (), 1.0, self._shape)
        while True:
            tips = [tip for tip in growth.tips(self._places, newest, most) if self._token(tip) not in self._ends]
            if not tips:
                return
            if growth.least:
                before, promised = promised, growth.promised(self._places)
                is_worth_it = promised - before > growth.least
            else:  # of guesses none of which is above another one at most comes true
                levels, reach = 1 + max(len(place.path) for place in self._places), sum(tip.chance for tip in tips)
                chances += [1.0] * (levels - len(chances))
                chances[-1] = min(1.0, reach)
                is_worth_it = pays(chances)
            if not is_worth_it:
                return
            newest = len(self._places)
            yield from self._pass(tips, most)

    def _pass(self, tips: Sequence[Leaf], most: int) -> Steps[None]:
        """One over these, and over what is copied behind the first."""
        began, first, n = perf_counter(), self._n_rows, len(tips)
        ids, parents = [self._token(tip) for tip in tips], [self._places[tip.place].row for tip in tips]
        copied = self._copied((*self._places[tips[0].place].path, ids[0]), most)
        behind = [first, *range(first + n, first + n + len(copied))][: len(copied)]
        found = yield from self.guesser.continue_from([*ids, *copied], [*parents, *behind])
        self._n_rows += len(found)
        self._time(len(found), began)
        for row, (tip, hook_output) in enumerate(zip(tips, found[:n], strict=True), start=first):
            self._go_below(tip.place, tip.rank, row, hook_output)
        at = self._places[tips[0].place].below[ids[0]]
        for row, (token, hook_output) in enumerate(zip(copied, found[n:], strict=True), start=first + n):
            place = self._places[at]
            if token not in (offered := place.ids[: len(place.chances)]):
                break  # it would have gone on otherwise
            at = self._go_below(at, offered.index(token), row, hook_output)

    def _token(self, tip: Leaf) -> int:
        return self._places[tip.place].ids[tip.rank]

    def _copied(self, path: tuple[int, ...], most: int) -> list[int]:
        """What the cascade's source is sure of behind these guesses."""
        if self._cascade is None:
            return []
        source, n = self._cascade
        found: list[int] = []
        state = source.behind(path, most)
        while state is not None and len(found) < min(n, most - 1 - len(path)):
            offers = source.offers(state, len(path) + len(found), 1)
            if not offers or offers[0].chance < _COPY or offers[0].id in self._ends:
                break
            found.append(offers[0].id)
            state = offers[0].state
        return found

    def _go_below(self, place: int, rank: int, row: int, hook_output: Sequence[float]) -> int:
        """The place behind a choice."""
        of = self._places[place]
        of.below[of.ids[rank]] = len(self._places)
        shape = of.shape.below[rank] if of.shape is not None else None
        return self._add(hook_output, row, (*of.path, of.ids[rank]), of.chance * of.chances[rank], shape)

    def _add(
        self, hook_output: Sequence[float], row: int, path: tuple[int, ...], chance: float, shape: TreeShape | None
    ) -> int:
        ids, scores = self._choices(hook_output, path)
        first = self._odds.chance(*cell(scores, 0)) if ids else 0.0
        ranks = range(min(len(ids), self._growth.offered(first, shape)))
        chances = [self._odds.chance(*cell(scores, rank)) for rank in ranks]
        self._places.append(TreeNode(row, path, chance, ids, scores, chances, shape))
        return len(self._places) - 1

    def _time(self, rows: int, began: float) -> None:
        few = max(_FEW, self._growth.wide) + (self._cascade[1] if self._cascade is not None else 0)
        if rows <= few:
            self._seconds.append(perf_counter() - began)

    def _plan(self, plain: float, costs: Costs) -> None:
        """A fixed shape, made anew now and then."""
        if self._growth.kind == "sequoia" and not self._until_plan:
            rates = [self._ranks.chance(0, rank) for rank in range(self._growth.branches)]
            most = self._growth.nodes
            self._shape = sequoia(rates, most, min(self.depth, most), self.cost(plain), costs(most + 1))
        self._until_plan = (self._until_plan or _PLAN) - 1

    def _take_a_look(self, began: float) -> Steps[None]:
        newest = self.guesser.newest(_FIRST if self.is_untried else LOOK)
        found = yield from self.guesser.catch_up(len(newest), most=len(newest))
        for i, hook_output in enumerate(found[:-1]):
            ids, scores = self._choices(hook_output, (), i + 1 - len(newest))
            for rank, token in enumerate(ids[: self._growth.branches]):
                self._learn(rank, cell(scores, rank), token == newest[i + 1])
        self._look = perf_counter() - began
        self._time(len(newest), began)

    def _is_due(self, plain: float) -> bool:
        """A look is due when the passes since it was last asked took long enough."""
        if self.is_untried:
            return plain > 0 and self.guesser.n_uncovered >= _FIRST
        units = self._look / plain if self._look and plain else 4 * self._share
        return plain > 0 and self.guesser.n_uncovered >= LOOK and self._waited >= units / _SHARE

    def _choices(
        self, hook_output: Sequence[float], path: Sequence[int], off: int = 0
    ) -> tuple[list[int], list[float]]:
        """What may come behind these guesses, in the sampler's order, and the scores. `off`: how much longer the
        text was then."""
        wide, at = len(hook_output) // 2, self.guesser.length - 1 + len(path) + off
        known = [(lp, int(i)) for i, lp in zip(hook_output[:wide], hook_output[wide:], strict=True) if i < self._vocab]
        if self._seen is not None and self.sampler is not None:
            text, by = self._seen.union(path), self.sampler.repetition_penalty
            known = [((lp / by if lp > 0 else lp * by) if i in text else lp, i) for lp, i in known]
            known.sort(reverse=True)
        return rank_with_noise([i for _, i in known], [lp for lp, _ in known], at, self.sampler)

    def _can_go_on(self) -> bool:
        if self.guesser.max_depth > 0:
            return not self.why
        self.why = f"{self.guesser.name}, which drafts, was made for {self.guesser.limit:,} tokens"
        return False

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Whatever breaks in its passes costs guesses, and no text: it then says nothing more in this one."""
        try:
            yield
        except Exception as error:
            is_lack = as_cache_full(error) is not None
            said = error.message if isinstance(error, KvcliError) else f"{type(error).__name__}: {error}".split("\n")[0]
            self.fault = (
                f"no memory for {self.guesser.name}, which drafts"
                if is_lack
                else (f"{self.guesser.name}, which drafts, failed: {said}")
            )
            log.log(logging.INFO if is_lack else logging.WARNING, "%s", self.fault, exc_info=not is_lack)
            self.why, self._places = self.fault, []
            self.guesser.discard_cache()

    # ---- a source of the tree ----

    def root(self, depth: int) -> Any:
        """A state is a place."""
        return 0 if self._places else None

    def offers(self, state: Any, depth: int, branches: int) -> Sequence[DraftCandidate]:
        place, found = self._places[state], []
        for rank in range(min(branches, len(place.chances))):
            about, token = cell(place.scores, rank), place.ids[rank]
            found.append(DraftCandidate(token, place.chances[rank], place.below.get(token), (rank, about)))
        return found

    def safe(self, offer: DraftCandidate) -> int:
        """They were drafted because they pay."""
        return len(self._places)

    def learn(self, offer: DraftCandidate, was_right: bool) -> None:
        rank, about = offer.about
        self._learn(rank, about, was_right)

    def _learn(self, rank: int, about: tuple[int, int], was_right: bool) -> None:
        row, column = about
        self._odds.learn(row, column, was_right, is_first=not rank)
        self._ranks.learn(0, rank, was_right, is_first=not rank)
        if not rank:
            self._all.learn(0, 0, was_right)

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        return self._odds.record()
