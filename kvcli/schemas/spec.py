"""Documents of `kvcli spec`: measured drafting of a profile on this machine, and its best settings."""

from __future__ import annotations

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

    kind: str = Field(description="tokens that matched, or nats between the best and the next")
    made: Count
    share: Share = Field(description="of them right")


class ScoutFigures(Json):
    rows: Count = Field(description="in a pass that carries scouts")
    brought: float | None = Field(description="tokens a pass that only scouts had named; null: they never ran")
    cost: float | None = Field(description="plain passes that a pass with them takes longer")
    rested_passes: Count
    why: str = Field(description="they rest; empty while they do not")


class Difference(Json):
    """First difference between the texts with and without drafting."""

    token: Count = Field(description="of the new ones, from 1")
    near_tie: bool = Field(description="whether rounding explains it")
    margin: float = Field(description="logits between the best token and the worse of the two")
    bound: float = Field(description="how far rounding reaches")


class SpecDocument(Json):
    """Result of `kvcli spec doctor`."""

    schema_: Literal["kvcli.spec/1"] = Field(default="kvcli.spec/1", alias="schema")
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
    ratio: Range = Field(description="of drafting over plain decoding, repetition by repetition")
    predicted: float | None = Field(description="tokens a pass over what rows should cost; null: a second model drafts")
    tokens_per_pass: float
    mean_acceptance_length: float
    drafted_share: Share
    rows_per_pass: float
    free_rows: Count | None
    passes: list[PassTime] = Field(description="what passes take here; empty: the look took too long")
    accepted_by: dict[str, Count] = Field(description="accepted guesses by the source that was surest of them")
    sources: dict[str, list[Kind]]
    scouts: ScoutFigures | None
    paused: bool
    reason: str = Field(description="drafting pauses; empty while it does not")
    draft_pass: float | None = Field(description="passes of one row that one of the model which drafts takes")
    view_bytes: Bytes = Field(description="of keys and values that scouts read a copy of")
    same: bool = Field(description="whether both wrote the same tokens; in 16 bits near ties may fall either way")
    difference: Difference | None = Field(description="null: none, or one text begins with the other")
    verdict: str


class Tried(Json):
    """Result of one setting of [spec] on all texts."""

    name: str
    spec: dict[str, str | int | float | bool | list[str]]
    ratio: Range = Field(description="of plain decoding, over texts and repetitions")
    by_workload: dict[str, float] = Field(description="median ratio")
    tokens_per_pass: float


class SpecTuneDocument(Json):
    """Settings that `kvcli spec tune` tried, the fastest first."""

    schema_: Literal["kvcli.spec_tune/1"] = Field(default="kvcli.spec_tune/1", alias="schema")
    kvcli: str
    model: str
    profile: str = Field(description="whose other settings were kept")
    workloads: list[str]
    context: Count
    new: Count
    reps: Count
    tried: list[Tried]
    best: str
    file: str | None = Field(description="where the profile was written")
    verdict: str
