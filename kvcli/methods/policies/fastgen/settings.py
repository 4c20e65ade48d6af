"""Settings of FastGen, as a profile states them, and the numbers that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self, get_args

from kvcli.settings.schema import Range

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
class FastGenSettings:
    """Settings of FastGen."""

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
    protect_question: bool = False  # keep the question of the last message in every head
    punct_cap: Annotated[float, Range(0, 1)] = 0.15  # prompt share above which only sentence/line ends count
    probe_rows: Literal["auto"] | Annotated[int, Range(1)] = "auto"  # rows measured beside the last; auto = 16 on a CPU
    crossfit: bool = True  # choose frequent tokens by other rows than those that measure recovery
    gqa: Literal["mean", "min"] = "mean"  # mean or minimum over the query heads of a KV head
    headmap: str = ""  # file of `kvcli profile-heads` or DuoAttention; auto = measured once; shipped = kvcli's, if any
    headmap_from: Annotated[float, Range(0, 1)] = 0.5  # score in that file from which a head keeps all
    reprofile_interval: Annotated[int, Range(0)] = 0  # generated tokens until tokens left are measured again; 0 = never
    compression_interval: Annotated[int, Range(1)] = 64  # generated tokens between two compression points
    score_decay: Annotated[float, Range(above=0, most=1)] = 1.0  # weight of older rows, per token; 1 = equal
    max_profile_mb: Annotated[float, Range(above=0)] = 256.0  # MiB for measurement; larger jobs are split into blocks
    paper: bool = False  # as published: mean of up to 1,024 rows, five policies, no recent, crossfit or protect

    def __post_init__(self) -> None:
        published = {"criterion": "mean", "recent": 0, "crossfit": False, "policies": PAPER, "probe_rows": "auto"}
        for key, own in published.items():
            given = getattr(self, key)
            if self.paper and given not in (own, FastGenSettings.__dataclass_fields__[key].default):
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

    def on(self, kind: str) -> Self:
        """Return the settings for a device of this kind."""
        is_auto = self.probe_rows == "auto" and not self.paper and kind == "cpu"
        return replace(self, probe_rows=ROWS_ON_CPU) if is_auto else self


def spread(start: int, end: int, most: int) -> list[int]:
    """Return at most `most` integers from start to end - 1, at equal distances."""
    n = max(0, end - start)
    count = min(n, most)
    return [start + i * n // count for i in range(count)]
