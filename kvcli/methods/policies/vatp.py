"""VATP: score slots by attention of the newest queries times the values' L1 norm.

The authors published two variants. This is the one on top of Scissorhands, with the defaults of `queries` and `sinks`
in the authors' code. The other one, on top of H2O, sums the attention of all queries and is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.policies.scoring.lookahead_queries import QueryScored
from kvcli.policies.scoring.topk import Alloc
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class Vatp(QueryScored):
    """VATP (Guo et al., 2024, arXiv 2406.12335): keeps tokens by attention times the L1 norm of their values.

    With 50% of the tokens, the demo model's accuracy is 0.448: 0.507 less than with all (measurements/policies.md).
    """

    alloc: Alloc = "uniform"
    sinks: Annotated[int, Range(0)] = 20  # first tokens, always kept
    queries: Annotated[int, Range(1)] = 400  # newest tokens whose queries score the others

    name: ClassVar[str] = "vatp"
    by: ClassVar[str] = "attention from the end of the prompt, times the size of the values"

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the mean attention times the L1 norm of the value."""
        mass = at.mass(s)
        return mass * s.v.abs().sum(2, dtype=mass.dtype)
