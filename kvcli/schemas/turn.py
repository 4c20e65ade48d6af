"""Answered question: the finished turn, its events, and the error that may end it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from kvcli.api import Finish
from kvcli.schemas.base import Bytes, Count, Json, Seconds, Share
from kvcli.settings.schema import Order

if TYPE_CHECKING:
    from kvcli.errors import KvcliError


class ModelFacts(Json):
    id: str
    revision: str | None = Field(description="commit of the hub")
    dtype: str
    quant: str


class Tokens(Json):
    prompt: Count = Field(description="tokens of the prompt, cached ones included")
    cached: Count = Field(description="of these, tokens that were in memory and not read again")
    reused: Count = Field(default=0, description="of these, tokens taken over from other texts, as [reuse] says")
    new: Count
    context: Count = Field(description="tokens in memory after the turn")
    limit: Count = Field(description="the window in use")


class Times(Json):
    load: Seconds | None
    read: Seconds
    first_token: Seconds | None
    decode: Seconds
    total: Seconds = Field(description="reading and answering, without loading")


class Speed(Json):
    read_tok_s: float | None
    decode_tok_s: float | None
    vs_plain: float | None = Field(description="decoding speed over the measured speed without drafts")


class Spec(Json):
    method: str
    passes: Count
    drafted_passes: Count
    draft_tokens: Count
    accepted_tokens: Count
    mean_acceptance_length: float | None = Field(description="1 + accepted_tokens / drafted_passes")
    tokens_per_pass: float | None
    acceptance_rate: Share | None = Field(description="accepted_tokens / draft_tokens")
    sources: dict[str, Count] = Field(description="accepted guesses by the source that was surest of them")
    rows_per_pass: float | None = Field(description="the pending token, guesses and scouts")
    free_rows: Count | None = Field(description="rows of a pass that takes at most a tenth longer than one of one row")
    histogram: list[Count] = Field(description="histogram[i]: drafted passes that accepted i guesses")
    per_position: list[Share] = Field(description="per_position[i]: share of them that accepted more than i")


class Memory(Json):
    kv_bytes: Bytes
    kv_bytes_fp16: Bytes | None = Field(description="the same keys and values at 16 bit")
    kv_tiers: dict[str, Bytes]
    near_hits: Share | None = Field(default=None, description="of what recall read of host memory: found near already")
    host_reach: str | None = Field(default=None, description="how rows reach slots in host memory, in words")
    peak_bytes: Bytes | None
    used_bytes: Bytes | None = Field(
        description="of a GPU, by all programs, as its driver says when the answer ends: context and libraries, which "
        "the peak of torch's allocator lacks, included"
    )
    estimate_bytes: Bytes | None = Field(description="what kvcli fit says of the tokens in memory")
    device: str
    limit_bytes: Bytes | None = Field(description="memory of the device that was available when the run began")


class TurnDocument(Json):
    """Result of one answered question."""

    schema_: Literal["kvcli.turn/1"] = Field(default="kvcli.turn/1", alias="schema")
    kvcli: str
    turn: Annotated[int, Field(ge=1)]
    model: ModelFacts
    profile: str
    profile_hash: str | None
    exactness: str | None
    text: str
    thinking: str = Field(description="what the model thought before its answer; no part of the text")
    finish: Finish
    order: Order = Field(description="what of the prompt was finished first while it was read: a chunk, or a layer")
    approx: bool = Field(description="the answer stands on less than the text: facts may be lost")
    sampling: dict[str, int | float] = Field(description="settings in use, whoever chose them, by their profile keys")
    tokens: Tokens
    time: Times
    speed: Speed
    spec: Spec
    memory: Memory
    events: list[dict[str, Any]] = Field(
        description="what to know: kind is note, caution (of the profile), shortage (a step was taken), approx or loop"
    )


class ErrorDocument(Json):
    """Error of a command. `code` is stable."""

    schema_: Literal["kvcli.error/1"] = Field(default="kvcli.error/1", alias="schema")
    code: str
    exit: int
    message: str
    lines: list[str] = Field(description="details for people")
    detail: dict[str, Any] = Field(description="the same for programs")
    try_: list[str] = Field(alias="try")


class Start(Json):
    event: Literal["start"]
    schema_: Literal["kvcli.event/1"] = Field(default="kvcli.event/1", alias="schema")
    kvcli: str
    model: ModelFacts
    profile: str


class ReadEvent(Json):
    event: Literal["read"]
    done: Count
    total: Count
    cached: Count
    seconds: Seconds


class TextEvent(Json):
    event: Literal["text", "thinking"]
    text: str
    tokens: Count = Field(description="tokens of the answer so far")


class StatsEvent(Json):
    event: Literal["stats"]
    new: Count
    context: Count
    decode: Seconds
    decode_tok_s: float | None
    mean_acceptance_length: float | None
    kv_bytes: Bytes


class EndEvent(Json):
    event: Literal["end"]
    turn: TurnDocument


class ErrorEvent(Json):
    event: Literal["error"]
    error: ErrorDocument


EventDocument = Annotated[
    Start | ReadEvent | TextEvent | StatsEvent | EndEvent | ErrorEvent, Field(discriminator="event")
]


def error_document(error: KvcliError) -> ErrorDocument:
    return ErrorDocument.model_validate(
        {
            "code": error.code,
            "exit": int(error.exit),
            "message": error.message,
            "lines": list(error.lines),
            "detail": error.detail,
            "try": list(error.try_),
        }
    )
