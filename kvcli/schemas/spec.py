"""Documents of `kvcli spec`: measured drafting of a profile on this machine, and its best settings."""

from __future__ import annotations

from statistics import median
from typing import Literal

from pydantic import Field

from kvcli.schemas.base import Bytes, Count, Json, Share
from kvcli.schemas.fit import PassTime


class Range(Json):
    """Range over the repetitions."""

    low: float
    median: float
    high: float


class Kind(Json):
    """Top-1 draft tokens of one kind from a source, verified or only compared with the sampled token."""

    kind: str = Field(description="match length in tokens, or confidence margin in nats")
    made: Count
    share: Share = Field(description="share of correct top-1 draft tokens")


class LookaheadFigures(Json):
    rows: Count = Field(description="rows of a pass with lookahead")
    brought: float | None = Field(description="tokens per pass that only lookahead had drafted; null: not used")
    cost: float | None = Field(description="added time of a pass with lookahead, in plain passes")
    rested_passes: Count
    why: str = Field(description="reason while lookahead is paused; else empty")


class Difference(Json):
    """First difference between the texts with and without drafting."""

    token: Count = Field(description="position among the new tokens, from 1")
    near_tie: bool = Field(description="true: rounding explains the difference")
    margin: float = Field(description="logit difference of the two tokens")
    bound: float = Field(description="largest difference that rounding explains")


class SpecDocument(Json):
    """Result of `kvcli spec doctor`."""

    schema_: Literal["kvcli.spec/2"] = Field(default="kvcli.spec/2", alias="schema")
    kvcli: str
    model: str
    profile: str
    method: str
    workload: str
    context: Count = Field(description="tokens of the prompt")
    new: Count
    reps: Count
    plain_tok_s: Range
    tok_s: Range
    ratio: Range = Field(description="speedup over plain decoding, by repetition")
    predicted: float | None = Field(description="speedup from measured pass times; null: a draft model is used")
    tokens_per_pass: float
    mean_acceptance_length: float
    drafted_share: Share
    rows_per_pass: float
    free_rows: Count | None
    passes: list[PassTime] = Field(description="measured pass times; empty: the measurement took too long")
    accepted_by: dict[str, Count] = Field(description="accepted draft tokens by the most confident source")
    sources: dict[str, list[Kind]]
    lookahead: LookaheadFigures | None
    paused: bool
    reason: str = Field(description="reason while drafting is paused; else empty")
    draft_pass: float | None = Field(description="time of a pass of the draft model, in plain passes")
    view_bytes: Bytes = Field(description="KV copy for lookahead")
    same: bool = Field(description="true: both produced the same tokens; in 16 bits rounding may change tokens")
    difference: Difference | None = Field(description="null: no difference, or one text is a prefix of the other")
    verdict: str


class Tried(Json):
    """Result of one setting of [spec] on all texts."""

    name: str
    spec: dict[str, str | int | float | bool | list[str]]
    ratio: Range = Field(description="speedup over plain decoding, over texts and repetitions")
    by_workload: dict[str, float] = Field(description="median ratio")
    tokens_per_pass: float

    @property
    def score(self) -> float:
        """Median over texts of the median over repetitions, so that no single text decides."""
        return median(self.by_workload.values())


class SpecTuneDocument(Json):
    """Settings that `kvcli spec tune` tried, the fastest first."""

    schema_: Literal["kvcli.spec_tune/1"] = Field(default="kvcli.spec_tune/1", alias="schema")
    kvcli: str
    model: str
    profile: str = Field(description="profile with the other settings")
    workloads: list[str]
    context: Count
    new: Count
    reps: Count
    tried: list[Tried]
    best: str
    file: str | None = Field(description="path of the saved profile")
    verdict: str
