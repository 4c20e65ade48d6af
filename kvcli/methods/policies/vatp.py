"""VATP: score slots by attention of the newest queries times the values' L1 norm (Guo et al., arXiv 2406.12335).

The defaults of `queries` and `sinks` are those of the authors' code on top of Scissorhands. On top of H2O the factor
is the same, with the attention of all queries so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.policies.scoring.lookahead_queries import QueryScored
from kvcli.policies.scoring.topk import Alloc
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import LayerContext, PolicyRequirements
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class Vatp(QueryScored):
    """Keep tokens by attention of the newest queries times the L1 norm of their values (VATP, arXiv 2406.12335)."""

    alloc: Alloc = "uniform"
    sinks: Annotated[int, Range(0)] = 20  # first tokens, always kept
    queries: Annotated[int, Range(1)] = 400  # newest tokens whose queries score the others

    name: ClassVar[str] = "vatp"
    by: ClassVar[str] = "attention from its end times the size of its values"

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Require the newest `queries` queries."""
        return self.looks(lm, self.queries)

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the mean attention times the L1 norm of the value."""
        mass = at.mass(s)
        return mass * s.v.abs().sum(2, dtype=mass.dtype)
