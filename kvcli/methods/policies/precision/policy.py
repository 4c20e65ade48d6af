"""Eviction policy of a precision budget: scores of tokens, and the level of each slot at every compression point."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.forward_request import Passes, await_passes
from kvcli.engine.policy.policy import PolicyRequirements
from kvcli.errors import ContextOverflow
from kvcli.kv.footprint import STEP
from kvcli.kv.out_of_memory import CacheFull
from kvcli.methods.policies.precision.loss_limit import counted, lost_share, price_for_loss
from kvcli.methods.policies.precision.plan import Layer, in_place, levels, price, quality, together
from kvcli.methods.policies.precision.settings import PrecisionBudgetSettings
from kvcli.policies.scoring.headmap import head_rows
from kvcli.policies.scoring.running_scores import RunningScores

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import CompressionPoint
    from kvcli.kv.cache.precision_budget import PrecisionBudget
    from kvcli.kv.slots import Masks
    from kvcli.kv.snapshot import SnapshotReader, State
    from kvcli.policies.scoring.topk import ScoreState

FLOOR = 0.2  # least weight of a head by a head map, as a share of the average
TINY = 1e-30
MIB = 1 << 20


@dataclass(slots=True)
class PrecisionState:
    """State of the precision budget of one sequence."""

    scorer: ScoreState  # state of the scoring method
    worth: RunningScores  # scores by layer and position, of scored tokens
    faded: RunningScores  # by layer, [K, 1]: score sum that quantization had cost slots before they were offloaded
    heads: list[list[float]] = field(default_factory=list)  # [L][K] weights of heads; [] = equal
    n: int = 0  # number of scored tokens
    said: str = ""  # result for the last prompt, in words

    def snapshot(self) -> State:
        """Return the scores and the state of the scoring method."""
        return {
            "n": self.n,
            "scorer": self.scorer.snapshot(),
            "worth": self.worth.snapshot(),
            "faded": self.faded.snapshot(),
        }

    def restore(self, given: SnapshotReader) -> None:
        """Load the state of a snapshot."""
        self.n = given.number("n", given.n)
        self.scorer.restore(given.part("scorer"))
        self.worth.restore(given.part("worth"))
        self.faded.restore(given.part("faded"))


@dataclass(frozen=True, kw_only=True)
class PrecisionBudgetPolicy(PrecisionBudgetSettings):
    """The policy of sequences whose KV cache has the levels of a precision budget."""

    spending: PrecisionBudget

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Return the requirements of the scoring method, while answering too. Raises its errors and the head map's."""
        wants, rows = self.scorer.requirements(lm), []
        if self.headmap:
            table = head_rows(self.headmap, lm)
            mean = sum(map(sum, table)) / sum(map(len, table)) or 1.0
            rows = [[FLOOR + (1 - FLOOR) * value / mean for value in row] for row in table]

        def policy_state() -> PrecisionState:
            of_score: ScoreState = wants.policy_state()  # type: ignore[assignment]
            return PrecisionState(of_score, RunningScores(lm), RunningScores(lm), rows)

        return replace(wants, lasting=True, policy_state=policy_state)

    def describe_result(self, policy_state: PrecisionState) -> str:
        """Return the result of the budget after the last prefill, in words."""
        return policy_state.said

    def select(self, at: CompressionPoint) -> Passes[Masks]:
        """Return by layer the level of each slot. Raises CacheFull if the protected tokens exceed the budget."""
        masks: list[Tensor | None] = [None] * len(at.layers)
        most, loses = self.spending.most(len(at.ids)), bool(self.spending.lose) and at.phase != "reading"
        is_early = at.phase == "reading" and self.spending.is_late  # a budget known only after prefill
        if is_early or not at.full_layers or (at.is_whole and not loses and self._full(at, at.layers) <= most):
            return masks
        yield from self._score(at)
        layers = [self._layer(at, i) for i in at.full_layers]
        left = most - self._full(at, [i for i in at.layers if i not in at.full_layers])
        found = self._price(layers, self.spending, left)
        if found == float("inf") and not self.spending.is_share:
            raise self._shortage(layers, left, most - left)
        for layer, level in zip(layers, self._levels(layers, found, left, loses), strict=True):
            masks[layer.number] = level
        if at.phase == "read":
            at.policy_state.said = self._told(at, layers, masks, most)
        self._fade(at, layers, masks)
        return masks

    def _price(self, layers: Sequence[Layer], spending: PrecisionBudget, left: float) -> float:
        return price(layers, spending, left) if spending.asked else 0.0

    def _levels(self, layers: Sequence[Layer], found: float, left: float, loses: bool) -> list[Tensor]:
        """Return the levels of slots by layer at this price. If the offload tier is too small for all slots sent there,
        either its capacity is filled or the tier is not used, whichever loses less."""

        def at(spending: PrecisionBudget, found: float) -> list[Tensor]:
            found = max(found, price_for_loss(layers, spending, spending.lose)) if loses else found
            return [levels(layer, spending, found) for layer in layers]

        chosen = at(self.spending, found)
        held = [in_place(layer, self.spending, level) for layer, level in zip(layers, chosen, strict=True)]
        if all(a is b for a, b in zip(held, chosen, strict=True)):
            return chosen
        full = replace(self.spending, holds=0)
        if (found := self._price(layers, full, left)) == float("inf"):
            return held
        return min(held, at(full, found), key=lambda levels: lost_share(layers, self.spending, levels))

    def _fade(self, at: CompressionPoint, layers: Sequence[Layer], masks: Masks) -> None:
        """Reduce the scores of slots being offloaded to what quantization left, as their bit width is not recorded."""
        for layer in layers if self.spending.has_place else ():
            level, there = masks[layer.number], self.spending.last - 1
            goes = (level == there) & (layer.level > 0) & (layer.level < there)
            if not bool(goes.any()):
                continue
            worth, pos = at.policy_state.worth.total[layer.number], at.layer(layer.number)[0].pos
            left = worth.new_tensor(quality(self.spending)[:there])[layer.level.clamp(0, there - 1).long()]
            less = torch.zeros_like(worth)
            for head, of in enumerate(goes):
                where = pos[head, of].long()
                less[head, where] = worth[head, where] * (1 - left[head, of])
            worth -= less
            before = at.policy_state.faded.total.get(layer.number, 0.0)
            at.policy_state.faded.total[layer.number] = before + less.sum(1, keepdim=True)

    def _told(self, at: CompressionPoint, layers: Sequence[Layer], masks: Masks, most: int) -> str:
        """Describe the result of the budget in words."""
        chosen_levels = [chosen for layer in layers if (chosen := masks[layer.number]) is not None]
        whole = len(at.ids) * self.spending.of_token
        held = self._full(at, [i for i in at.layers if i not in at.full_layers]) + sum(
            self.spending.nbytes(layer.number, counted(layer, level, self.spending.last))
            for layer, level in zip(layers, chosen_levels, strict=True)
        )
        if held > most and self.spending.is_share and len(at.ids) > self.sinks + self.recent:
            always = f"protected tokens take {held / MIB:,.1f} MiB"
            return f"beyond memory.budget = {self.spending.asked}, {most / MIB:,.1f} MiB: {always}"
        if not (share := lost_share(layers, self.spending, chosen_levels)):
            return ""
        return f"with {1 - share:.1%} of its score in {held / whole:.0%} of its bytes"

    def _full(self, at: CompressionPoint, layers: Container[int]) -> int:
        """Return the bytes of these layers, if no slot was demoted. Bytes are counted by slots, because spare capacity
        depends on the rows of each pass, which must not influence what is kept."""
        held = [(use.layer, -(-use.slots // STEP) * STEP) for use in at.kv.usage() if use.layer in layers]
        return sum(room * self.spending.whole(layer) for layer, room in held)

    def _score(self, at: CompressionPoint) -> Passes[None]:
        """Score the tokens that have no score yet, or all tokens while the cache could still be cropped."""
        known, n, scorer = at.policy_state, len(at.ids), self.scorer
        first, own, is_seen = 0 if at.is_whole else known.n, replace(at, policy_state=known.scorer), True
        try:
            yield from await_passes(scorer.score_by_repetition(own, first))
        except ContextOverflow as error:
            if at.phase != "answering":
                raise self._no_room(error) from None
            is_seen = False  # the end of the context window cannot be repeated: its few tokens get the highest score
        for i in at.full_layers:
            s, moment = own.layer(i)
            worth = torch.zeros(s.pos.shape[0], n, device=s.pos.device)  # 0 for tokens never stored here
            if first:
                worth[:, :first] = known.worth.total[i][:, :first]
            else:
                known.faded.total.pop(i, None)
            most = worth.amax(1, keepdim=True) if first else torch.ones_like(worth[:, :1])
            score = self._share(scorer.score(s, moment), s.pos) if is_seen else most.expand_as(s.pos)
            for head, new in enumerate(s.pos >= first):
                worth[head, s.pos[head, new].long()] = score[head, new]
            known.worth.total[i] = worth
        known.n = n

    def _share(self, score: Tensor, pos: Tensor) -> Tensor:
        """Return the scores as shares of each head's sum, float32 [K, S]; KVzip's scores are attention already."""
        score = score.float()
        if self.score == "kvzip":
            return score
        low = score.masked_fill(pos < 0, torch.inf).amin(1, keepdim=True).clamp(max=0)
        score = (score - low).masked_fill(pos < 0, 0.0)
        return score / score.sum(1, keepdim=True).clamp(min=TINY)

    def _no_room(self, error: ContextOverflow) -> ContextOverflow:
        said = f'policy.score = "{self.score}" needs more context to repeat the text'
        return ContextOverflow(said, lines=error.lines, try_=["--set policy.score=expected", "a shorter text"])

    def _shortage(self, layers: Sequence[Layer], left: int, elsewhere: int) -> CacheFull:
        """Return the error for protected tokens larger than the budget; `elsewhere`: bytes of sliding-window layers."""
        always = sum(int(layer.worth.isinf().sum()) * self.spending.each(layer.number)[0] for layer in layers)
        size = f"{-(-(2 * int(always) + elsewhere) // MIB)}MiB"
        return CacheFull(
            f"memory.budget = {self.spending.asked} is smaller than the protected tokens",
            lines=[
                f"protected tokens ({self.sinks} first and {self.recent} newest ones, the system "
                f"prompt, tool results) take {always / MIB:,.1f} MiB, more than {max(0, left) / MIB:,.1f} MiB"
            ],
            try_=[f"--budget {size}", f"--set memory.budget={size} without --budget", "--set policy.protect=false"],
        )

    def _layer(self, at: CompressionPoint, i: int) -> Layer:
        """Return the competing slots of a layer."""
        s, moment = at.layer(i)
        level = torch.cat([torch.full((span.n,), span.level) for span in s.levels]).to(s.pos.device)
        level = level.expand_as(s.pos).masked_fill(s.pos < 0, -1).to(torch.int8)
        worth = at.policy_state.worth.total[i].gather(1, s.pos.clamp(min=0).long())
        if at.policy_state.heads:
            worth = worth * worth.new_tensor(at.policy_state.heads[i]).unsqueeze(1)
        whole = self._whole(at, i) - float(worth.double()[moment.protected].sum())
        worth = worth.masked_fill(moment.protected, float("inf"))
        return Layer(i, together(worth, level, s.levels), level, [span.n for span in reversed(s.levels)], whole)

    def _whole(self, at: CompressionPoint, i: int) -> float:
        """Return the score sum of all tokens of a layer, in any tier or dropped."""
        of_heads = at.policy_state.worth.total[i].double().sum(1)
        if i in at.policy_state.faded.total:
            of_heads = of_heads + at.policy_state.faded.total[i].double().sum(1)
        if heads := at.policy_state.heads:
            of_heads = of_heads * of_heads.new_tensor(heads[i])
        return float(of_heads.sum())
