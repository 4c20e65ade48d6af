"""Quest: select pages by an upper bound of their attention scores.

A page is a range of positions. The channel-wise minimum and maximum of its keys bound every score in it from above, and
the pages with the highest bound are read. The choice is made per KV head, over all queries of its group; the paper
chooses per query head. Sinks and the newest tokens are always read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.engine.policy.policy import PerLayerPolicy, ProtectedTokens
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class Quest(PerLayerPolicy):
    """Quest (Tang et al., 2024, arXiv 2406.10774): keeps first and newest tokens and pages of highest score bounds.

    Lookahead rows over 16 + 48 tokens and 32 pages of 16 bring 1.25 tokens per pass (measurements/lab-log.md).
    """

    page: Annotated[int, Range(1)] = 16  # tokens per page
    pages: Annotated[int, Range(1)] = 32  # pages read per KV head
    sinks: Annotated[int, Range(0)] = 16  # first tokens, always read
    recent: Annotated[int, Range(1)] = 64  # newest tokens, always read

    splits_heads: ClassVar[bool] = True
    reads_queries: ClassVar[bool] = True

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        """Select by the current queries; in a cache view these are the queries of the running forward pass."""
        import torch

        q = at.q
        n_kv, n_slots, dim = s.k.shape
        mask = ProtectedTokens(self.sinks, self.recent).covers(s.pos, at.kinds)
        if not n_slots or not q.shape[1]:
            return mask
        page = (s.pos.clamp(min=0) // self.page).long()  # [K, S]
        count = int(page.max()) + 1
        wide = page.unsqueeze(-1).expand(-1, -1, dim)
        empty = (s.pos < 0).unsqueeze(-1)
        low = s.k.new_full((n_kv, count, dim), torch.inf)
        high = s.k.new_full((n_kv, count, dim), -torch.inf)
        low.scatter_reduce_(1, wide, s.k.masked_fill(empty, torch.inf), "amin")
        high.scatter_reduce_(1, wide, s.k.masked_fill(empty, -torch.inf), "amax")
        held = (low <= high).all(-1)  # [K, P]; a page without stored slots of a head has no bounds
        rows = q.to(s.k.dtype).reshape(n_kv, -1, dim)  # [K, G*w, D]
        low, high = (t.masked_fill(~held.unsqueeze(-1), 0) for t in (low, high))
        # sum over channels of max(q·low, q·high): positive parts of q times maxima, negative parts times minima
        bound = rows.clamp(min=0) @ high.transpose(1, 2) + rows.clamp(max=0) @ low.transpose(1, 2)  # [K, G*w, P]
        score = bound.amax(1).masked_fill(~held, -torch.inf)
        best = score.topk(min(self.pages, count), dim=1).indices
        chosen = torch.zeros_like(held).scatter_(1, best, True)
        return (mask | chosen.gather(1, page)) & (s.pos >= 0)
