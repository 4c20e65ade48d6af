"""Documents of the quality suite: scores by profile and task, and agreement with the full cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcli.schemas.base import Count, Json, Share

Role = Literal["full", "profile", "control"]


class Difference(Json):
    """Mean score minus that of the full cache on the same contexts."""

    mean: float
    low: float | None = Field(description="95 % paired bootstrap interval; null: one context per task")
    high: float | None


class McNemar(Json):
    """Questions scored 0 or 1 on which this row and the full cache differ."""

    questions: Count
    only_full: Count = Field(description="answered correctly only with the full cache")
    only_this: Count
    p: Share = Field(description="exact, two-sided")


class QualityTask(Json):
    """Scores of one task in one row."""

    task: str
    mean: Share
    contexts: Count
    questions: Count
    difference: Difference | None = Field(description="null for the full cache itself")
    by_length: dict[int, Share]
    details: dict[str, Share] = Field(description="shares of questions that pass parts of the task")


class WorstTask(Json):
    """The task in which this row loses most against the full cache; for the full cache itself its lowest score."""

    task: str
    score: Share
    difference: float | None


class GridCell(Json):
    length: Count
    depth: Share = Field(description="position of the needle, 0 = start")
    score: Share
    contexts: Count


class TurnScore(Json):
    turn: Count = Field(description="turn of the chat, from 1; later turns ask about earlier facts")
    score: Share
    questions: Count


class QualityRow(Json):
    """Scores of one profile."""

    profile: str
    role: Role = Field(description="control: evicts randomly or by age, with the same memory")
    hash: str | None = Field(description="hash of the profile; null: a control")
    kept: Share = Field(description="share of the KV cache kept after compression, mean over contexts")
    mean: Share = Field(description="mean over tasks with equal weight")
    worst: WorstTask
    difference: Difference | None = Field(description="null for the full cache itself")
    mcnemar: McNemar | None = Field(description="null for the full cache, or without tasks scored 0 or 1")
    by_length: dict[int, Share]
    tasks: list[QualityTask]
    passkey: list[GridCell]
    turns: list[TurnScore]


class QualityArgs(Json):
    """Arguments of the suite, with the defaults filled in."""

    lengths: list[Count] = Field(description="tokens of prompt and answer together")
    n: Count = Field(description="contexts per task and length")
    tasks: list[str]
    seed: int
    query_visible: bool = Field(description="true: compressed after the question is in the prompt; false: before")
    haystack: bool = Field(description="true: needles were hidden in the text of the user")
    budget: str = Field(description="source of the memory budget of the controls")


class Estimate(Json):
    mean: float
    low: float | None = Field(description="95 % bootstrap interval over windows; null for a single window")
    high: float | None


class AgreementRow(Json):
    """Agreement of one profile on the user's text, token by token, each given the tokens before it."""

    profile: str
    role: Role
    kept: Share
    agreement: Estimate = Field(description="share of tokens with the same most likely next token as the full cache")
    kl: Estimate = Field(description="KL divergence from the full cache, nats per token")
    delta_nll: Estimate = Field(description="increase of the negative log likelihood, nats per token")
    nll: Annotated[float, Field(ge=0)]


class AgreementDocument(Json):
    """Change of predictions on a text by a compressed cache, measured without labels."""

    schema_: Literal["kvcli.agreement/1"] = Field(default="kvcli.agreement/1", alias="schema")
    windows: Count
    context: Count = Field(description="tokens prefilled and compressed per text window")
    scored: Count = Field(description="tokens predicted after it")
    rows: list[AgreementRow]
    complete: bool


class QualityDocument(Json):
    """The quality suite. Rows: the full cache, the profiles, the controls."""

    schema_: Literal["kvcli.quality/1"] = Field(default="kvcli.quality/1", alias="schema")
    args: QualityArgs
    complete: bool = Field(description="false: stopped early; scores cover contexts that all profiles completed")
    contexts: Count = Field(description="contexts completed by all profiles")
    rows: list[QualityRow]
    agreement: AgreementDocument | None = None
