"""H2O, heavy hitters: score slots by accumulated attention (arXiv 2306.14048; Scissorhands, arXiv 2305.17118).

While answering, every query is counted once; of a prompt, the last `queries` of each chunk. One number per head and
position is stored, float32 (float64 in a float64 model): 1/D of the keys and values of the whole sequence in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.policies.scoring.running_scores import RunningScores
from kvcli.policies.scoring.topk import TopK
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import CompressionPoint, LayerContext, PolicyRequirements
    from kvcli.kv.slots import Masks, Slots


def add_recorded(sums: RunningScores, s: Slots, at: LayerContext) -> None:
    """Add the attention of the queries recorded since the last call to `sums`."""
    first = int((at.q_pos <= sums.last.get(at.layer, -1)).sum())
    if first == at.q.shape[1] or not s.n_slots:
        return
    gained = at.mass(s, first, "sum").masked_fill(s.pos < 0, 0.0)
    total = gained.new_zeros(s.pos.shape[0], at.n)
    if (before := sums.total.get(at.layer)) is not None:
        total[:, : before.shape[1]] = before
    sums.total[at.layer] = total.scatter_add_(1, s.pos.clamp(min=0).long(), gained)
    sums.last[at.layer] = int(at.q_pos[-1])


@dataclass(frozen=True)
class H2O(TopK):
    """H2O, heavy hitters (2023, arXiv 2306.14048; Scissorhands, arXiv 2305.17118): keeps the tokens attended to most.

    With 50% of the tokens, the demo model's accuracy is 0.365, or 0.59 less than with all (measurements/policies.md).
    """

    keep_new: Annotated[int, Range(0)] = 512  # generated tokens kept per head; 0 = all
    queries: Annotated[int, Range(1)] = 64  # newest queries that score tokens; at least compression_interval

    name: ClassVar[str] = "h2o"
    by: ClassVar[str] = "accumulated attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries < self.compression_interval:
            raise ValueError(
                f"queries = {self.queries} is less than compression_interval = {self.compression_interval}: "
                "some would never be recorded"
            )

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Require the queries since the last compression point."""
        return self.want(lm, lambda: RunningScores(lm))

    def select(self, at: CompressionPoint) -> Passes[Masks] | Masks:
        """Add the recorded queries, even if no slot competes now, then select as all score policies do."""
        for i in at.full_layers:
            add_recorded(at.policy_state.own, *at.layer(i))
        return super().select(at)

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the accumulated attention."""
        import torch

        if (total := at.policy_state.own.total.get(at.layer)) is None:  # no query counted yet: equal scores, newest win
            return torch.zeros_like(s.pos, dtype=torch.float32)
        found: Tensor = total.gather(1, s.pos.clamp(min=0).long())
        return found
