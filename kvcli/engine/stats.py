"""Statistics of one answer: speed, acceptance rate and tokens per pass, and bytes per tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.drafting.pass_timer import Company
    from kvcli.engine.forward_request import Rows
    from kvcli.settings.schema import Order

# Reports on drafting, for users: shown by `/spec` and `kvcli spec doctor`.


@dataclass(frozen=True, slots=True)
class AcceptanceByMatch:
    """Acceptance of first choices after a match of some length, either verified or compared with the later text."""

    match: str  # match length in tokens, a range
    made: int  # draft tokens
    share: float  # share of them accepted


@dataclass(frozen=True, slots=True)
class LookaheadReport:
    """Gain and cost of lookahead rows."""

    rows: int  # rows of a pass with lookahead
    brought: float | None  # recent tokens per pass that only lookahead proposed
    cost: float | None  # extra time of a pass with lookahead, in plain passes; None = not measured
    rested_passes: int
    why: str  # reason for a pause, in words


@dataclass(frozen=True, slots=True)
class DraftReport:
    """The report that `/spec` shows, in seconds, passes, and speed as a multiple of plain decoding."""

    paused: bool
    reason: str  # why drafting pauses, in words
    paused_passes: int
    plain_pass: float  # median seconds of a pass with one row; 0 = not measured
    gain: float | None  # speedup over plain decoding in the last passes; None = not measured
    row_cost: dict[int, float]  # rows of a pass (upper bound) -> its time in plain passes; measured ones only
    by_source: Mapping[str, tuple[AcceptanceByMatch, ...]] = field(default_factory=dict)
    lookahead: LookaheadReport | None = None  # None = the drafter has no lookahead
    ahead: float | None = None  # time of a draft model's pass, in plain passes; None = no draft model
    by: str = ""  # name of the draft model
    fault: str = ""  # failure of the draft model, in words; decoding continued without it
    # draft source -> accepted tokens for which it was the most confident source
    accepted_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def free_rows(self) -> int | None:
        """Rows of a pass that takes at most 10 % longer than a pass of one row; None = not measured."""
        if not self.row_cost:
            return None
        free = takewhile(lambda cost: cost[1] <= 1.1, sorted(self.row_cost.items()))
        return max((rows for rows, _ in free), default=1)


FEW = 32  # tokens; a rate over fewer is mostly noise


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one decoding step. `path` and `new` have the same length, because each accepted row yields the next
    token."""

    rows: Rows
    logits: Tensor  # [len(rows.want), V]: tree rows first, then the wanted lookahead rows
    path: list[int]  # accepted rows, row 0 first
    new: list[int]  # tokens added to the sequence
    seconds: float  # wall time from proposal to commit; in the step that `step` returns, to its end
    # output of the drafter's logits hook, by row of `logits`
    hook_output: Callable[[int], list[float]] = lambda row: []
    queries: Sequence[Tensor] = ()  # per layer [H, tree, D], if the draft needs them
    hidden: Tensor | None = None  # [len(rows.want), E] by row of `logits`, after the last norm, if the draft needs them
    company: Company | None = None  # what shared the pass; None = nothing, so that `seconds` is its time
    n_passes: int = 1  # forward passes that wrote `new`

    @property
    def n_drafted(self) -> int:
        """Number of draft tokens in this pass."""
        return self.rows.tree - 1

    @property
    def n_accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.path) - 1


@dataclass(slots=True)
class Stats:
    """Summed statistics of one answer. Times in seconds, sizes in bytes, counts in tokens."""

    prompt: int = 0
    cached: int = 0
    reused: int = 0  # prompt tokens whose KV was reused from other sequences
    new: int = 0
    thinking: int = 0  # tokens of the answer that are thinking, marks and forced ends included
    thinking_seconds: float = 0.0
    load: float = 0.0
    read: float = 0.0
    order: Order = "chunks"  # chunked or layer-wise prefill
    first_token: float = 0.0
    decode: float = 0.0
    passes: int = 0
    drafted_passes: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    paused_passes: int = 0
    paused_why: str = ""  # reason, while drafting is paused
    drafts_by: str = ""  # name of the draft model
    # draft source -> accepted tokens for which it was the most confident source
    sources: dict[str, int] = field(default_factory=dict)
    lookahead_rows: int = 0
    lookahead_why: str = ""  # reason, while lookahead is paused
    free_rows: int | None = None  # rows of a pass that takes at most 10 % longer than one row; None = not measured
    histogram: list[int] = field(default_factory=list)  # histogram[i]: drafted passes that accepted i tokens
    recent: list[int] = field(default_factory=list)  # new tokens of each of the last passes
    kv: dict[str, int] = field(default_factory=dict)  # bytes by tier
    # share of the offloaded slots selected by sparse attention that its page cache on the device held already; None =
    # none selected
    page_hit_rate: float | None = None
    host_access: str = ""  # how attention reads slots in host memory, in words; "" = none are there
    kv_fp16: int = 0  # size of the same slots at 16 bit, for the compression factor
    peak: int = 0
    used: int = 0  # GPU memory used by all programs, from the driver at the end of the answer; 0 = no GPU
    total: int = 0  # total GPU memory
    estimate: int = 0  # predicted peak, made before the run; 0 = no prediction
    available: int = 0  # memory available at the start of the run; 0 = not measured
    context: int = 0
    limit: int = 0
    # fallback steps taken when memory ran out, and failures of a draft model, in words
    shortages: list[str] = field(default_factory=list)
    approx: str = ""  # why the answer is approximate, in words; "" = exact
    sampling: dict[str, float] = field(default_factory=dict)  # sampler settings, by profile key
    plain: list[float] = field(default_factory=list)  # seconds of the last passes without a draft

    def add_step(self, step: Step) -> None:
        """Count one decoding step."""
        self.passes += step.n_passes
        self.new += len(step.new)
        self.decode += step.seconds
        self.lookahead_rows += step.rows.n_rows - step.rows.tree
        self.recent.append(len(step.new))
        del self.recent[:-64]
        if step.n_drafted:
            self.draft(step.n_drafted, step.n_accepted)
        elif step.rows.n_rows == step.n_passes == 1:
            self.plain.append(step.seconds)
            del self.plain[:-64]

    def draft(self, drafted: int, accepted: int) -> None:
        """Count the draft tokens of one pass."""
        self.drafted_passes += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    def add_draft_report(self, before: DraftReport, after: DraftReport) -> None:
        """Add the drafting figures of this answer: the difference of the reports before and after it."""
        self.paused_passes = after.paused_passes - before.paused_passes
        self.paused_why = after.reason if after.paused else ""
        self.sources = {name: n - before.accepted_by.get(name, 0) for name, n in after.accepted_by.items()}
        self.lookahead_why = after.lookahead.why if after.lookahead else ""
        self.free_rows, self.drafts_by = after.free_rows, after.by
        if after.fault:
            self.shortages.append(f"{after.fault}; the answer continued without it")

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per drafted pass: 1 + accepted / drafted passes."""
        return 1 + self.accepted_tokens / self.drafted_passes if self.drafted_passes else 1.0

    @property
    def drafted_share(self) -> float:
        """Share of passes that carried a draft."""
        return self.drafted_passes / self.passes if self.passes else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass, passes without a draft included."""
        return self.new / self.passes if self.passes else 0.0

    @property
    def rows_per_pass(self) -> float:
        """Mean rows per pass: pending token, draft tokens and lookahead rows."""
        return 1 + (self.draft_tokens + self.lookahead_rows) / self.passes if self.passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all draft tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def per_position(self) -> list[float]:
        """Acceptance by position: per_position[i] is the share of drafted passes that accepted more than i tokens."""
        total = sum(self.histogram)
        return [sum(self.histogram[i + 1 :]) / total for i in range(len(self.histogram) - 1)] if total else []

    @property
    def decode_tok_s(self) -> float:
        return self.new / self.decode if self.decode > 0 else 0.0

    @property
    def read_tok_s(self) -> float:
        return (self.prompt - self.cached - self.reused) / self.read if self.read > 0 else 0.0

    @property
    def vs_plain(self) -> float | None:
        """Decoding speed relative to this answer's passes without a draft. None unless there are passes of both kinds
        and enough tokens."""
        if not self.plain or not self.drafted_passes or self.decode <= 0 or self.new < FEW:
            return None
        return self.decode_tok_s * median(self.plain)

    @property
    def kv_bytes(self) -> int:
        return sum(self.kv.values())
