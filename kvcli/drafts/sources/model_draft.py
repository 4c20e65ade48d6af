"""Draft source that runs a draft model: it drafts as long as another draft pass saves time.

Draft tokens are ranked with the noise that the sampler will add (coupled sampling, Daliri et al., arXiv 2408.07978).
The chance of a draft token is the recent acceptance rate of draft tokens that led the next one by as much.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from statistics import median_low
from typing import TYPE_CHECKING, Any

from kvcli.drafts.sources.logit_recycling import NAMES, START, cell, rank_with_noise
from kvcli.drafts.tree.growth import Growth, Leaf, TreeNode, TreeShape, sequoia
from kvcli.drafts.tree.tree import AcceptanceRates, DraftCandidate
from kvcli.errors import KvcliError
from kvcli.kv.out_of_memory import as_cache_full

if TYPE_CHECKING:
    from kvcli.drafts.draft_models.draft_model import DraftModel
    from kvcli.drafts.sources.prompt_lookup import PromptLookup
    from kvcli.engine.forward_request import ForwardResult, NeededTensors, Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.engine.sequence.token_history import TokenHistory
    from kvcli.engine.stats import AcceptanceByMatch

log = logging.getLogger("kvcli.drafts")

LOOK = 64  # tokens of a trial pass
_HEARD = 24  # tokens of a trial pass of a draft head, for which earlier passes must record hidden states
_RECORDING = 0.02  # time that this adds to a pass, in plain passes, about
_FIRST = 5  # tokens of the first trial pass, before the first draft
_SHARE = 0.005  # share of plain decoding time spent on trial passes
_FEW = 5  # largest row count of a pass that is timed as a draft pass
_START_MEAN = 0.6  # share of first choices that are accepted, before any is measured
_PLAN = 32  # drafts after which a fixed shape is recomputed
_COPY = 0.5  # chance of a copied token below which it is not added to the draft pass

Pays = Callable[[Sequence[float]], bool]  # chances of the draft tokens so far -> is another one worth its pass?
Costs = Callable[[int], Sequence[float]]  # n -> cost of passes with 1, 2, ... n rows in plain passes


class ModelDraft:
    """Draft source of a draft model. It makes forward passes: `extend_draft` runs before the tree is grown.

    While no draft is made, a trial pass from time to time compares the predictions of the draft model with the newest
    tokens of the sequence; every row is one prediction. So the acceptance rate is known without drafting, and drafting
    starts when it would save time.
    """

    def __init__(
        self,
        draft_model: DraftModel,
        target: LM,
        *,
        depth: int,
        share: float,
        ends: Collection[int] = (),
        growth: Growth | None = None,
        cascade: tuple[PromptLookup, int] | None = None,
        name: str = "model",
    ) -> None:
        """`depth`: most draft tokens of a path; `share`: time of a draft pass in plain passes, until measured.
        `cascade`: prompt lookup that drafts for the draft model, and its maximum number of tokens."""
        self.name = name
        self.sampler: Sampler | None = None  # sampler of the answer; None = greedy decoding
        self.draft_model, self.clock = draft_model, target.clock
        self.spent = 0.0  # seconds of draft passes before the running step
        self.is_fixed = False  # every draft has `depth` tokens
        self.is_whole = False  # its first choices are the whole draft: no alternatives, no other source
        self.unread: Sequence[ForwardResult] = ()  # passes whose first choices are the draft, as a chain, unread
        self.why = ""  # reason in words why no draft is made
        self.fault = ""  # error that occurred in this sequence
        self.depth, self._vocab, self._share, self._ends = depth, target.vocab, share, frozenset(ends)
        self._seconds: deque[float] = deque(maxlen=9)  # seconds of passes with few rows
        self._look, self._waited = 0.0, 0  # seconds of the last trial pass, and passes since the draft model last ran
        self._hears = bool(draft_model.needs)  # what earlier passes must record
        self._due = 0.0  # number of these at which a trial pass is due
        self._growth, self._cascade = growth or Growth(), cascade
        self._places: list[TreeNode] = []  # the sequence's end, and the draft tokens that have been through a pass
        self._shape: TreeShape | None = None  # shape of all trees, if fixed
        self._until_plan = 0  # drafts until the shape is recomputed
        self._n_rows = 0  # rows of passes over draft tokens
        self._history: TokenHistory | None = None  # of the sequence, if the sampler has penalties
        self._answer_at = 0  # start of the answer
        self._odds, self._all = AcceptanceRates(START, NAMES), AcceptanceRates(((_START_MEAN,),), ("all",))
        # acceptance rates by rank: all that a shape independent of the position needs
        self._ranks = AcceptanceRates(([_START_MEAN * 0.3**rank for rank in range(self._growth.branches)],), ("all",))

    @property
    def mean(self) -> float:
        """Recent acceptance rate of first choices."""
        return self._all.chance(0, 0)

    def cost(self, plain: float) -> float:
        """Return the time of a draft pass in plain passes, which take `plain` seconds."""
        return median_low(self._seconds) / plain if plain and self._seconds else self._share

    @property
    def needs(self) -> NeededTensors:
        """Outputs that the next step must record: () while neither a draft nor a trial pass is near."""
        is_near = self._waited < _HEARD or self._waited >= self._due - _HEARD
        return self.draft_model.needs if is_near and not self.why else ()

    @property
    def is_untried(self) -> bool:
        """True if no draft pass was made yet and the sequence has tokens for a trial pass."""
        of = self.draft_model
        return not self._seconds and not self._look and max(len(of.newest(2)), of.n_uncovered) > 1

    # ---- the sequence ----

    def start(self, ids: Sequence[int]) -> None:
        self.draft_model.start(ids)
        self._places, self.spent, self.why, self.fault = [], 0.0, "", ""
        self._history, self._answer_at = None, len(ids)
        if self.sampler is not None and self.sampler.penalties:
            from kvcli.engine.sequence.token_history import TokenHistory  # late: it needs torch

            self._history = TokenHistory(self._vocab)
            self._history.add(ids)

    def extend(self, ids: Sequence[int]) -> None:
        self.draft_model.extend(ids)
        self._waited = 0 if self.spent else self._waited + 1
        self._places, self.spent, self.unread = [], 0.0, ()
        if self._history is not None:
            self._history.add(ids)

    # ---- passes ----

    def study(self) -> Passes[None]:
        """Prefill the prompt."""
        if self._can_go_on():
            with self._giving_up():
                yield from self.draft_model.prefill()

    def extend_draft(self, room: int, pays: Pays, plain: float, costs: Costs) -> Passes[bool]:
        """Draft the next tokens, at most `room` deep, while that saves time; otherwise run a trial pass if one is due.
        Returns True if a trial pass was run.

        `plain`: seconds of a plain pass; `costs`: the costs of verifying n rows.
        """
        began, is_trial, self.unread = self.clock(), False, ()
        if not self._can_go_on():
            return False
        with self._giving_up():
            if room > 0 and pays(()):
                self._plan(plain, costs)
                yield from self._draft(min(room, self.depth, self.draft_model.max_depth), pays)
            elif is_trial := self._is_due(plain):
                yield from self._take_a_look(began)
            else:
                return False
        self.spent = self.clock() - began
        return is_trial

    def _draft(self, most: int, pays: Pays) -> Passes[None]:
        growth, newest, promised = self._growth, 0, 0.0
        chances = list[float]()  # chances that a draft token of each level is accepted
        while True:
            began, rows = self.clock(), self.draft_model.n_uncovered
            passes = (yield from self.draft_model.draft_chain(most)) if self._is_known_chain else ()
            # ids that only the draft model has are no rows of the target
            if len(passes) == most and self.is_whole and passes[0].logits.shape[1] <= self._vocab:
                self.unread = passes
                return
            found = [of.hook_output(0) for of in reversed(passes)][::-1] or (yield from self.draft_model.catch_up())
            if not found:
                return
            self._time(rows, began, len(found))
            # the first timed pass includes its preparation, so a second one is timed before passes are weighed
            if len(self._seconds) != 1:
                break
        self._add_chain(found, self._ends)
        while True:
            tips = [tip for tip in growth.tips(self._places, newest, most) if self._token(tip) not in self._ends]
            if not tips:
                return
            if growth.least:
                before, promised = promised, growth.promised(self._places)
                is_worth_it = promised - before > growth.least
            else:  # the chances add up, because at most one draft token of a level is accepted
                levels, reach = 1 + max(len(place.path) for place in self._places), sum(tip.chance for tip in tips)
                chances += [1.0] * (levels - len(chances))
                chances[-1] = min(1.0, reach)
                is_worth_it = pays(chances)
            if not is_worth_it:
                return
            newest = len(self._places)
            yield from self._pass(tips, most)

    def _add_chain(self, found: Sequence[Sequence[float]], ends: Collection[int]) -> None:
        """Add the nodes of a chain of first choices from their hook output, down to one of `ends`."""
        self._n_rows, at = len(found) - 1, self._add(found[0], -1, (), 1.0, self._shape)
        for row, hook_output in enumerate(found[1:]):
            place = self._places[at]
            if (token := int(found[row][0])) in ends or not place.chances or place.ids[0] != token:
                break  # the device went on with a token that is no draft token
            at = self._go_below(at, 0, row, hook_output)

    def _pass(self, tips: Sequence[Leaf], most: int) -> Passes[None]:
        """Run one draft pass over these leaves, and over tokens copied by prompt lookup after the first leaf."""
        began, first, n = self.clock(), self._n_rows, len(tips)
        ids, parents = [self._token(tip) for tip in tips], [self._places[tip.place].row for tip in tips]
        copied = self._copied((*self._places[tips[0].place].path, ids[0]), most)
        behind = [first, *range(first + n, first + n + len(copied))][: len(copied)]
        found = yield from self.draft_model.continue_from([*ids, *copied], [*parents, *behind])
        self._n_rows += len(found)
        self._time(len(found), began)
        for row, (tip, hook_output) in enumerate(zip(tips, found[:n], strict=True), start=first):
            self._go_below(tip.place, tip.rank, row, hook_output)
        at = self._places[tips[0].place].below[ids[0]]
        for row, (token, hook_output) in enumerate(zip(copied, found[n:], strict=True), start=first + n):
            place = self._places[at]
            if token not in (offered := place.ids[: len(place.chances)]):
                break  # the draft model would have continued differently
            at = self._go_below(at, offered.index(token), row, hook_output)

    def _token(self, tip: Leaf) -> int:
        return self._places[tip.place].ids[tip.rank]

    def _copied(self, path: tuple[int, ...], most: int) -> list[int]:
        """Return the tokens that the cascade's prompt lookup drafts after this path, up to the first uncertain one."""
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
        """Add the node after a choice and return its index."""
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

    def _time(self, rows: int, began: float, passes: int = 1) -> None:
        few = max(_FEW, self._growth.wide) + (self._cascade[1] if self._cascade is not None else 0)
        if rows <= few:
            self._seconds.append((self.clock() - began) / passes)

    @property
    def _is_known_chain(self) -> bool:
        """True if a draft is a chain of first choices whose length no number of its passes changes."""
        growth, sampler = self._growth, self.sampler
        is_greedy = sampler is None or (not sampler.temperature and self._history is None)
        return self.is_fixed and growth.kind == "chain" and not growth.least and self._cascade is None and is_greedy

    def _plan(self, plain: float, costs: Costs) -> None:
        """Recompute the fixed shape every few drafts."""
        if self._growth.kind == "sequoia" and not self._until_plan:
            rates = [self._ranks.chance(0, rank) for rank in range(self._growth.branches)]
            most = self._growth.nodes
            self._shape = sequoia(rates, most, min(self.depth, most), self.cost(plain), costs(most + 1))
        self._until_plan = (self._until_plan or _PLAN) - 1

    def _take_a_look(self, began: float) -> Passes[None]:
        newest = self.draft_model.newest(_FIRST if self.is_untried else LOOK)
        found = yield from self.draft_model.catch_up(len(newest), most=len(newest))
        for i, hook_output in enumerate(found[:-1]):
            ids, scores = self._choices(hook_output, (), i + 1 - len(newest))
            for rank, token in enumerate(ids[: self._growth.branches]):
                self._learn(rank, cell(scores, rank), token == newest[i + 1])
        self._look = self.clock() - began
        self._time(len(newest), began)

    def _is_due(self, plain: float) -> bool:
        """True if enough time has passed since the last draft pass for a trial pass."""
        if self.is_untried:
            return plain > 0 and self._covers(_FIRST)
        units = self._look / plain if self._look and plain else 4 * self._share
        self._due = (units + (_HEARD * _RECORDING if self._hears else 0.0)) / _SHARE
        return plain > 0 and self._covers(_HEARD if self._hears else LOOK) and self._waited >= self._due

    def _covers(self, n: int) -> bool:
        """True if a trial pass can compare n tokens."""
        return self.draft_model.n_uncovered >= n and not (self._hears and len(self.draft_model.newest(n)) < n)

    def _choices(
        self, hook_output: Sequence[float], path: Sequence[int], off: int = 0
    ) -> tuple[list[int], list[float]]:
        """Return the candidate tokens after this path, in the sampler's order, and their scores. `off`: offset of the
        row from the end of the sequence."""
        wide, at = len(hook_output) // 2, self.draft_model.length - 1 + len(path) + off
        known = [(lp, int(i)) for i, lp in zip(hook_output[:wide], hook_output[wide:], strict=True) if i < self._vocab]
        ids, scores = [i for _, i in known], [lp for lp, _ in known]
        if ids and self._history is not None and self.sampler is not None:
            import torch  # late: reading a profile must not import it

            facts = self.sampler.facts(self._history, [path], self._answer_at).of(torch.tensor(ids, dtype=torch.int64))
            scores = self.sampler.punish(torch.tensor([scores], dtype=torch.float64), facts)[0].tolist()
            scores, ids = map(list, zip(*sorted(zip(scores, ids, strict=True), reverse=True), strict=True))
        return rank_with_noise(ids, scores, at, self.sampler)

    def _can_go_on(self) -> bool:
        if self.draft_model.max_depth > 0:
            return not self.why
        self.why = f"draft model {self.draft_model.name} has a context limit of {self.draft_model.limit:,} tokens"
        return False

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Log the error if a draft pass fails, and stop drafting for this sequence. The answer is not affected."""
        try:
            yield
        except Exception as error:
            is_lack = as_cache_full(error) is not None
            why = error.message if isinstance(error, KvcliError) else f"{type(error).__name__}: {error}".split("\n")[0]
            self.fault = (
                f"no memory for draft model {self.draft_model.name}"
                if is_lack
                else (f"draft model {self.draft_model.name} failed: {why}")
            )
            log.log(logging.INFO if is_lack else logging.WARNING, "%s", self.fault, exc_info=not is_lack)
            self.why, self._places = self.fault, []
            self.draft_model.discard_cache()

    # ---- the protocol DraftSource ----

    def root(self, depth: int) -> Any:
        """Return the root: a state of this source is the index of a node. An unread draft is read."""
        if self.unread and not self._places:
            self._add_chain([of.hook_output(0) for of in self.unread], ())  # all of it is verified
        return 0 if self._places else None

    def offers(self, state: Any, depth: int, branches: int) -> Sequence[DraftCandidate]:
        place, found = self._places[state], []
        for rank in range(min(branches, len(place.chances))):
            about, token = cell(place.scores, rank), place.ids[rank]
            found.append(DraftCandidate(token, place.chances[rank], place.below.get(token), (rank, about)))
        return found

    def safe(self, candidate: DraftCandidate) -> int:
        """Return all nodes, because they were drafted for a gain."""
        return len(self._places)

    def learn(self, candidate: DraftCandidate, was_right: bool) -> None:
        rank, about = candidate.about
        self._learn(rank, about, was_right)

    def _learn(self, rank: int, about: tuple[int, int], was_right: bool) -> None:
        row, column = about
        self._odds.learn(row, column, was_right, is_first=not rank)
        self._ranks.learn(0, rank, was_right, is_first=not rank)
        if not rank:
            self._all.learn(0, 0, was_right)

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        return self._odds.record()
