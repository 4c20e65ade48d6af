"""Drafter that merges several draft sources into one tree, limits it by measured times, and sends lookahead rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcli.drafts.pacing.draft_controller import DraftController, Mode, SourcePayoff
from kvcli.drafts.sources.logit_recycling import likeliest, rank_with_noise, top
from kvcli.drafts.tree.tree import FAINT, SURE, Beyond, DraftSource, DraftToken, decided, grow
from kvcli.engine.forward_request import Draft, NeededTensors
from kvcli.engine.stats import DraftReport, LookaheadReport, Step

if TYPE_CHECKING:
    from kvcli.drafts.draft_settings import DraftSettings
    from kvcli.drafts.sources.jacobi_window import JacobiWindow
    from kvcli.drafts.sources.logit_recycling import RecycledLogits
    from kvcli.drafts.sources.model_draft import ModelDraft
    from kvcli.drafts.sources.ngram_pool import NgramPool
    from kvcli.drafts.tree.growth import StopRule
    from kvcli.engine.drafting.drafter import Costs, DraftContext, ViewSpec
    from kvcli.engine.forward_request import LogitsHook, LookaheadRows, Passes
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.kv.slots import Usage

_PATIENT, _EAGER = 64, 16  # passes before the first lookahead rows, with other sources and alone
_DRY_RUN_TOKENS = 8  # tokens of a dry-run draft, all of which must be right
_LEARNING = 0.02  # share of a plain pass spent on learning from rows other than the one that ended the path
_TAIL = 8  # last tokens by which a sequence is recognized, and from which keys are made


class TreeDrafter:
    """Tree drafter: holds the draft sources, the draft tree of the running pass, and the draft controller."""

    def __init__(
        self, config: DraftSettings, sources: Sequence[DraftSource], *, clock: Callable[[], float],
        successors: Sequence[RecycledLogits] = (), lookahead: tuple[JacobiWindow, NgramPool] | None = None,
        view: ViewSpec | None = None, chain: ModelDraft | None = None, beyond: Sequence[tuple[int, Beyond]] = (),
        stop: StopRule | None = None,
    ) -> None:  # fmt: skip
        """`clock`: of the target model, in seconds. `successors`: the sources that learn from logits. The n-gram pool
        of `lookahead` is in `sources`, and so is `chain`, as the last, which needs draft passes; `stop` may end its
        drafts sooner than measured times do. `beyond`: as in `grow`."""
        self._config, self._sources, self._successors, self._clock = config, list(sources), successors, clock
        self._window: JacobiWindow | None = lookahead[0] if lookahead else None
        self._pool: NgramPool | None = lookahead[1] if lookahead else None
        self.view, self._chain, self._beyond, self._stop = view, chain, beyond, stop
        # chances that the draft model's tokens are accepted, each with all before it, as of the last call of `_pays`
        self._model_chances: list[float] = []
        self._control = DraftController(config.min_speedup, config.baseline_interval)
        self._lookahead_payoff = SourcePayoff(_PATIENT if len(self._sources) > 1 else _EAGER)
        self._recycling_payoff = SourcePayoff(0, "recycled logits")
        # recycled logits are switched off while they cost more than they gain, but only beside other sources
        self._can_pause_recycling = config.adaptive and len(successors) < len(self._sources)
        self._costs: Costs | None = None
        self._sampler: Sampler | None = None  # sampler of the answer; None = greedy decoding
        self._n = 0  # tokens of the sequence that the sources know
        self._tail: list[int] = []  # the last of those tokens
        # of the running pass, verified or not; None = no running pass
        self._draft_tokens: list[DraftToken] | None = None
        self._lookahead: LookaheadRows | None = None  # lookahead rows of the running pass
        self._mode = Mode.DRAFT  # purpose of the running pass
        self._is_trial = False  # a trial pass of the draft model came before it
        self._learns_from_logits = True  # False in plain passes during a pause
        self._accepted_by = dict.fromkeys((source.name for source in sources), 0)
        self._dry_run: list[int] = []  # tokens of a dry-run draft still to be compared

    @property
    def logits_hook(self) -> LogitsHook | None:
        """The hook that returns the likeliest tokens of each row, if a source learns from them."""
        learns = self._learns_from_logits and any(not source.rests for source in self._successors)
        return top if learns or self._lookahead is not None else None

    def expect(self, costs: Costs) -> None:
        """Set the costs of passes with which each sequence starts, until they are measured."""
        self._costs = costs

    def usage(self) -> list[Usage]:
        """Return the memory of a draft model's KV cache."""
        return self._chain.draft_model.usage() if self._chain is not None else []

    def start(self, ids: Sequence[int], sampler: Sampler | None = None) -> Passes[None] | None:
        self._sampler = sampler
        for source in self._successors:
            source.sampler = sampler
        if self._chain is not None:
            self._chain.sampler = sampler
        self._follow(ids)
        if self._window is not None:
            self._window.start(ids)
        self._control.restart()
        if self._costs is not None:
            self._control.expect(self._costs(len(ids)))
        self._draft_tokens, self._dry_run = None, []
        if self._chain is None or self._control.is_paused or not self._pays(()):
            return None
        return self._chain.study()

    def propose(self, ids: Sequence[int], room: int, context: DraftContext | None = None) -> Passes[Draft] | Draft:
        if self._tail != list(ids[max(0, self._n - _TAIL) : self._n]) or self._n > len(ids):
            self._follow(ids)
        elif self._n < len(ids):
            self._extend(ids[self._n :])
        mode = self._mode = self._control.mode() if self._config.adaptive else Mode.DRAFT
        self._learns_from_logits = mode is not Mode.PLAIN or not self._control.is_paused
        if self._can_pause_recycling and self._successors and mode is Mode.DRAFT:
            rests = not self._recycling_payoff.due(0.0, self._control.speed)
            for source in self._successors:
                source.rests = rests
        if self._chain is not None and mode is not Mode.PLAIN:
            self._chain.draft_model.bind(context)
            return self._ahead(self._chain, mode, room)
        return self._proposal(mode, room)

    def _ahead(self, chain: ModelDraft, mode: Mode, room: int) -> Passes[Draft]:
        """Return the proposal after the passes of the draft model."""
        is_asked = mode is Mode.DRAFT and self._pays(()) and not (self._config.adaptive and chain.is_untried)
        if is_asked and self._config.adaptive and len(self._sources) > 1:
            others = [source for source in self._sources if source is not chain]
            draft_tokens = grow(others, self._config.max, room, self._config.branches)
            chances = [token.chance for token in draft_tokens]
            is_sure = bool(chances) and chances[0] >= SURE
            # draft tokens of other sources need no pass, so the model's tokens must gain more and pay for its passes
            is_asked = not is_sure and self._pays((), self._control.net_gain(chances, self._safe(draft_tokens)))
        room_to_ask = room if is_asked else 0
        pays, control = self._pays, self._control
        self._is_trial = yield from chain.extend_draft(room_to_ask, pays, control.plain, control.costs)
        if self._is_trial and mode is Mode.DRY_RUN:
            self._control.observe_dry_run(self._pays(()))
        return self._proposal(mode, room)

    def _proposal(self, mode: Mode, room: int) -> Draft:
        # also of a plain pass that is timed: what it does not record would have to be computed again
        needs = self._chain.needs if self._chain is not None and not self._control.is_paused else NeededTensors()
        if self._chain is not None and self._chain.unread is not None:
            return replace(self._chain.unread, needs=needs)
        self._draft_tokens = self._grow(mode, room)
        rows = self._rows(self._draft_tokens) if mode is Mode.DRAFT else 0
        self._lookahead = self._lookahead_for(mode, room, rows)
        tokens = self._draft_tokens[:rows]
        return Draft([t.id for t in tokens], [t.parent for t in tokens], self._lookahead, needs)

    def observe(self, step: Step) -> None:
        if self._chain is not None and self._chain.unread is not None:
            self._draft_tokens = self._chain.read(self._chain.unread)
        if self._draft_tokens is None:
            return
        began = self._clock()
        found = decided(self._draft_tokens, step.new)
        for token, is_right in found:
            for i, candidate in token.candidates:
                self._sources[i].learn(candidate, is_right)
        if self._stop is not None and self._model_chances:
            self._teach(self._stop, found)
        for row in step.path[1:]:
            i, _ = max(self._draft_tokens[row - 1].candidates, key=lambda entry: entry[1].chance)
            self._accepted_by[self._sources[i].name] += 1
        lookahead_rows = step.rows.n_rows - step.rows.tree
        brought = self._brought(step, [self._pool]) if lookahead_rows else 0
        self._compare_dry_run(step.new)
        if lookahead_rows:
            self._harvest(step)
        if self._learns_from_logits:
            self._learn_from_logits(step)
        ahead = before = self._chain.spent if self._chain is not None else 0.0
        if self._is_trial:  # a trial takes a fixed share of the time, and says nothing about the speed of drafting
            ahead, self._is_trial = 0.0, False
        if self._chain is not None:
            self._chain.draft_model.observe(step)
        self._extend(step.new)
        # work between two passes counts, because plain decoding would not need it
        spent = self._clock() - began if self._mode is Mode.DRAFT else 0.0
        of = step.n_drafted, len(step.new)
        if step.company is not None:
            surcharge = self._control.observe_beside(step.company, *of, step.rows.n_rows, spent)
        else:
            surcharge = self._control.observe(*of, step.seconds + spent + ahead - before, lookahead_rows, ahead)
        if lookahead_rows and self._config.adaptive:
            self._lookahead_payoff.observe(brought, surcharge, self._control.speed)
        self._draft_tokens, self._lookahead = None, None

    def report(self) -> DraftReport:
        """Return the figures that `/spec` shows."""
        by_source = {source.name: source.record() for source in self._sources}
        payoff, lookahead = self._lookahead_payoff, None
        if self._window is not None:
            rested = payoff.rested_passes
            lookahead = LookaheadReport(self._window.rows, payoff.brought, payoff.cost, rested, payoff.why)
        report = self._control.report()
        if (chain := self._chain) is not None:
            report = replace(report, ahead=chain.cost(report.plain_pass), by=chain.draft_model.name, fault=chain.fault)
            report = replace(report, paused=True, reason=chain.why) if chain.why else report
        return replace(report, by_source=by_source, lookahead=lookahead, accepted_by=dict(self._accepted_by))

    # ---- the coming pass ----

    def _pays(self, chances: Sequence[float], beside: float = 0.0) -> bool:
        """True if one more token of the draft model is worth its pass, after tokens with these chances. `beside`: gain
        in tokens of the other sources' drafts."""
        chain = self._chain
        if chain is None or not self._config.adaptive:
            return True
        self._model_chances = list(chances)
        if self._stop is not None and chances and not self._stop.goes_on(chances):
            return False
        return self._control.deeper(chances, chain.depth, chain.mean, chain.cost(self._control.plain), beside)

    def _teach(self, stop: StopRule, found: Sequence[tuple[DraftToken, bool]]) -> None:
        """Teach the stop rule by the draft model's first choices up to the first rejection; later ones are untested."""
        best: dict[int, tuple[float, bool]] = {}  # parent -> its best draft token: chance, accepted
        for token, is_right in found:
            for i, candidate in token.candidates:
                if self._sources[i] is self._chain and candidate.chance > best.get(token.parent, (0.0, False))[0]:
                    best[token.parent] = candidate.chance, is_right
        for depth, (_, is_right) in enumerate(best.values(), start=1):
            if depth <= len(self._model_chances):
                stop.learn(self._model_chances[:depth], is_right)
            if not is_right:
                return

    def _grow(self, mode: Mode, room: int) -> list[DraftToken]:
        if mode is Mode.DRAFT:
            faint = FAINT if self._config.adaptive else 0.0
            return grow(self._sources, self._config.max, room, self._config.branches, faint, self._beyond)
        if mode is Mode.PLAIN or self._dry_run:
            return []
        chain = grow(self._sources, _DRY_RUN_TOKENS, _DRY_RUN_TOKENS, branches=1)
        if len(chain) == _DRY_RUN_TOKENS:
            self._dry_run = [token.id for token in chain]
        return chain

    def _rows(self, draft_tokens: Sequence[DraftToken]) -> int:
        """Return how many draft tokens to verify: as safe or as measured times allow; all if not adaptive."""
        if not draft_tokens or not self._config.adaptive:
            return len(draft_tokens)
        return self._control.rows([token.chance for token in draft_tokens], self._safe(draft_tokens))

    def _safe(self, draft_tokens: Sequence[DraftToken]) -> int:
        """Return the rows that these draft tokens may have before their cost is measured."""
        first = draft_tokens[0].candidates if draft_tokens else ()
        return max((self._sources[i].safe(candidate) for i, candidate in first), default=0)

    def _lookahead_for(self, mode: Mode, room: int, n_draft_tokens: int) -> LookaheadRows | None:
        window = self._window
        if window is None or mode is not Mode.DRAFT or room < window.reach:
            return None
        if not self._config.adaptive:
            return window.lookahead_rows()
        if self._control.wants_alone(n_draft_tokens):
            return None
        is_due = self._lookahead_payoff.due(self._control.surcharge(window.rows), self._control.speed)
        return window.lookahead_rows() if is_due else None

    # ---- the finished pass ----

    def _brought(self, step: Step, sources: Sequence[DraftSource | None]) -> int:
        """Return the number of accepted tokens from the first one on that only these sources proposed."""
        draft_tokens = self._draft_tokens or []
        indices = {i for i, source in enumerate(self._sources) if source in sources}
        for depth, row in enumerate(step.path[1:]):
            if all(i in indices for i, _ in draft_tokens[row - 1].candidates):
                return len(step.path) - 1 - depth
        return 0

    def _harvest(self, step: Step) -> None:
        """Add n-grams from the logits of the lookahead rows, sampled as the answer will be."""
        if self._window is None or self._pool is None:
            return
        rows, last = step.rows, []
        for i, row in enumerate(rows.wanted, start=rows.tree):
            ids, _ = rank_with_noise(*likeliest(step.hook_output(i)), rows.pos[row], self._sampler)
            last.append(ids[0])
        for before, run in self._window.harvest(self._tail, last):
            self._pool.put(before, run)

    def _learn_from_logits(self, step: Step) -> None:
        """Record recycled logits from the rows of the tree, as many as time allows."""
        if all(source.rests for source in self._successors):
            return
        began, plain, rows = self._clock(), self._control.plain, step.rows
        # the row that ended the path first, then the rest of the path (copied tokens), then rejected rows
        path = step.path[::-1]
        for row in [*path, *(row for row in range(1, rows.tree) if row not in path)]:
            ids, logp = likeliest(step.hook_output(row))
            before = [*self._tail, *(rows.ids[above] for above in rows.ancestors(row)[-2::-1])]
            for source in self._successors:
                source.add(before, ids, logp)
            spent = self._clock() - began
            if spent > _LEARNING * plain:
                break
        if self._can_pause_recycling and self._mode is Mode.DRAFT:
            brought, cost = self._brought(step, self._successors), spent / plain if plain else None
            self._recycling_payoff.observe(brought, cost, self._control.speed)

    def _extend(self, ids: Sequence[int]) -> None:
        for source in self._sources:
            source.extend(ids)
        self._n += len(ids)
        self._tail = [*self._tail, *ids][-_TAIL:]

    def _follow(self, ids: Sequence[int]) -> None:
        for source in self._sources:
            source.start(ids)
        self._n, self._tail = len(ids), list(ids[-_TAIL:])

    def _compare_dry_run(self, new: Sequence[int]) -> None:
        """Compare the dry-run draft, made before this pass or earlier, with the new tokens."""
        if not self._dry_run:
            return
        n = min(len(new), len(self._dry_run))
        if list(new[:n]) != self._dry_run[:n]:
            self._dry_run = []
            self._control.observe_dry_run(False)
            return
        del self._dry_run[:n]
        if not self._dry_run:
            self._control.observe_dry_run(True)
