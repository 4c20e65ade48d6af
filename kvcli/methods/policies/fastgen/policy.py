"""FastGen: an eviction policy that adapts to the attention of each head.

After prefill, the attention of a few prompt rows is measured to find how much of it each head would lose under each of
a few candidate policies (recovery.py). The head gets the cheapest candidate that loses little enough or, with `keep`,
all heads share one budget (head_knapsack.py). While a sequence has no evictable tokens beyond the guard window, nothing
can be measured: all tokens are kept, the answer's too, until a later prompt is long enough. `paper = true` measures as
published: all rows, their plain mean, no guard window. Heads named by `headmap` keep everything. Sliding-window layers
are not evicted. With `recovery = "auto"` T is searched: the newest prompt tokens are predicted again from the slots
that heads would keep, and T is the lowest that predicts them well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from kvcli.engine.policy.policy import Policy, PolicyRequirements, ProtectedTokens
from kvcli.kv.footprint import NO_SIZES, Footprint, ModelSizes
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.compression_point import CompressionPoint
    from kvcli.kv.slots import Masks
    from kvcli.methods.policies.fastgen.text_state import FastGenState

Candidate = Literal[
    "special", "punct", "local", "frequent", "punct+local", "punct+frequent", "local+frequent", "punct+frequent+local"
]
Ratio = Literal["auto"] | Annotated[float, Range(0, 1)]
CANDIDATES: tuple[Candidate, ...] = get_args(Candidate)
PAPER: tuple[Candidate, ...] = ("special", "punct", "punct+frequent", "punct+frequent+local")
LAST = 32  # newest rows of a prompt that are all measured, at most as many as are spread
ROWS_ON_CPU = 16  # rows spread over the second half of a prompt, and as many newest; more would slow prefill noticeably
ROWS = 128  # rows spread over its second half, on a GPU
RATIO = 0.3  # share of newest and of frequent tokens, as published
PART = 0.4  # share of the budget, if there is one: larger sets leave most heads with the guard window alone
PAPER_ROWS = 1024  # of a longer prompt, so many rows at equal distances are measured


@dataclass(frozen=True)
class FastGen(Policy):
    """FastGen (Ge et al., 2023, arXiv 2310.01801): keeps in each head special, newest, most attended, or all tokens.

    With 50% of the tokens, the demo model's accuracy is 0.955, as with all of them (measurements/policies.md).
    """

    criterion: Literal["mean", "cvar10", "p05"] = "cvar10"  # over rows: mean, mean of the worst 10%, 5th percentile
    recovery: Literal["auto"] | Annotated[float, Range(0, 1)] = 0.8  # attention share kept per head; auto = by kl_max
    kl_max: Annotated[float, Range(above=0)] = 0.005  # of auto: loss of prediction allowed, in nats per token
    replay: Annotated[int, Range(1)] = 64  # of auto: newest prompt tokens predicted again to measure the loss
    keep: Annotated[float, Range(0, 1)] = 0.0  # share of tokens kept, averaged over heads; 0 = by recovery
    policies: tuple[Candidate, ...] = CANDIDATES  # candidates per head, each with special tokens; full is added
    local_ratio: Ratio = "auto"  # newest tokens of a local head, share of the prompt; auto = 0.4 keep, 0.3 without keep
    frequent_ratio: Ratio = "auto"  # most attended tokens kept, as a share of the text; auto = as local_ratio
    recent: Annotated[int, Range(0)] = 128  # newest tokens, kept in every head
    sinks: Annotated[int, Range(0)] = 4  # first tokens, special in every model
    protect: bool = True  # keep the system prompt in every head
    punct_cap: Annotated[float, Range(0, 1)] = 0.15  # prompt share above which only sentence/line ends count
    probe_rows: Literal["auto"] | Annotated[int, Range(1)] = "auto"  # rows measured beside the last; auto = 16 on a CPU
    crossfit: bool = True  # choose frequent tokens by other rows than those that measure recovery
    gqa: Literal["mean", "min"] = "mean"  # mean or minimum over the query heads of a KV head
    headmap: str = ""  # file of `kvcli profile-heads` or DuoAttention: its heads keep all; auto = measured once
    headmap_from: Annotated[float, Range(0, 1)] = 0.5  # score in that file from which a head keeps all
    reprofile_interval: Annotated[int, Range(0)] = 0  # generated tokens between two measurements; 0 = once per prompt
    compression_interval: Annotated[int, Range(1)] = 64  # generated tokens between two compression points
    score_decay: Annotated[float, Range(above=0, most=1)] = 1.0  # weight of older rows, per token; 1 = equal
    max_profile_mb: Annotated[float, Range(above=0)] = 256.0  # MiB for measurement; larger jobs are split into blocks
    paper: bool = False  # as published: mean of up to 1,024 rows, five policies, no recent, crossfit or protect

    def __post_init__(self) -> None:
        published = {"criterion": "mean", "recent": 0, "crossfit": False, "policies": PAPER, "probe_rows": "auto"}
        for key, own in published.items():
            given = getattr(self, key)
            if self.paper and given not in (own, FastGen.__dataclass_fields__[key].default):
                raise ValueError(f"paper = true sets {key} itself, not to {given}")
        if self.keep and self.recovery == "auto":
            words = 'leaves nothing for recovery = "auto" to find; keep = 0 lifts it'
            raise ValueError(f"keep = {self.keep} is a budget and {words}")

    @property
    def candidates(self) -> tuple[str, ...]:
        """Candidates of a head; "full" is last."""
        return (*(PAPER if self.paper else self.policies), "full")

    @property
    def guarded(self) -> int:
        """Newest tokens that every head keeps."""
        return 0 if self.paper else self.recent

    @property
    def reach(self) -> float:
        """Newest tokens that a local head keeps, as a share of the prompt."""
        return self._usual if self.local_ratio == "auto" else self.local_ratio

    @property
    def most(self) -> float:
        """Frequent tokens (most attended to), as a share of the sequence."""
        return self._usual if self.frequent_ratio == "auto" else self.frequent_ratio

    @property
    def _usual(self) -> float:
        return PART * self.keep if self.keep and not self.paper else RATIO

    @property
    def is_crossfit(self) -> bool:
        """True if frequent tokens are chosen on other rows than they are measured on."""
        return self.crossfit and not self.paper

    @property
    def measure(self) -> Literal["mean", "cvar10", "p05"]:
        """The criterion in force."""
        return "mean" if self.paper else self.criterion

    @property
    def least(self) -> float:
        """Share of attention that a head must keep at first; with `recovery = "auto"` all, until T is searched."""
        return 1.0 if self.recovery == "auto" else self.recovery

    @property
    def rows(self) -> int:
        """Rows spread over the second half of a prompt; `auto` = the number on a GPU (see `on`)."""
        return ROWS if self.probe_rows == "auto" else self.probe_rows

    def probes(self, n: int) -> Sequence[int]:
        """Return the rows of a prompt of n tokens to measure, from its second half, as they attend to enough tokens."""
        if self.paper:
            return spread(0, n, PAPER_ROWS)
        half, last = n // 2, max(n // 2, n - min(LAST, self.rows))
        return [*spread(half, last, self.rows), *range(last, n)]

    def of(self, lm: LM) -> FastGen:
        """Return the settings for this model, with `probe_rows = "auto"` resolved."""
        return self.on(lm.device.type)

    def on(self, kind: str) -> FastGen:
        """Return the settings for a device of this kind."""
        is_auto = self.probe_rows == "auto" and not self.paper and kind == "cpu"
        return replace(self, probe_rows=ROWS_ON_CPU) if is_auto else self

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Return the policy's requirements. Raises BadInput for a head map that cannot be read or is of another model,
        and BadModel if heads store no keys of their own."""
        from kvcli.engine.sequence.state import SYSTEM, TOOLS
        from kvcli.methods.policies.fastgen.text_state import FastGenState
        from kvcli.policies.scoring.headmap import head_rows, refuse_latents

        refuse_latents(lm, 'policy.name = "fastgen"')
        own = self.of(lm)
        if self.recovery == "auto" and self.replay and not self.keep:
            try_ = ["--set policy.recovery=0.95"]
            lm.recurrent_layers.refuse(lm.info.id, "tokens in its middle cannot be predicted again", try_)
        rows = head_rows(self.headmap, lm) if self.headmap else []
        full = [[value >= self.headmap_from for value in row] for row in rows]
        since = own.compression_interval if any("frequent" in name for name in own.candidates) else 0
        again = own.rows if own.reprofile_interval else 0  # rows recorded for a new measurement
        kinds = frozenset({SYSTEM, TOOLS}) if self.protect and not self.paper else frozenset()
        return PolicyRequirements(
            recent_queries=max(since, again),
            probes=own.probes,
            kinds=True,
            guard=ProtectedTokens(self.sinks, self.guarded, kinds),
            policy_state=lambda: FastGenState(own, lm, full),
        )

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
        """Return the T that was found, in words."""
        return f"by T = {policy_state.recovery:.2f}" if self.recovery == "auto" else ""


def spread(start: int, end: int, most: int) -> list[int]:
    """Return at most `most` integers from start to end - 1, at equal distances."""
    n = max(0, end - start)
    count = min(n, most)
    return [start + i * n // count for i in range(count)]
