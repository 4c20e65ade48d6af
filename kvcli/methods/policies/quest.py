"""Quest: select pages by an upper bound of their attention scores.

A page is a range of positions. The channel-wise minimum and maximum of its keys bound every score in it from above, and
the pages with the highest bound are read. The choice is made per KV head, over all queries of its group; the paper
chooses per query head. Sinks and the newest tokens are always read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.engine.policy.policy import PerLayerPolicy, ProtectedTokens
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots
    from kvcli.kv.views.view import Selection


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

        from kvcli.kv.sparse.index import box_scores
        from kvcli.kv.views.view import Selection

        mask = ProtectedTokens(self.sinks, self.recent).covers(s.pos, at.kinds)
        if not s.n_slots or not at.q.shape[1]:
            return mask
        low, high = self._bounds(s, at.policy_state or Selection())
        held = low[..., 0] <= high[..., 0]  # [K, P]; a page without stored slots of a head has no bounds
        rows = at.q.to(s.k.dtype).reshape(s.k.shape[0], -1, s.k.shape[2])  # [K, G*w, D]
        score = box_scores(rows, low, high).amax(1).masked_fill(~held, -torch.inf)
        best = score.topk(min(self.pages, held.shape[1]), dim=1).indices
        chosen = torch.zeros_like(held).scatter_(1, best, True)
        return (mask | chosen.gather(1, self._page_of(s))) & (s.pos >= 0)

    def _bounds(self, s: Slots, last: Selection) -> tuple[Tensor, ...]:
        """Return the minimum and maximum [K, P, D] of the keys of each page. Those of the last selection are continued,
        so that only keys stored since are read."""
        from torch.nn.functional import pad

        from kvcli.kv.slots import last as newest

        new = newest(s, s.n_slots - last.n)
        if new.n_slots:
            page, empty = self._page_of(new), (new.pos < 0).unsqueeze(-1)
            old, wide = last.summary or (s.k[:, :0], s.k[:, :0]), page.unsqueeze(-1).expand_as(new.k)
            grow = (0, 0, 0, max(0, int(page.max()) + 1 - old[0].shape[1]))
            low, high = (
                pad(t, grow, value=none).scatter_reduce_(1, wide, new.k.masked_fill(empty, none), how)
                for t, none, how in zip(old, (math.inf, -math.inf), ("amin", "amax"), strict=True)
            )
            last.summary = low, high
        return last.summary

    def _page_of(self, s: Slots) -> Tensor:
        return (s.pos.clamp(min=0) // self.page).long()  # [K, S]
