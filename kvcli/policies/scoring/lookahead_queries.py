"""Base of policies that score slots by queries: those of the newest prompt tokens, or of a short provisional answer.

The answer (`lookahead`) is generated outside the KV cache (Lookahead-Q, arXiv 2505.20334). As in the paper, its queries
replace those of the prompt. It is decoded greedily and without a drafter, whatever the sampler: with queries of draft
rows, the kept slots would depend on the drafter. Its first row recomputes the newest token, as none follows it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from kvcli.policies.scoring.topk import TopK
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.compression_point import CompressionPoint
    from kvcli.engine.policy.policy import PolicyRequirements
    from kvcli.kv.slots import Masks


@dataclass(frozen=True)
class QueryScored(TopK):
    """A score by recorded queries: of the last prompt tokens, or of a provisional answer."""

    lookahead: Annotated[int, Range(0)] = 0  # tokens of a provisional answer whose queries vote instead; 0 = none

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Require the newest queries. Raises BadModel if `lookahead` is set and the model has recurrent layers."""
        if self.lookahead:
            why = "the trial answer would change its state"
            lm.recurrent_layers.refuse(lm.info.id, why, ["--set policy.lookahead=0"])
        return self.want(lm)

    def extra_rows(self, n: int) -> int:
        """Return one row per token of the provisional answer."""
        return self.lookahead if n else 0

    def select(self, at: CompressionPoint) -> Passes[Masks]:
        """Select as all score policies do; after prefill, first record the queries of a provisional answer."""
        if self.lookahead and at.phase == "read":
            at = yield from ahead(at, self.lookahead)
        return self.best(at, at.policy_state.compressed(at))


def ahead(at: CompressionPoint, most: int) -> Passes[CompressionPoint]:
    """Return the compression point with the queries of a provisional answer of up to `most` tokens recorded.

    If the context window has no capacity for further tokens, only the query of the newest token is recorded.
    """
    import torch

    from kvcli.engine.forward_request import ForwardRequest, Rows
    from kvcli.engine.policy.compression_point import QueryRecorder
    from kvcli.engine.policy.policy import PolicyRequirements
    from kvcli.kv.views.uncaptured import KVOverlay
    from kvcli.policies.scoring.replay import SlotsBeforeView

    lm, n = at.lm, len(at.ids)
    recorder, token = QueryRecorder(lm, at.kv.dtype, PolicyRequirements(most)), at.ids[-1]
    held: dict[int, tuple[Tensor, Tensor]] = {}
    pos: Sequence[int] = ()
    for where in range(n - 1, min(n - 1 + most, lm.limit)):
        rows = Rows.chain([token], where)
        past = KVOverlay(at.kv, lm.shapes, held, pos) if held else at.kv if where >= n else SlotsBeforeView(at, n - 1)
        made = yield ForwardRequest(lm, rows, past, want=[0], record_queries=[0])
        recorder.take(rows, [0], made.queries, [0])
        if (token := int(made.logits[0].argmax())) in lm.stop_ids:
            break
        if where >= n:  # the keys of the newest stored token are already in the KV cache
            fresh = {layer: (f.k, f.v) for layer, f in made.fresh.items()}
            held = {i: tuple(torch.cat(p, 1) for p in zip(held[i], f, strict=True)) if held else f  # type: ignore[misc]
                    for i, f in fresh.items()}  # fmt: skip
            pos = [*pos, where]
    return replace(at, query_recorder=recorder)
