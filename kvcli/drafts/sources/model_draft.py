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

import torch

from kvcli.drafts.sources.logit_recycling import NAMES, START, WIDE, cell, rank_with_noise
from kvcli.drafts.tree.growth import Growth, Leaf, TreeNode, TreeShape, sequoia
from kvcli.drafts.tree.tree import AcceptanceRates, DraftCandidate, DraftToken, RatedSource
from kvcli.engine.forward_request import Choice, Draft, NeededTensors
from kvcli.engine.sequence.token_history import TokenHistory
from kvcli.errors import KvcliError
from kvcli.kv.out_of_memory import as_cache_full

if TYPE_CHECKING:
    from kvcli.drafts.draft_models.draft_model import DraftModel
    from kvcli.drafts.sources.prompt_lookup import PromptLookup
    from kvcli.engine.forward_request import Passes, RanRow
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.sampler import Sampler

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


class ModelDraft(RatedSource):
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
        self.is_alone = False  # there is no other source
        self.unread: Draft | None = None  # the whole draft, if the host has not read it
        self.why = ""  # reason in words why no draft is made
        self.fault = ""  # error that occurred in this sequence
        self.depth, self._vocab, self._share, self._ends = depth, target.vocab, share, frozenset(ends)
        self._seconds: deque[float] = deque(maxlen=9)  # seconds of passes with few rows
        self._look, self._waited = 0.0, 0  # seconds of the last trial pass, and passes since the draft model last ran
        self._due = 0.0  # number of these at which a trial pass is due
        self._growth, self._cascade = growth or Growth(), cascade
        self._places: list[TreeNode] = []  # the sequence's end, and the draft tokens that have been through a pass
        self._planned: TreeShape | None = None  # Sequoia's shape
        self._shape: TreeShape | None = None  # of the running draft, if it is known before
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
        """Tensors that the next step must record: none while neither a draft nor a trial pass is near."""
        is_near = self._waited < _HEARD or self._waited >= self._due - _HEARD
        return self.draft_model.needs if is_near and not self.why else NeededTensors()

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
            self._history = TokenHistory(self._vocab)
            self._history.add(ids)

    def extend(self, ids: Sequence[int]) -> None:
        self.draft_model.extend(ids)
        self._waited = 0 if self.spent else self._waited + 1
        self._places, self.spent, self.unread = [], 0.0, None
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
        began, is_trial, self.unread = self.clock(), False, None
        if not self._can_go_on():
            return False
        with self._giving_up():
            if room > 0 and pays(()):
                self._plan(plain, costs)
                yield from self._draft(min(room, self.depth, self.draft_model.max_depth, self._growth.nodes), pays)
            elif is_trial := self._is_due(plain):
                yield from self._take_a_look(began)
            else:
                return False
        self.spent = self.clock() - began
        return is_trial

    def _draft(self, most: int, pays: Pays) -> Passes[None]:
        growth, newest, promised = self._growth, 0, 0.0
        chances = list[float]()  # chances that a draft token of each level is accepted
        fixed = growth.fixed(most, self._planned, WIDE) if self._is_known else None
        self._shape = fixed or self._planned
        while True:
            began, rows = self.clock(), self.draft_model.n_uncovered
            ahead = None if fixed is None else [of[:2] for of in fixed.rows()[1:]]
            ran = () if ahead is None else (yield from self.draft_model.draft_ahead(ahead))
            self.unread = self._by_reference(ran)
            if self.unread is not None:
                return
            # the last one first: to wait for that is to wait for all
            found = [of.hook_output(row) for of, row in reversed(ran)][::-1] or (yield from self.draft_model.catch_up())
            if not found:
                return
            self._time(rows, began, len(found))
            # the first timed pass includes its preparation, so a second one is timed before passes are weighed
            if len(self._seconds) != 1:
                break
        self._add_rows(found, self._ends)
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

    def _by_reference(self, ran: Sequence[RanRow]) -> Draft | None:
        """Return the choices after the rows that ran as the draft; None = the host has to read them first."""
        rows = self._shape.rows() if self._shape is not None else ()
        # Sequoia plans by the time of draft passes, which is known of those that are waited for
        is_timed = self._growth.kind == "sequoia" and not self._until_plan
        # ids that only the draft model has are no rows of the target
        is_known = len(ran) >= max(1, len(rows)) and ran[0][0].logits.shape[1] <= self._vocab
        if not self.is_alone or is_timed or not is_known or ran[-1][0].choices is None:
            return None
        parents, choices, above = list[int](), list[Choice](), [-1]
        for at, of, (_, _, shape) in zip(above, ran, rows, strict=True):  # `above` grows by the rows below each
            above += [len(parents) + rank for rank, below in enumerate(shape.below) if below.below]
            parents += [at] * len(shape.below)
            choices += [Choice(*of, rank) for rank in range(len(shape.below))]
        return Draft([], parents, choices=choices) if len(parents) <= self._growth.nodes else None

    def read(self, draft: Draft) -> list[DraftToken]:
        """Read a draft that went to the target unread, and return its tokens."""
        self._add_rows([choice.of.hook_output(choice.row) for choice in draft.choices if not choice.rank], ())
        place, tokens = -1, list[DraftToken]()
        for parent, choice in zip(draft.parent, draft.choices, strict=True):
            place += not choice.rank
            candidate = self.offers(place, 0, choice.rank + 1)[-1]
            chance = candidate.chance * (tokens[parent].chance if parent >= 0 else 1.0)
            tokens.append(DraftToken(candidate.id, parent, chance, ((0, candidate),)))
        return tokens

    def _add_rows(self, found: Sequence[Sequence[float]], ends: Collection[int]) -> None:
        """Add the nodes of the shape's first rows from their hook output, none below one of `ends`."""
        self._n_rows, nodes = len(found) - 1, [self._add(found[0], -1, (), 1.0, self._shape)]
        rows = self._shape.rows() if self._shape is not None else []
        for row, (above, rank, _) in enumerate(rows[1 : len(found)]):
            at, token = nodes[above], found[above][rank]
            # the device may have gone on with a token that is no draft token
            is_below = at >= 0 and self._places[at].ids[rank : rank + 1] == [token] and token not in ends
            nodes.append(self._go_below(at, rank, row, found[row + 1]) if is_below else -1)

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
    def _is_known(self) -> bool:
        """True if no number of its passes changes how deep a draft goes, and its choices are in the sampler's order."""
        sampler = self.sampler
        is_greedy = sampler is None or (not sampler.temperature and self._history is None)
        return self.is_fixed and not self._growth.least and self._cascade is None and is_greedy

    def _plan(self, plain: float, costs: Costs) -> None:
        """Recompute the fixed shape every few drafts."""
        if self._growth.kind == "sequoia" and not self._until_plan:
            rates = [self._ranks.chance(0, rank) for rank in range(self._growth.branches)]
            most = self._growth.nodes
            self._planned = sequoia(rates, most, min(self.depth, most), self.cost(plain), costs(most + 1))
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
        reads = self.draft_model.needs.states
        self._due = (units + (_HEARD * _RECORDING if reads else 0.0)) / _SHARE
        return plain > 0 and self._covers(_HEARD if reads else LOOK) and self._waited >= self._due

    def _covers(self, n: int) -> bool:
        """True if a trial pass can compare n tokens."""
        of = self.draft_model
        return of.n_uncovered >= n and not (of.needs.states and len(of.newest(n)) < n)

    def _choices(
        self, hook_output: Sequence[float], path: Sequence[int], off: int = 0
    ) -> tuple[list[int], list[float]]:
        """Return the candidate tokens after this path, in the sampler's order, and their scores. `off`: offset of the
        row from the end of the sequence."""
        wide, at = len(hook_output) // 2, self.draft_model.length - 1 + len(path) + off
        known = [(lp, int(i)) for i, lp in zip(hook_output[:wide], hook_output[wide:], strict=True) if i < self._vocab]
        ids, scores = [i for _, i in known], [lp for lp, _ in known]
        if ids and self._history is not None and self.sampler is not None:
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
        """Return the root: a state of this source is the index of a node."""
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
