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
    revision: str | None = Field(description="commit on the Hugging Face hub")
    dtype: str
    quant: str


class Tokens(Json):
    prompt: Count = Field(description="tokens of the prompt, cached ones included")
    cached: Count = Field(description="prompt tokens from the prefix cache, not computed again")
    reused: Count = Field(default=0, description="prompt tokens whose KV was reused from other text ([reuse])")
    new: Count
    context: Count = Field(description="tokens in the KV cache after the answer")
    limit: Count = Field(description="context window, tokens")


class Times(Json):
    load: Seconds | None
    read: Seconds
    first_token: Seconds | None
    decode: Seconds
    total: Seconds = Field(description="prefill and decoding, without loading")


class Speed(Json):
    read_tok_s: float | None
    decode_tok_s: float | None
    vs_plain: float | None = Field(description="decoding speed relative to the measured speed without drafting")


class Spec(Json):
    method: str
    passes: Count
    drafted_passes: Count
    draft_tokens: Count
    accepted_tokens: Count
    mean_acceptance_length: float | None = Field(description="1 + accepted_tokens / drafted_passes")
    tokens_per_pass: float | None
    acceptance_rate: Share | None = Field(description="accepted_tokens / draft_tokens")
    sources: dict[str, Count] = Field(description="accepted draft tokens by the most confident source")
    rows_per_pass: float | None = Field(description="pending token, draft tokens and lookahead rows")
    free_rows: Count | None = Field(description="rows of a pass that takes at most 10 % longer than one row")
    histogram: list[Count] = Field(description="histogram[i]: drafted passes that accepted i draft tokens")
    per_position: list[Share] = Field(description="per_position[i]: share of them that accepted more than i")


class Memory(Json):
    kv_bytes: Bytes
    kv_bytes_fp16: Bytes | None = Field(description="size of the same KV cache at 16 bits")
    kv_tiers: dict[str, Bytes]
    near_hits: Share | None = Field(default=None, description="share of selected pages that were already on the device")
    host_reach: str | None = Field(default=None, description="how attention reads KV in host memory")
    peak_bytes: Bytes | None
    used_bytes: Bytes | None = Field(
        description="GPU memory used by all programs at the end of the answer, from the driver; CUDA context included, "
        "which peak_bytes does not include"
    )
    estimate_bytes: Bytes | None = Field(description="estimate of kvcli fit for the tokens in memory")
    device: str
    limit_bytes: Bytes | None = Field(description="available memory of the device at the start")


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
    thinking: str = Field(description="reasoning before the answer; not part of the text")
    finish: Finish
    order: Order = Field(description="prefill order: in chunks, or layer by layer")
    approx: bool = Field(description="true: the answer is approximate, so facts may be missing")
    sampling: dict[str, int | float] = Field(description="sampling settings, by profile key")
    tokens: Tokens
    time: Times
    speed: Speed
    spec: Spec
    memory: Memory
    events: list[dict[str, Any]] = Field(
        description="messages; kind is note, caution (of the profile), shortage (out of memory), approx or loop"
    )


class ErrorDocument(Json):
    """Error of a command. `code` is stable."""

    schema_: Literal["kvcli.error/1"] = Field(default="kvcli.error/1", alias="schema")
    code: str
    exit: int
    message: str
    lines: list[str] = Field(description="details, as text")
    detail: dict[str, Any] = Field(description="details, for programs")
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
