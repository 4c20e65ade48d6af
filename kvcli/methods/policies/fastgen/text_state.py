"""FastGen at work: what each head of one text chose, and what it keeps at every boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.policy.policy import LayerContext
from kvcli.kv.slots import Slots
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.methods.policies.fastgen.frequency_scores import Scores
from kvcli.methods.policies.fastgen.head_knapsack import solve
from kvcli.methods.policies.fastgen.layer_state import LayerChoice
from kvcli.methods.policies.fastgen.recovery import CandidateSets, Recovery, classes, recover, top
from kvcli.policies.scoring.replay import Replay

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Steps
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.compression_point import CompressionPoint
    from kvcli.kv.slots import Masks
    from kvcli.methods.policies.fastgen.policy import FastGen

TRIALS = 6  # of T; each is a short pass
LEAST = 16  # rows below which a later prompt is not measured: heads stay with what they chose


class FastGenState:
    """What is known of one text. Everything stays while a prompt is read, then each head chooses."""

    def __init__(self, settings: FastGen, lm: LM, full: Sequence[Sequence[bool]] = ()) -> None:
        """`full` [L][K]: heads that keep everything, whatever they look at."""
        self.settings, self._lm = settings, lm
        self.recovery = settings.least  # T in force
        self._full = full
        self._layers: dict[int, LayerChoice] = {}

    def choose(self, at: CompressionPoint) -> Steps[Masks]:
        """What each head's choice keeps; a sliding layer everything."""
        masks: list[Tensor | None] = [None] * len(at.layers)
        if at.phase == "reading":
            return masks
        measured = [self.measure(*at.layer(i)) for i in at.open]  # all layers, before any is judged
        if any(measured):
            self._choose()
            n = min(self.settings.replay, len(at.ids) // 2)
            if n and at.phase == "read" and self.settings.recovery == "auto":
                while not at.kv.reaches(len(at.ids) - n):  # a sliding layer lacks what the first of them saw
                    n //= 2
                yield from self._settle_on(Replay(at, n))
        for i in self._layers:
            masks[i] = self.mask(*at.layer(i))
        return masks

    def snapshot(self) -> State:
        """What each head chose and is judged by."""
        layers: State = {str(i): layer.state() for i, layer in self._layers.items()}
        return {"recovery": self.recovery, "layers": layers}

    def restore(self, given: SnapshotReader) -> None:
        """Become what gave this."""
        self.recovery = given.share("recovery")
        for i, shape in enumerate(self._lm.shapes):
            if str(i) in given.part("layers"):
                one = given.part("layers").part(str(i))
                self._layers[i] = LayerChoice.made(one, self.settings, shape.n_kv_heads, self._lm.device)

    def chosen(self) -> dict[int, list[str]]:
        """By layer, the candidate of each KV head; sliding layers and texts not yet read have none."""
        names = self.settings.candidates
        return {i: [names[c] for c in layer.chosen] for i, layer in self._layers.items()}

    def kept_at(self, recovery: float) -> float:
        """Share of the stored tokens that heads would keep by this recovery, as last measured; 1 if never."""
        some = [(layer, self._cheapest(layer, i, recovery)) for i, layer in self._layers.items()]
        kept = sum(int(layer.cost[c, j]) for layer, chosen in some for j, c in enumerate(chosen))
        return kept / sum(int(layer.cost[-1].sum()) for layer, _ in some) if some else 1.0

    def measure(self, s: Slots, at: LayerContext) -> bool:
        """One layer, where there is anything to judge by."""
        if is_due := self._is_due(s, at):
            self._layers[at.layer] = self._measured(s, at)
        return is_due

    def _settle_on(self, replay: Replay) -> Steps[None]:
        """The lowest T that loses no more than it may, by halves: what was tried last and was enough, or everything."""
        low, high = 0.0, 1.0
        for _ in range(TRIALS):
            self.recovery = (low + high) / 2
            self._choose()
            lost = yield from replay.loss(self._tried)
            low, high = (low, self.recovery) if lost <= self.settings.kl_max else (self.recovery, high)
        self.recovery = high
        self._choose()

    def _tried(self, s: Slots, at: LayerContext) -> Tensor:
        """What one layer would keep by the choice under trial; remembers nothing of it."""
        layer = self._layers.get(at.layer)
        return s.pos >= 0 if layer is None else layer.fresh(s, at)

    def _choose(self) -> None:
        """By the budget, or by T."""
        if self.settings.keep:
            return self._share()
        for i, layer in self._layers.items():
            layer.chosen = self._cheapest(layer, i, self.recovery)

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        """What the choices of one layer keep [K, S]; nothing is forgotten of one that was never measured."""
        layer = self._layers.get(at.layer)
        return s.pos >= 0 if layer is None else self._mask(layer, s, at)

    def _is_due(self, s: Slots, at: LayerContext) -> bool:
        """Are there rows to measure, and slots to judge by?"""
        layer, pos = self._layers.get(at.layer), at.q_pos[self._rows(at)]
        if at.phase == "read":
            is_time = layer is None or int((pos >= layer.measured).sum()) >= LEAST
        else:
            every = self.settings.reprofile_interval
            is_time = bool(every) and layer is not None and at.kinds.shape[0] - layer.measured >= every
        return is_time and pos.shape[0] > 0 and self._is_evidence(s, at, int(pos.max()))

    def _is_evidence(self, s: Slots, at: LayerContext, row: int) -> bool:
        """Has a row at this position a slot beyond the guard that a head may forget? Near ones are kept unasked, so
        without any the cheapest candidate would seem good enough for every head."""
        always, _ = classes(s, at.kinds, CandidateSets.of(self.settings, at.kinds, at.n_prompt))
        far = (s.pos >= 0) & (s.pos <= row - self.settings.guarded)
        return bool((far & ~always & ~at.protected).any())

    def _rows(self, at: LayerContext) -> Tensor:
        """[m] which of the queries at hand to measure."""
        if at.phase == "read":
            wanted = torch.tensor(self.settings.probes(at.kinds.shape[0]), device=at.q_pos.device)
            return torch.isin(at.q_pos, wanted).nonzero()[:, 0]
        return torch.arange(at.q_pos.shape[0], device=at.q_pos.device)[-self.settings.rows :]

    def _measured(self, s: Slots, at: LayerContext) -> LayerChoice:
        settings, rows, n = self.settings, self._rows(at), at.kinds.shape[0]
        own, q_pos = (settings, at.scale, at.softcap), at.q_pos[rows]
        q, guard = at.q[:, rows], at.protected
        found = recover(q, q_pos, s, at.kinds, *own, sink=at.sink, protected=guard, n_prompt=at.n_prompt)
        sets = CandidateSets.of(settings, at.kinds, at.n_prompt)
        value, scores = found.value(settings.measure, settings.gqa), self._scores(found, q_pos, at, sets)
        return LayerChoice(sets, value, found.cost, n, frequent=found.frequent, scores=scores)

    def _scores(self, found: Recovery, q_pos: Tensor, at: LayerContext, sets: CandidateSets) -> Scores:
        """What the measured rows looked at, as the beginning of what all later rows will."""
        # the paper adds up over all rows, of which a long prompt is measured on some
        weight = at.kinds.shape[0] / q_pos.shape[0] if self.settings.paper else 1.0
        return Scores(found.far * weight, q_pos, at.kinds.shape[0], sets, self.settings)

    def _cheapest(self, layer: LayerChoice, i: int, recovery: float) -> list[int]:
        """The cheapest candidate of each head that recovers enough; everything always does."""
        last, n_kv = layer.value.shape[0] - 1, layer.value.shape[1]
        if recovery >= 1:  # a token without attention on the measured rows may get some later
            return [last] * n_kv
        enough = layer.value >= recovery
        enough[last] = True
        best = layer.cost.double().masked_fill(~enough, torch.inf).argmin(0).tolist()
        return [last if self._is_full(i, j) else c for j, c in enumerate(best)]

    def _share(self) -> None:
        """One budget for all heads: `keep` of what they store."""
        heads = [(i, j) for i, layer in sorted(self._layers.items()) for j in range(layer.cost.shape[1])]
        cost = [self._layers[i].cost[:, j].tolist() for i, j in heads]
        value = [self._layers[i].value[:, j].tolist() for i, j in heads]
        budget = self.settings.keep * sum(c[-1] for c in cost)
        for n, (i, j) in enumerate(heads):
            if self.settings.keep >= 1 or self._is_full(i, j):  # every candidate costs what everything does
                cost[n], value[n] = cost[n][-1:] * len(cost[n]), [0.0] * (len(cost[n]) - 1) + [1.0]
        chosen = solve(value, cost, budget)
        for layer in self._layers.values():
            layer.chosen = []
        for (i, _), candidate in zip(heads, chosen, strict=True):
            self._layers[i].chosen.append(candidate)

    def _is_full(self, layer: int, head: int) -> bool:
        return bool(self._full) and self._full[layer][head]

    def _mask(self, layer: LayerChoice, s: Slots, at: LayerContext) -> Tensor:
        """[K, S] bool, and the scores brought up to date."""
        mask, frequent = layer.fresh(s, at), layer.having("frequent", s.pos)
        if not bool(frequent.any()):
            layer.scores = layer.frequent = None
            return mask
        always, punct = classes(s, at.kinds, layer.sets)
        allowed = (s.pos >= 0) & ~always & ~at.protected & ~punct
        return mask | (frequent & self._frequent(layer, s, at, allowed, wanted=frequent[:, 0]))

    def _frequent(self, layer: LayerChoice, s: Slots, at: LayerContext, allowed: Tensor, wanted: Tensor) -> Tensor:
        """[K, S] bool: the most looked at among those allowed, of heads that are wanted."""
        assert layer.scores is not None
        settings, n = self.settings, at.kinds.shape[0]
        age = n - 1 - s.pos
        pool = allowed & (age >= layer.sets.guard)
        if layer.frequent is not None:  # measured at this boundary
            chosen, layer.frequent = layer.frequent, None
            layer.scores.bind(s, wanted, chosen & pool)
            return chosen
        score = layer.scores.add(s, at, wanted)
        # a token is judged once a batch of rows beyond the guard has seen it
        young = pool & (age < layer.sets.guard + (0 if settings.paper else settings.compression_interval))
        count = round(settings.most * n)
        chosen = torch.zeros_like(pool)
        for j in wanted.nonzero()[:, 0].tolist():
            chosen[j] = top(score[j], pool[j] & ~young[j], count) | young[j]
        layer.scores.bind(s, wanted, chosen)
        return chosen
