"""Precision budget within `memory.budget`: each token gets a number of bits by its score, or is dropped.

More tokens in fewer bits beat fewer tokens in full (More Tokens, Lower Precision, arXiv 2412.12706). The score of a
token comes from another method; scores that are no attention are divided by the head's sum, so that layers and heads
are comparable and each gets what it needs (PrefixKV, arXiv 2412.03409). A head map weights the heads (HeadKV, arXiv
2410.19258). One knapsack (plan.py) gives each slot its level. While the answer grows, new tokens compete at each
compression point, the price rises, and slots are demoted further by their stored scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from kvcli.engine.policy.policy import Policy
from kvcli.kv.footprint import NO_SIZES, Footprint, ModelSizes
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.policies.scoring.topk import TopK
    from kvcli.settings.profile import Needs


@dataclass(frozen=True)
class PrecisionBudgetSettings(Policy):
    """Precision budget (after More Tokens, 2024, arXiv 2412.12706): keeps more tokens in fewer bits, by importance.

    With 50% of the bytes, the demo model's accuracy is 0.955; dividing them takes 845 ms (measurements/policies.md).
    """

    score: Literal["kvzip", "expected", "snap", "keydiff"] = "kvzip"  # policy that scores tokens
    headmap: str = ""  # file of `kvcli profile-heads` or DuoAttention: weights of heads; auto = measured once
    sinks: Annotated[int, Range(0)] = 4  # first tokens, always kept in full precision
    recent: Annotated[int, Range(1)] = 60  # newest tokens, always kept in full precision
    protect: bool = True  # always keep the system prompt and tool results in full precision
    compression_interval: Annotated[int, Range(1)] = 64  # generated tokens between two compression points

    @property
    def needs(self) -> Needs | None:
        needs: Needs | None = getattr(self.scorer, "needs", None)
        return replace(needs, key="score") if needs else None

    @property
    def scorer(self) -> TopK:
        """The scoring method."""
        from kvcli.methods.policies.expected_attention import Expected
        from kvcli.methods.policies.keydiff import KeyDiff
        from kvcli.methods.policies.kvzip import KVzip
        from kvcli.methods.policies.snapkv import Snap

        kinds: dict[str, Callable[..., TopK]] = {"kvzip": KVzip, "expected": Expected, "snap": Snap, "keydiff": KeyDiff}
        return kinds[self.score](sinks=self.sinks, recent=self.recent, protect=self.protect)

    def footprint(self, n: int, of: ModelSizes = NO_SIZES) -> Footprint:
        """Return the footprint of the scoring method, with all slots: how many tokens are dropped depends on the
        text."""
        says = f"the tokens that fit a budget of bytes, by {self.scorer.by}"
        return replace(self.scorer.footprint(n, of), slots=n, peak=n, says=says, is_uneven=True)
