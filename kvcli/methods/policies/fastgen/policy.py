"""FastGen: an eviction policy that adapts to the attention of each head.

After prefill, the attention of a few prompt rows is measured to find how much of it each head would lose under each of
a few candidate policies (recovery.py). The head gets the cheapest candidate that loses little enough or, with `keep`,
all heads share one budget (head_knapsack.py). While a sequence has no evictable tokens beyond the guard window, nothing
can be measured: all tokens are kept, the answer's too, until a later prompt is long enough. `paper = true` measures as
published: all rows, their plain mean, no guard window. Heads named by `headmap` keep everything. Sliding-window layers
are not evicted. With `recovery = "auto"` T is searched: the newest prompt tokens are predicted again from the slots
that heads would keep, and T is the lowest that predicts them well.

A later measurement (`reprofile_interval`) covers the slots that the cache still shows: a head that then needs more
keeps more of these and of new tokens. Evicted slots are gone; demoted ones stay in their tier, where rows read them,
because a tiered cache moves no slot up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.engine.policy.policy import Policy, PolicyRequirements, ProtectedTokens
from kvcli.kv.footprint import NO_SIZES, Footprint, ModelSizes
from kvcli.methods.policies.fastgen.settings import FastGenSettings

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import CompressionPoint
    from kvcli.kv.slots import Masks
    from kvcli.methods.policies.fastgen.text_state import FastGenState


@dataclass(frozen=True)
class FastGen(FastGenSettings, Policy):
    """FastGen (Ge et al., 2023, arXiv 2310.01801): keeps in each head special, newest, most attended, or all tokens.

    With 50% of the tokens, the demo model's accuracy is 0.955, as with all of them (measurements/policies.md).
    """

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Return the policy's requirements. Raises BadInput for a head map that cannot be read or is of another model,
        and BadModel if heads store no keys of their own."""
        from kvcli.engine.sequence.state import QUESTION, SYSTEM, TOOLS
        from kvcli.methods.policies.fastgen.text_state import FastGenState
        from kvcli.policies.scoring.headmap import refuse_latents

        refuse_latents(lm, 'policy.name = "fastgen"')
        own = self.on(lm.device.type)
        if self.recovery == "auto" and self.replay and not self.keep:
            try_ = ["--set policy.recovery=0.95"]
            lm.recurrent_layers.refuse(lm.info.id, "tokens in its middle cannot be predicted again", try_)
        full = self.full_heads(lm)
        since = own.compression_interval if any("frequent" in name for name in own.candidates) else 0
        again = own.rows if own.reprofile_interval else 0  # rows recorded for a new measurement
        asked = frozenset({QUESTION} if self.protect_question and not self.paper else ())
        kinds = asked | ({SYSTEM, TOOLS} if self.protect and not self.paper else set())
        return PolicyRequirements(
            recent_queries=max(since, again),
            probes=own.probes,
            kinds=True,
            marks=asked,
            guard=ProtectedTokens(self.sinks, self.guarded, kinds),
            policy_state=lambda: FastGenState(own, lm, full),
        )

    def full_heads(self, lm: LM) -> list[list[bool]]:
        """Return the heads [L][K] that keep everything by the head map; [] without one. Raises BadInput as above."""
        from kvcli.methods.policies.fastgen.shipped_map import shipped_map
        from kvcli.policies.scoring.headmap import head_rows

        path = str(shipped_map(lm) or "") if self.headmap == "shipped" else self.headmap
        return [[value >= self.headmap_from for value in row] for row in head_rows(path, lm)] if path else []

    def select(self, at: CompressionPoint) -> Passes[Masks]:
        """Select the slots of each head by its choice, which is made after prefill."""
        found: Masks = yield from at.policy_state.choose(at)
        return found

    def footprint(self, n: int, of: ModelSizes = NO_SIZES) -> Footprint:
        """Return the footprint: all slots until heads are measured, after prefill, and then, without `keep`, as many as
        the text needs, so all; and the attention of the measured rows, at most `max_profile_mb`."""
        share = f"{self.keep:.0%} of the tokens" if self.keep else "the tokens that predict the newest ones"
        if not self.keep and self.recovery != "auto":
            share = f"tokens with {self.recovery:.0%} of the attention"
        attended = sum(row + 1 for row in self.on(of.device).probes(n))
        weights = of.heads * attended * (2 if of.number == 2 else 4)
        return Footprint(
            min(n, max(round(self.keep * n), self.sinks + self.guarded)) if self.keep else n,
            n,
            scratch=min(int(self.max_profile_mb * 2**20), weights),
            says=f"{share} in each head, by its attention pattern",
            is_uneven=True,
        )

    def describe_result(self, policy_state: FastGenState) -> str:
        """Return in words the T that was found, and that heads were chosen without a head map because none ships."""
        found = [f"by T = {policy_state.recovery:.2f}"] if self.recovery == "auto" else []
        is_unmapped = self.headmap == "shipped" and not policy_state.full and bool(policy_state.chosen())
        found += ["without a head map"] * is_unmapped
        return " ".join(found)
