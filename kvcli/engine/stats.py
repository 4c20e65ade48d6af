"""Stats: what a run of steps amounts to, acceptance in both definitions and bytes per tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.drafting.report import DraftReport
    from kvcli.engine.rows import Rows
    from kvcli.settings.schema import Order


FEW = 32  # tokens; a rate over fewer says more about the moment than about the machine


def _nothing(row: int) -> list[float]:
    return []


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass did. `path` and `new` have the same length: each accepted row yields the token after it."""

    rows: Rows
    logits: Tensor  # [N, V], tree rows first, then the scouts whose logits were wanted
    path: list[int]  # accepted rows, row 0 first
    new: list[int]  # tokens added to the text
    seconds: float  # wall time from proposing to committing; of a step that is over, to its end
    hook_output: Callable[[int], list[float]] = _nothing  # what the drafter takes by its hook from, by row of logits
    queries: Sequence[Tensor] = ()  # per layer [H, tree, D], where the draft asked to hear them
    hidden: Tensor | None = None  # by row of logits [N, E], behind the last norm, where the draft asked

    @property
    def n_drafted(self) -> int:
        """Guessed rows in this pass."""
        return self.rows.tree - 1

    @property
    def n_accepted(self) -> int:
        """Guessed rows that the model agreed with."""
        return len(self.path) - 1


@dataclass(slots=True)
class Stats:
    """Folded steps of one turn. Times in seconds, sizes in bytes, counts in tokens."""

    prompt: int = 0
    cached: int = 0
    reused: int = 0  # taken over from other texts
    new: int = 0
    load: float = 0.0
    read: float = 0.0
    order: Order = "chunks"  # what of the prompt was finished first
    first_token: float = 0.0
    decode: float = 0.0
    passes: int = 0
    drafted_passes: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    paused_passes: int = 0
    paused_why: str = ""  # in words, while drafting pauses
    drafts_by: str = ""  # name of a second model that drafts
    sources: dict[str, int] = field(default_factory=dict)  # source -> accepted guesses that it was surest of
    scout_rows: int = 0
    scouts_why: str = ""  # in words, while scouts rest
    free_rows: int | None = None  # rows of a pass that takes at most a tenth longer than one; None = not measured
    histogram: list[int] = field(default_factory=list)  # histogram[i]: drafted passes that accepted i guesses
    recent: list[int] = field(default_factory=list)  # tokens gained by each of the last passes, for the sparkline
    kv: dict[str, int] = field(default_factory=dict)  # bytes by tier
    page_hit_rate: float | None = (
        None  # share of what recall read of host memory or a disk that was near already; None = none
    )
    host_access: str = ""  # how rows reach slots in host memory, in words; "" = there are none
    kv_fp16: int = 0  # the same slots at 16 bit, for the compression factor
    peak: int = 0
    used: int = 0  # of a GPU, by all programs, as its driver says when the turn ends; 0 = there is none
    total: int = 0  # that it has
    estimate: int = 0  # of the peak, before the run; 0 = none was made
    available: int = 0  # memory there was for the run when it began; 0 = not looked at
    context: int = 0
    limit: int = 0
    shortages: list[str] = field(
        default_factory=list
    )  # what was done when memory ran out, or a model that drafts broke, in words
    approx: str = ""  # what the answer may miss of the text, in words; "" = nothing
    sampling: dict[str, float] = field(default_factory=dict)  # the sampler's settings, by their keys in a profile
    plain: list[float] = field(default_factory=list)  # seconds of the last passes that carried no draft

    def add_step(self, step: Step) -> None:
        """Count one decoding step."""
        self.passes += 1
        self.new += len(step.new)
        self.decode += step.seconds
        self.scout_rows += step.rows.n_rows - step.rows.tree
        self.recent.append(len(step.new))
        del self.recent[:-64]
        if step.n_drafted:
            self.draft(step.n_drafted, step.n_accepted)
        elif step.rows.n_rows == 1:
            self.plain.append(step.seconds)
            del self.plain[:-64]

    def draft(self, guessed: int, accepted: int) -> None:
        """Count the guesses of one pass."""
        self.drafted_passes += 1
        self.draft_tokens += guessed
        self.accepted_tokens += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    def add_draft_report(self, before: DraftReport, after: DraftReport) -> None:
        """What drafting did in this turn, from its reports before and after."""
        self.paused_passes = after.paused_passes - before.paused_passes
        self.paused_why = after.reason if after.paused else ""
        self.sources = {name: n - before.accepted_by.get(name, 0) for name, n in after.accepted_by.items()}
        self.scouts_why = after.scouts.why if after.scouts else ""
        self.free_rows, self.drafts_by = after.free_rows, after.by
        if after.fault:
            self.shortages.append(f"{after.fault}; the answer went on without it")

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per pass that carried a draft: 1 + accepted / drafted passes."""
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
        """Rows of a pass: the pending token, guesses, scouts."""
        return 1 + (self.draft_tokens + self.scout_rows) / self.passes if self.passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all guessed rows."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def per_position(self) -> list[float]:
        """per_position[i]: share of drafted passes that accepted more than i guesses."""
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
        """Decoding speed over that of its passes without a draft; None with none of either kind, or few tokens."""
        if not self.plain or not self.drafted_passes or self.decode <= 0 or self.new < FEW:
            return None
        return self.decode_tok_s * median(self.plain)

    @property
    def kv_bytes(self) -> int:
        return sum(self.kv.values())
