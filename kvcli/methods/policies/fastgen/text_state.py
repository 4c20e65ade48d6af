"""FastGen's state of one sequence: the choice of each head, and the slots it keeps at each compression point."""

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
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import CompressionPoint
    from kvcli.kv.slots import Masks
    from kvcli.methods.policies.fastgen.settings import FastGenSettings

TRIALS = 6  # values of T tried; each takes a short forward pass
LEAST = 16  # a later prompt with fewer rows is not measured: heads keep their choice


class FastGenState:
    """FastGen's state of one sequence. All slots are kept during prefill; then a candidate is chosen per head."""

    def __init__(self, settings: FastGenSettings, lm: LM, full: Sequence[Sequence[bool]] = ()) -> None:
        """`full` [L][K]: heads that keep everything regardless of their attention."""
        self.settings, self._lm = settings, lm
        self.recovery = settings.least  # T in force
        self.full = full
        self._layers: dict[int, LayerChoice] = {}

    def choose(self, at: CompressionPoint) -> Passes[Masks]:
        """Return the slots that each head's choice keeps; sliding-window layers keep all."""
        masks: list[Tensor | None] = [None] * len(at.layers)
        if at.phase == "reading":
            return masks
        measured = [self.measure(*at.layer(i)) for i in at.full_layers]  # all layers, before any choice
        if any(measured):
            self._choose()
            n = min(self.settings.replay, len(at.ids) // 2)
            if n and at.phase == "read" and self.settings.recovery == "auto":
                while not at.kv.reaches(len(at.ids) - n):  # a sliding-window layer lacks slots for the first of them
                    n //= 2
                yield from self._settle_on(Replay(at, n))
        for i in self._layers:
            masks[i] = self.mask(*at.layer(i))
        return masks

    def snapshot(self) -> State:
        """Return the choice and the measurements of each head."""
        layers: State = {str(i): layer.state() for i, layer in self._layers.items()}
        return {"recovery": self.recovery, "layers": layers}

    def restore(self, given: SnapshotReader) -> None:
        """Load the state of a snapshot."""
        self.recovery = given.share("recovery")
        for i, shape in enumerate(self._lm.shapes):
            if str(i) in given.part("layers"):
                one = given.part("layers").part(str(i))
                self._layers[i] = LayerChoice.made(one, self.settings, shape.n_kv_heads, self._lm.device)

    def chosen(self) -> dict[int, list[str]]:
        """Return by layer the candidate of each KV head; none for sliding-window layers and before prefill ends."""
        names = self.settings.candidates
        return {i: [names[c] for c in layer.chosen] for i, layer in self._layers.items()}

    def kept_at(self, recovery: float) -> float:
        """Return the share of stored tokens that heads would keep at this T, as last measured; 1 if never."""
        some = [(layer, self._cheapest(layer, i, recovery)) for i, layer in self._layers.items()]
        kept = sum(int(layer.cost[c, j]) for layer, chosen in some for j, c in enumerate(chosen))
        return kept / sum(int(layer.cost[-1].sum()) for layer, _ in some) if some else 1.0

    def measure(self, s: Slots, at: LayerContext) -> bool:
        """Measure one layer if it is due; return True if it was measured."""
        if is_due := self._is_due(s, at):
            self._layers[at.layer] = self._measured(s, at)
        return is_due

    def _settle_on(self, replay: Replay) -> Passes[None]:
        """Find the lowest T whose loss is at most `kl_max`, by bisection; 1 (keep everything) if no T suffices."""
        low, high = 0.0, 1.0
        for _ in range(TRIALS):
            self.recovery = (low + high) / 2
            self._choose()
            lost = yield from replay.loss(self._tried)
            low, high = (low, self.recovery) if lost <= self.settings.kl_max else (self.recovery, high)
        self.recovery = high
        self._choose()

    def _tried(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the slots that one layer would keep by the choice being tried, without changing state."""
        layer = self._layers.get(at.layer)
        return s.pos >= 0 if layer is None else layer.fresh(s, at)

    def _choose(self) -> None:
        """Choose a candidate for each head, by the budget `keep` or by T."""
        if self.settings.keep:
            return self._share()
        for i, layer in self._layers.items():
            layer.chosen = self._cheapest(layer, i, self.recovery)

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the slots [K, S] that one layer keeps; all of them if it was never measured."""
        layer = self._layers.get(at.layer)
        return s.pos >= 0 if layer is None else self._mask(layer, s, at)

    def _is_due(self, s: Slots, at: LayerContext) -> bool:
        """Return True if the layer is to be measured: there are new rows, and evictable slots beyond the guard."""
        layer, pos = self._layers.get(at.layer), at.q_pos[self._rows(at)]
        if at.phase == "read":
            is_time = layer is None or int((pos >= layer.measured).sum()) >= LEAST
        else:
            every = self.settings.reprofile_interval
            is_time = bool(every) and layer is not None and at.kinds.shape[0] - layer.measured >= every
        return is_time and pos.shape[0] > 0 and self._is_evidence(s, at, int(pos.max()))

    def _is_evidence(self, s: Slots, at: LayerContext, row: int) -> bool:
        """Return True if a row at this position has an evictable slot beyond the guard. Near slots are always kept, so
        without one the cheapest candidate would seem good enough for every head."""
        always, _ = classes(s, at.kinds, CandidateSets.of(self.settings, at.kinds, at.n_prompt))
        far = (s.pos >= 0) & (s.pos <= row - self.settings.guarded)
        return bool((far & ~always & ~at.protected).any())

    def _rows(self, at: LayerContext) -> Tensor:
        """Return the indices [m] of the recorded queries to measure."""
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
        """Return the scores of frequent tokens, initialized with the attention of the measured rows."""
        # the paper sums over all rows; of a long prompt only some are measured, so the sum is scaled
        weight = at.kinds.shape[0] / q_pos.shape[0] if self.settings.paper else 1.0
        return Scores(found.far * weight, q_pos, at.kinds.shape[0], sets, self.settings)

    def _cheapest(self, layer: LayerChoice, i: int, recovery: float) -> list[int]:
        """Return the cheapest candidate of each head that recovers enough; "full" always does."""
        last, n_kv = layer.value.shape[0] - 1, layer.value.shape[1]
        if recovery >= 1:  # a token without attention on the measured rows may get some later
            return [last] * n_kv
        enough = layer.value >= recovery
        enough[last] = True
        best = layer.cost.double().masked_fill(~enough, torch.inf).argmin(0).tolist()
        return [last if self._is_full(i, j) else c for j, c in enumerate(best)]

    def _share(self) -> None:
        """Choose candidates within one budget for all heads: `keep` of their stored tokens."""
        heads = [(i, j) for i, layer in sorted(self._layers.items()) for j in range(layer.cost.shape[1])]
        cost = [self._layers[i].cost[:, j].tolist() for i, j in heads]
        value = [self._layers[i].value[:, j].tolist() for i, j in heads]
        budget = self.settings.keep * sum(c[-1] for c in cost)
        for n, (i, j) in enumerate(heads):
            if self.settings.keep >= 1 or self._is_full(i, j):  # give all candidates the cost of "full"
                cost[n], value[n] = cost[n][-1:] * len(cost[n]), [0.0] * (len(cost[n]) - 1) + [1.0]
        chosen = solve(value, cost, budget)
        for layer in self._layers.values():
            layer.chosen = []
        for (i, _), candidate in zip(heads, chosen, strict=True):
            self._layers[i].chosen.append(candidate)

    def _is_full(self, layer: int, head: int) -> bool:
        return bool(self.full) and self.full[layer][head]

    def _mask(self, layer: LayerChoice, s: Slots, at: LayerContext) -> Tensor:
        """Return the slots to keep [K, S], and update the scores."""
        mask, frequent = layer.fresh(s, at), layer.having("frequent", s.pos)
        if not bool(frequent.any()):
            layer.scores = layer.frequent = None
            return mask
        always, punct = classes(s, at.kinds, layer.sets)
        allowed = (s.pos >= 0) & ~always & ~at.protected & ~punct
        return mask | (frequent & self._frequent(layer, s, at, allowed, wanted=frequent[:, 0]))

    def _frequent(self, layer: LayerChoice, s: Slots, at: LayerContext, allowed: Tensor, wanted: Tensor) -> Tensor:
        """Select the most attended slots [K, S] among `allowed`, for the heads in `wanted`."""
        assert layer.scores is not None
        settings, n = self.settings, at.kinds.shape[0]
        age = n - 1 - s.pos
        pool = allowed & (age >= layer.sets.guard)
        if layer.frequent is not None:  # measured at this compression point
            chosen, layer.frequent = layer.frequent, None
            layer.scores.bind(s, wanted, chosen & pool)
            return chosen
        score = layer.scores.add(s, at, wanted)
        # a token is scored after a whole interval of rows beyond the guard could attend to it
        young = pool & (age < layer.sets.guard + (0 if settings.paper else settings.compression_interval))
        count = round(settings.most * n)
        chosen = torch.zeros_like(pool)
        for j in wanted.nonzero()[:, 0].tolist():
            chosen[j] = top(score[j], pool[j] & ~young[j], count) | young[j]
        layer.scores.bind(s, wanted, chosen)
        return chosen
