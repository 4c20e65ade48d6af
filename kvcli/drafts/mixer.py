"""One drafter of several sources: their tree, the clock that limits it, and the scouts that feed one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from kvcli.drafts.credit import Credit
from kvcli.drafts.pace import Mode, Pace
from kvcli.drafts.tree import FAINT, SURE, Guess, Source, decided, grow
from kvcli.engine.report import Report, ScoutsReport

if TYPE_CHECKING:
    from kvcli.drafts.chain import Chain
    from kvcli.drafts.pacing import Pacing
    from kvcli.drafts.pool import Pool
    from kvcli.drafts.successors import Successors
    from kvcli.drafts.window import Window
    from kvcli.engine.drafter import Costs, Glance
    from kvcli.engine.feed import Asks, Glean
    from kvcli.engine.rows import Draft, Scouts
    from kvcli.engine.sample import Sampler
    from kvcli.engine.stats import Step
    from kvcli.kv.slots import Usage

_PATIENT, _EAGER = 64, 16  # passes before the first scouts, beside other sources and alone
_PAPER = 8  # tokens that a guess on paper must get right
_TAIL = 8  # tokens by which a text is known again, and that keys are made of


class Mixer:
    """Owns its sources, the tree of the pass under way, and the pace."""

    def __init__(
        self,
        config: Pacing,
        sources: Sequence[Source],
        *,
        successors: Sequence[Successors] = (),
        scouting: tuple[Window, Pool] | None = None,
        view: Glance | None = None,
        chain: Chain | None = None,
    ) -> None:
        """`successors` are those of the sources that learn from logits, the pool of `scouting` is one of them, too, and
        so is `chain`, whose guesses take passes."""
        self._config, self._sources, self._successors = config, list(sources), successors
        self._window: Window | None = scouting[0] if scouting else None
        self._pool: Pool | None = scouting[1] if scouting else None
        self._view, self._chain = view, chain
        self._pace = Pace(config.kill_below, config.probe_every)
        self._credit = Credit(_PATIENT if len(self._sources) > 1 else _EAGER)
        self._costs: Costs | None = None
        self._n = 0  # tokens of the text that the sources know
        self._tail: list[int] = []  # the last of them
        self._guesses: list[Guess] | None = None  # of the pass under way, verified or not; None = no pass under way
        self._scouts: Scouts | None = None  # of the pass under way
        self._mode = Mode.DRAFT  # of the pass under way
        self._accepted_by = dict.fromkeys((source.name for source in sources), 0)
        self._paper: list[int] = []  # tokens still to come true

    @property
    def view(self) -> Glance | None:
        return self._view

    @property
    def glean(self) -> Glean | None:
        """The likeliest tokens of each row, where a source learns from them."""
        if not self._successors and self._window is None:
            return None
        from kvcli.drafts.successors import top  # late: it needs torch

        return top

    def expect(self, costs: Costs) -> None:
        """Begin each text with these costs of passes, until they are measured here."""
        self._costs = costs

    def usage(self) -> list[Usage]:
        """What a second model stores of the text."""
        return self._chain.sibling.usage() if self._chain is not None else []

    def start(self, ids: Sequence[int], sampler: Sampler | None = None) -> Asks[None] | None:
        for source in self._successors:
            source.sampler = sampler
        if self._chain is not None:
            self._chain.sampler = sampler
        self._follow(ids)
        if self._window is not None:
            self._window.start(ids)
        self._pace.restart()
        if self._costs is not None:
            self._pace.expect(self._costs(len(ids)))
        self._guesses, self._paper = None, []
        return self._chain.study() if self._chain is not None and not self._pace.is_paused and self._pays(()) else None

    def propose(self, ids: Sequence[int], room: int) -> Asks[Draft] | Draft:
        if self._tail != list(ids[max(0, self._n - _TAIL) : self._n]) or self._n > len(ids):
            self._follow(ids)
        elif self._n < len(ids):
            self._extend(ids[self._n :])
        mode = self._mode = self._pace.mode() if self._config.adaptive else Mode.DRAFT
        if self._chain is not None and mode is not Mode.PLAIN:
            return self._ahead(self._chain, mode, room)
        return self._proposal(mode, room)

    def _ahead(self, chain: Chain, mode: Mode, room: int) -> Asks[Draft]:
        """The proposal, once the second model has had its passes."""
        is_paper = mode is Mode.PAPER
        others = [source for source in self._sources if source is not chain] if self._config.adaptive else []
        is_sure = any(guess.chance >= SURE for guess in grow(others, 1, room, branches=1))
        looked = yield from chain.ahead(0 if is_paper or is_sure else room, self._pays, self._pace.plain)
        if is_paper and looked:
            self._pace.hear_paper(self._pays(()))
        return self._proposal(mode, room)

    def _proposal(self, mode: Mode, room: int) -> Draft:
        from kvcli.engine.rows import Draft  # late: reading a profile must not import torch

        self._guesses = self._grow(mode, room)
        rows = self._rows(self._guesses) if mode is Mode.DRAFT else 0
        self._scouts = self._send(mode, room, rows)
        if mode is not Mode.DRAFT:
            return Draft.none()
        return Draft([g.id for g in self._guesses[:rows]], [g.parent for g in self._guesses[:rows]], self._scouts)

    def observe(self, step: Step) -> None:
        if self._guesses is None:
            return
        began = perf_counter()
        for guess, is_right in decided(self._guesses, step.new):
            for i, offer in guess.named:
                self._sources[i].learn(offer, is_right)
        for row in step.path[1:]:
            i, _ = max(self._guesses[row - 1].named, key=lambda named: named[1].chance)
            self._accepted_by[self._sources[i].name] += 1
        scouts = step.rows.n_rows - step.rows.tree
        brought = self._brought(step) if scouts else 0
        self._hear_paper(step.new)
        if self._mode is not Mode.PLAIN or not self._pace.is_paused:
            self._hear_logits(step)
        ahead = self._chain.spent if self._chain is not None else 0.0
        self._extend(step.new)
        # what is done here between two passes is time that plain decoding would not take
        spent = perf_counter() - began if self._mode is Mode.DRAFT else 0.0
        seconds = step.seconds + spent
        surcharge = self._pace.observe(step.n_drafted, len(step.new), seconds, scouts, ahead)
        if scouts and self._config.adaptive:
            self._credit.observe(brought, surcharge, self._pace.speed)
        self._guesses, self._scouts = None, None

    def report(self) -> Report:
        """What `/spec` shows."""
        by_source = {source.name: source.record() for source in self._sources}
        credit, scouts = self._credit, None
        if self._window is not None:
            rested = credit.rested_passes
            scouts = ScoutsReport(self._window.rows, credit.brought, credit.cost, rested, credit.why)
        report = self._pace.report()
        if (chain := self._chain) is not None:
            report = replace(report, ahead=chain.cost(report.plain_pass))
            report = replace(report, paused=True, reason=chain.why) if chain.why else report
        return replace(report, by_source=by_source, scouts=scouts, accepted_by=dict(self._accepted_by))

    # ---- the pass to come ----

    def _pays(self, chances: Sequence[float]) -> bool:
        """Is one more guess of the second model worth its pass, behind some with these chances?"""
        chain = self._chain
        if chain is None or not self._config.adaptive:
            return True
        return self._pace.deeper(chances, chain.depth, chain.mean, chain.cost(self._pace.plain))

    def _grow(self, mode: Mode, room: int) -> list[Guess]:
        if mode is Mode.DRAFT:
            faint = FAINT if self._config.adaptive else 0.0
            return grow(self._sources, self._config.max, room, self._config.branches, faint)
        if mode is Mode.PLAIN or self._paper:
            return []
        chain = grow(self._sources, _PAPER, _PAPER, branches=1)
        if len(chain) == _PAPER:
            self._paper = [g.id for g in chain]
        return chain

    def _rows(self, guesses: Sequence[Guess]) -> int:
        """How many of the guesses to verify: as many as are safe, more or fewer once the clock says so; or all."""
        if not guesses or not self._config.adaptive:
            return len(guesses)
        safe = max(self._sources[i].safe(offer) for i, offer in guesses[0].named)
        return self._pace.rows([g.chance for g in guesses], safe)

    def _send(self, mode: Mode, room: int, guesses: int) -> Scouts | None:
        window = self._window
        if window is None or mode is not Mode.DRAFT or room < window.reach:
            return None
        if not self._config.adaptive:
            return window.scouts()
        if self._pace.wants_alone(guesses):
            return None
        return window.scouts() if self._credit.due(self._pace.surcharge(window.rows), self._pace.speed) else None

    # ---- the pass behind ----

    def _brought(self, step: Step) -> int:
        """Accepted tokens that only the pool had named, and those behind them."""
        guesses = self._guesses or []
        pool = next(i for i, source in enumerate(self._sources) if source is self._pool)
        for depth, row in enumerate(step.path[1:]):
            if all(i == pool for i, _ in guesses[row - 1].named):
                return len(step.path) - 1 - depth
        return 0

    def _hear_logits(self, step: Step) -> None:
        """Harvest n-grams from the scouts' logits, and successors from those of the text's last row."""
        from kvcli.drafts.successors import likeliest  # late: it needs torch

        tree = step.rows.tree
        if self._window is not None and self._pool is not None and step.rows.n_rows > tree:
            last = [int(step.gleaned(tree + i)[0]) for i in range(step.logits.shape[0] - tree)]
            for before, run in self._window.harvest(self._tail, last):
                self._pool.put(before, run)
        if not self._successors:
            return
        # of the row that ended the path: what the others' rows led to was guessed, and so is known already
        ids, logp = likeliest(step.gleaned(step.path[-1]))
        before = [*self._tail, *step.new[:-1]]
        for source in self._successors:
            source.tell(before, ids, logp)

    def _extend(self, ids: Sequence[int]) -> None:
        for source in self._sources:
            source.extend(ids)
        self._n += len(ids)
        self._tail = [*self._tail, *ids][-_TAIL:]

    def _follow(self, ids: Sequence[int]) -> None:
        for source in self._sources:
            source.start(ids)
        self._n, self._tail = len(ids), list(ids[-_TAIL:])

    def _hear_paper(self, new: Sequence[int]) -> None:
        """Compare the guess on paper, made before this pass or earlier, with what came."""
        if not self._paper:
            return
        n = min(len(new), len(self._paper))
        if list(new[:n]) != self._paper[:n]:
            self._paper = []
            self._pace.hear_paper(False)
            return
        del self._paper[:n]
        if not self._paper:
            self._pace.hear_paper(True)
