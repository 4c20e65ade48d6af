"""Documents of the quality suite: scores by profile and task, and agreement with the full cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcli.schemas.base import Count, Json, Share

Role = Literal["full", "profile", "control"]


class Difference(Json):
    """Mean score minus that of the full cache on the same contexts."""

    mean: float
    low: float | None = Field(description="95 % paired bootstrap interval; null with a single context a task")
    high: float | None


class McNemar(Json):
    """Questions scored 0 or 1 on which this row and the full cache differ."""

    questions: Count
    only_full: Count = Field(description="right with the full cache alone")
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
    details: dict[str, Share] = Field(description="shares of questions that fulfil parts of the task")


class WorstTask(Json):
    """The task in which this row loses most against the full cache; for the full cache itself its lowest score."""

    task: str
    score: Share
    difference: float | None


class GridCell(Json):
    length: Count
    depth: Share = Field(description="place of the needle, 0 = at the start")
    score: Share
    contexts: Count


class TurnScore(Json):
    turn: Count = Field(description="of the conversation, from 1; later turns ask for earlier facts")
    score: Share
    questions: Count


class QualityRow(Json):
    """Scores of one profile."""

    profile: str
    role: Role = Field(description="control: evicts by lot or by age, with the memory of the profiles measured")
    hash: str | None = Field(description="of the profile; null for a control, whose budget follows the context")
    kept: Share = Field(description="slots held after compression over tokens read, mean over contexts")
    mean: Share = Field(description="each task counts alike")
    worst: WorstTask
    difference: Difference | None = Field(description="null for the full cache itself")
    mcnemar: McNemar | None = Field(description="null for the full cache, or without tasks scored 0 or 1")
    by_length: dict[int, Share]
    tasks: list[QualityTask]
    passkey: list[GridCell]
    turns: list[TurnScore]


class QualityArgs(Json):
    """Arguments of the suite, with the defaults filled in."""

    lengths: list[Count] = Field(description="tokens, prompt and answer together")
    n: Count = Field(description="contexts for each task and length")
    tasks: list[str]
    seed: int
    query_visible: bool = Field(description="true: compressed behind the question; false: before it was read")
    haystack: bool = Field(description="needles were hidden in the user's own text")
    budget: str = Field(description="where the memory of the controls comes from")


class Estimate(Json):
    mean: float
    low: float | None = Field(description="95 % bootstrap interval over windows; null for a single window")
    high: float | None


class AgreementRow(Json):
    """Agreement of one profile on the user's text, token by token, each given the tokens before it."""

    profile: str
    role: Role
    kept: Share
    agreement: Estimate = Field(description="share of tokens whose likeliest continuation is that of the full cache")
    kl: Estimate = Field(description="nats a token from the full cache's distribution to this one's")
    delta_nll: Estimate = Field(description="nats a token by which the text becomes less likely")
    nll: Annotated[float, Field(ge=0)]


class AgreementDocument(Json):
    """Change of predictions on a text by a compressed cache, measured without labels."""

    schema_: Literal["kvcli.agreement/1"] = Field(default="kvcli.agreement/1", alias="schema")
    windows: Count
    context: Count = Field(description="tokens read and compressed in each window")
    scored: Count = Field(description="tokens predicted behind it")
    rows: list[AgreementRow]
    complete: bool


class QualityDocument(Json):
    """The quality suite. Rows: the full cache, the profiles, the controls."""

    schema_: Literal["kvcli.quality/1"] = Field(default="kvcli.quality/1", alias="schema")
    args: QualityArgs
    complete: bool = Field(description="false: stopped before the end; scores cover what every row has done")
    contexts: Count = Field(description="done by every row")
    rows: list[QualityRow]
    agreement: AgreementDocument | None = None
