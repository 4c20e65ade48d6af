"""Base of policies that score slots by queries: those of the newest prompt tokens, or of a short provisional answer.

The answer (`lookahead`) is generated outside the KV cache (Lookahead-Q, arXiv 2505.20334). As in the paper, its queries
replace those of the prompt. It is decoded greedily and without a drafter, whatever the sampler: with queries of draft
rows, the kept slots would depend on the drafter. Its first row recomputes the newest token, as none follows it yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.footprint import NO_SIZES, Footprint, ModelSizes
from kvcli.policies.scoring.topk import TopK
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import CompressionPoint, PolicyRequirements
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

    def footprint(self, n: int, of: ModelSizes = NO_SIZES) -> Footprint:
        """Return the footprint, with one row per token of the provisional answer."""
        return replace(super().footprint(n, of), again=self.lookahead if n else 0)

    def select(self, at: CompressionPoint) -> Passes[Masks]:
        """Select as all score policies do; after prefill, first record the queries of a provisional answer."""
        if self.lookahead and at.phase == "read":
            at = yield from ahead(at, self.lookahead)
        return self.best(at, at.policy_state.compressed(at))


def ahead(at: CompressionPoint, most: int) -> Passes[CompressionPoint]:
    """Return the compression point with the queries of a provisional answer of up to `most` tokens recorded.

    If the context window has no capacity for further tokens, only the query of the newest token is recorded.
    """
    from kvcli.engine.drafting.draft_kv import DraftTreeKV
    from kvcli.engine.forward_request import ForwardRequest, Rows
    from kvcli.engine.policy.policy_inputs import QueryRecorder
    from kvcli.policies.scoring.replay import SlotsBeforeView

    lm, n = at.lm, len(at.ids)
    recorder, tree = QueryRecorder(lm, at.kv.dtype, most), DraftTreeKV(lm, at.kv, n)
    # the keys of the newest stored token are already in the KV cache
    newest = Rows.chain(at.ids[-1:], n - 1)
    made = yield ForwardRequest(lm, newest, SlotsBeforeView(at, n - 1), want=[0], record_queries=[0])
    recorder.take(newest, [0], made.queries, [0])
    for where in range(n, min(n - 1 + most, lm.limit)):
        if (token := int(made.logits[0].argmax())) in lm.stop_ids:
            break
        made = yield from tree.add([token], [len(tree) - 1], record_queries=[0])
        recorder.take(Rows.chain([token], where), [0], made.queries, [0])
    return replace(at, query_recorder=recorder)
