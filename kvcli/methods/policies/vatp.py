"""VATP: what the newest queries look at stays, by the L1 norm of its values (Guo et al., arXiv 2406.12335).

`queries` and `sinks` are those of the authors' code over Scissorhands. Over H2O the factor is the same, the attention
that of all queries so far.
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
    """Keep what the newest queries look at, times the L1 norm of its value (VATP, arXiv 2406.12335)."""

    alloc: Alloc = "uniform"
    sinks: Annotated[int, Range(0)] = 20
    queries: Annotated[int, Range(1)] = 400  # newest tokens whose queries count

    name: ClassVar[str] = "vatp"
    by: ClassVar[str] = "what its end looks at and how large its values are"

    def requirements(self, lm: LM) -> PolicyRequirements:
        """The queries that count."""
        return self.looks(lm, self.queries)

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Mean attention times the sum of the value's absolute entries."""
        mass = at.mass(s)
        return mass * s.v.abs().sum(2, dtype=mass.dtype)
