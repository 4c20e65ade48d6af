"""A short provisional answer, written beside the store so that its queries can vote (Lookahead-Q, arXiv 2505.20334).

The paper lets them replace the newest queries of the prompt, and so does this. It is written greedily and without a
drafter, whatever the text is drawn by: queries of a drafter's rows would make what is kept, and so the text, depend on
who drafts. Its first row is the newest stored token, read again, as a boundary does not know the one that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from kvcli.policies.scoring.topk import TopK
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import Steps
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.compression_point import CompressionPoint
    from kvcli.engine.policy.policy import PolicyRequirements
    from kvcli.kv.slots import Masks


@dataclass(frozen=True)
class QueryScored(TopK):
    """A score by queries that were heard of the end of a prompt, or that an answer to it would have."""

    lookahead: Annotated[int, Range(0)] = 0  # tokens of a provisional answer whose queries vote instead; 0 = none

    def looks(self, lm: LM, recent: int) -> PolicyRequirements:
        """The newest queries. Raises BadModel for a model with states where an answer is to be tried."""
        if self.lookahead:
            why = "an answer that is only tried would go into it"
            lm.mixers.refuse(lm.info.id, why, ["--set policy.lookahead=0"])
        return self.want(lm, recent=recent)

    def extra_rows(self, n: int) -> int:
        """A row for each token of the provisional answer."""
        return self.lookahead if n else 0

    def select(self, at: CompressionPoint) -> Steps[Masks]:
        """As all, once the answer was tried where a prompt has been read."""
        if self.lookahead and at.phase == "read":
            at = yield from ahead(at, self.lookahead)
        return self.best(at, at.memory.compressed(at))


def ahead(at: CompressionPoint, most: int) -> Steps[CompressionPoint]:
    """The same boundary, at which the queries of an answer of `most` tokens were heard; it may end before.

    Where the window has no room for any, only the newest token's counts.
    """
    import torch

    from kvcli.engine.forward_request import ForwardRequest
    from kvcli.engine.policy.query_recorder import QueryRecorder
    from kvcli.engine.prefill.kv_overlay import KVOverlay
    from kvcli.engine.rows import Rows
    from kvcli.policies.scoring.replay import PrefixCacheView

    lm, n = at.lm, len(at.ids)
    heard, token = QueryRecorder(most, lambda n: ()), at.ids[-1]
    held: dict[int, tuple[Tensor, Tensor]] = {}
    pos: Sequence[int] = ()
    for where in range(n - 1, min(n - 1 + most, lm.limit)):
        rows = Rows.chain([token], where)
        past = KVOverlay(at.kv, lm.shapes, held, pos) if held else at.kv if where >= n else PrefixCacheView(at, n - 1)
        made = yield ForwardRequest(lm, rows, past, want=[0], record_queries=[0])
        heard.take(rows, [0], made.queries, [0])
        if (token := int(made.logits[0].argmax())) in lm.stop_ids:
            break
        if where >= n:  # the newest stored token has its keys in the store
            fresh = {layer: (f.k, f.v) for layer, f in made.fresh.items()}
            held = {i: tuple(torch.cat(p, 1) for p in zip(held[i], f, strict=True)) if held else f  # type: ignore[misc]
                    for i, f in fresh.items()}  # fmt: skip
            pos = [*pos, where]
    return replace(at, heard=heard)
