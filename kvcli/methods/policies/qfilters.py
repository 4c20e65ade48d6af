"""Q-Filters: score slots by how far their keys point in the main direction of the queries.

The paper computes the directions beforehand, from texts. Here they are those of the prompt's own newest queries, so no
file is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.policies.scoring.lookahead_queries import QueryScored
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class QFilters(QueryScored):
    """Q-Filters (Godey et al., 2025, arXiv 2503.02812): keeps tokens whose keys point where queries point.

    Not measured here.
    """

    queries: Annotated[int, Range(1)] = 256  # newest queries from which the direction of a head is computed

    name: ClassVar[str] = "qfilters"
    by: ClassVar[str] = "keys in the direction of the queries"
    is_share: ClassVar[bool] = False

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the dot product of each key with the mean direction of its query heads.

        The direction of a head is the first right singular vector of its queries, towards their mean.
        """
        from kvcli.kv.formats.format import singular_vectors
        from kvcli.policies.scoring.token_units import wide

        k, q = wide(s.k), wide(at.q)  # [K, S, D], [H, w, D]
        if not q.shape[1]:  # without queries all keys are equally likely
            return k.new_zeros(s.pos.shape)
        way = singular_vectors(q, 1)[:, 0]  # [H, D]
        way = way * (way * q.mean(1)).sum(1, keepdim=True).sign()
        return (k * way.view(k.shape[0], -1, 1, k.shape[2]).mean(1)).sum(2)
