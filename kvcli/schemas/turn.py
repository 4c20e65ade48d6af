"""Answered question: the finished turn, its events, and the error that may end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from kvcli.api import Finish, TokenScore, Turn
from kvcli.schemas.base import OR_NULL, Bytes, Count, Json, Seconds, Share
from kvcli.settings.schema import Order
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.engine.model_info import ModelInfo
    from kvcli.engine.stats import Stats
    from kvcli.errors import KvcliError


class ModelFacts(Json):
    id: str
    revision: Annotated[str | None, OR_NULL] = Field(description="commit on the Hugging Face hub")
    dtype: str
    quant: str


class Tokens(Json):
    prompt: Count = Field(description="tokens of the prompt, cached ones included")
    cached: Count = Field(description="prompt tokens from the prefix cache, not computed again")
    reused: Count = Field(default=0, description="prompt tokens whose KV was reused from other text ([reuse])")
    new: Count = Field(description="generated tokens, those of the thinking included")
    thinking: Count = Field(default=0, description="tokens of the thinking before the answer, its marks included")
    context: Count = Field(description="tokens in the KV cache after the answer")
    limit: Count = Field(description="context window, tokens")


class Times(Json):
    load: Seconds | None
    read: Seconds
    first_token: Annotated[Seconds | None, OR_NULL]
    decode: Seconds
    thinking: Seconds = Field(default=0.0, description="the part of decode that was spent on thinking")
    total: Seconds = Field(description="prefill and decoding, without loading")


class Speed(Json):
    read_tok_s: Annotated[float | None, OR_NULL]
    decode_tok_s: Annotated[float | None, OR_NULL]
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

    @classmethod
    def of(cls, stats: Stats, method: str) -> Spec:
        """Return the figures of drafting; ratios with a zero denominator are null."""
        of_drafts = () if stats.drafted_passes else ("mean_acceptance_length", "acceptance_rate")
        of_passes = () if stats.passes else ("tokens_per_pass", "rows_per_pass")
        return cls.from_attributes(stats, method=method, **dict.fromkeys((*of_drafts, *of_passes)))


class Memory(Json):
    kv_bytes: Bytes
    kv_bytes_fp16: Annotated[Bytes | None, OR_NULL] = Field(description="size of the same KV cache at 16 bits")
    kv_tiers: dict[str, Bytes]
    near_hits: Share | None = Field(default=None, description="share of selected pages that were already on the device")
    host_reach: Annotated[str | None, OR_NULL] = Field(
        default=None, description="how attention reads KV in host memory"
    )
    peak_bytes: Annotated[Bytes | None, OR_NULL]
    used_bytes: Annotated[Bytes | None, OR_NULL] = Field(
        description="GPU memory used by all programs at the end of the answer, from the driver; CUDA context included, "
        "which peak_bytes does not include"
    )
    estimate_bytes: Annotated[Bytes | None, OR_NULL] = Field(
        description="estimate of kvcli fit for the tokens in memory"
    )
    device: str
    limit_bytes: Annotated[Bytes | None, OR_NULL] = Field(description="available memory of the device at the start")

    @classmethod
    def of(cls, stats: Stats, device: str) -> Memory:
        return cls(
            kv_bytes=stats.kv_bytes,
            kv_bytes_fp16=stats.kv_fp16,
            kv_tiers=dict(stats.kv),
            near_hits=stats.page_hit_rate,
            host_reach=stats.host_access,
            peak_bytes=stats.peak,
            used_bytes=stats.used,
            estimate_bytes=stats.estimate,
            device=device,
            limit_bytes=stats.available,
        )


class EngineFacts(Json):
    """Engine of another program that wrote the answer."""

    server: str = Field(description="program, as its list of models tells")
    url: str
    fields: dict[str, Any] = Field(description="fields of the request, from the profile and the options")
    without_effect: list[str] = Field(description="profile keys that differ from the default and were not sent")


@dataclass(frozen=True, slots=True)
class Run:
    """Settings and notes of a turn, besides the model."""

    profile: str
    method: str = "off"  # drafting method
    profile_hash: str | None = None
    exactness: str | None = None
    number: int = 1
    spell: Callable[[int], str] = str  # the text of a token
    cautions: Sequence[str] = ()  # warnings about the profile
    notes: Sequence[str] = ()  # deviations from the settings; may grow during the turn
    engine: EngineFacts | None = None  # None: kvcli's own


KEPT = ConfigDict(extra="ignore", strict=True)  # extra: a later version may have more fields


class Call(Json):
    """Call of a tool that the model asks for."""

    model_config = KEPT
    id: str
    name: str
    arguments: dict[str, Any]


class Candidate(Json):
    id: Count
    text: str = Field(description="the token by itself; a part of a character is U+FFFD")
    logprob: float | None = Field(description="of the model, before sampling settings; null: input, not predicted")


class Score(Candidate):
    """Token of the answer with its log-probability."""

    top: list[Candidate] = Field(description="the most likely tokens in its place, the likeliest first")

    @classmethod
    def of(cls, score: TokenScore, spell: Callable[[int], str]) -> Score:
        top = [Candidate(id=token, text=spell(token), logprob=logprob) for token, logprob in score.top]
        return cls(id=score.id, text=spell(score.id), logprob=score.logprob, top=top)


class TurnDocument(Json):
    """Result of one answered question."""

    schema_: Literal["kvcli.turn/2"] = Field(default="kvcli.turn/2", alias="schema")
    kvcli: str
    turn: Annotated[int, Field(ge=1)]
    model: ModelFacts
    profile: str
    profile_hash: str | None
    exactness: str | None
    engine: EngineFacts | None = Field(description="engine of another program; null: kvcli's own")
    text: str
    thinking: str = Field(description="reasoning before the answer; not part of the text")
    finish: Finish
    tool_calls: list[Call] = Field(description="calls that the model asks for, which nothing has run yet")
    scores: list[Score] = Field(description="--logprobs: all tokens of the answer, thinking included; else empty")
    order: Order = Field(description="prefill order: in chunks, or layer by layer")
    approx: bool = Field(description="true: the answer is approximate, so facts may be missing")
    sampling: dict[str, int | float] = Field(description="sampling settings that have an effect, by profile key")
    tokens: Tokens
    time: Times
    speed: Speed
    spec: Spec
    memory: Memory
    events: list[dict[str, Any]] = Field(
        description="messages; kind is note, caution (of the profile), shortage (out of memory), approx or loop"
    )

    @classmethod
    def of(cls, turn: Turn, info: ModelInfo, run: Run) -> TurnDocument:
        """Return the document of a finished turn."""
        stats = turn.stats
        load, total = stats.load or info.load_seconds or None, stats.read + stats.decode
        messages = [
            *(("caution", caution) for caution in run.cautions),
            *(("note", note) for note in (*info.notes, *info.details, *run.notes)),
            *(("shortage", words) for words in stats.shortages),
            *([("approx", stats.approx)] if stats.approx else []),
            *([("loop", str(turn.loop))] if turn.loop else []),
        ]
        return cls.from_attributes(
            turn,
            run,
            stats,
            kvcli=__version__,
            turn=run.number,
            model=ModelFacts.from_attributes(info),
            approx=bool(stats.approx),
            tool_calls=[Call.from_attributes(call) for call in turn.tool_calls],
            scores=[Score.of(score, run.spell) for score in turn.scores],
            tokens=Tokens.from_attributes(stats),
            time=Times.from_attributes(stats, load=load, total=total, thinking=stats.thinking_seconds),
            speed=Speed.from_attributes(stats),
            spec=Spec.of(stats, run.method),
            memory=Memory.of(stats, info.device),
            events=[{"kind": kind, "text": text} for kind, text in messages],
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
    scores: list[Score] = Field(default=[], description="--logprobs: tokens since the event before")


class StatsEvent(Json):
    event: Literal["stats"]
    new: Count
    context: Count
    decode: Seconds
    decode_tok_s: Annotated[float | None, OR_NULL]
    mean_acceptance_length: float | None
    kv_bytes: Bytes

    @classmethod
    def of(cls, stats: Stats) -> StatsEvent:
        accepted = stats.mean_acceptance_length if stats.drafted_passes else None
        return cls.from_attributes(stats, event="stats", mean_acceptance_length=accepted)


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


# Saved chat that `kvcli chat -c` continues.

SCHEMA: Final = "kvcli.chat/1"


Whole = Annotated[int, Field(ge=0, lt=1 << 63)]  # the range of a database integer


class SavedDocument(Json):
    model_config = KEPT
    name: str
    sha256: str = Field(description="hash of the file")
    text: str


class Figures(Json):
    """Figures of an answer; null if not measured."""

    model_config = KEPT
    prompt: Whole | None = Field(default=None, description="tokens of the prompt")
    cached: Whole | None = Field(default=None, description="prompt tokens from the prefix cache")
    new: Whole | None = Field(default=None, description="tokens of the answer")
    first_token: float | None = Field(default=None, description="seconds to the first token")
    read_tok_s: float | None = Field(default=None, description="computed prompt tokens per second")
    decode_tok_s: float | None = Field(default=None, description="tokens of the answer per second")


class SavedMessage(Json):
    model_config = KEPT
    role: Literal["user", "tool", "assistant"] = Field(description="tool: with results, not a question")
    text: str
    documents: list[SavedDocument]
    finish: Finish | None = Field(description="answers only: why it ended")
    figures: Figures | None = Field(default=None, description="answers only")
    thinking: str = Field(default="", description="of an answer: the model's thought before it; not in later prompts")
    calls: list[Call] = Field(default=[], description="of an answer: tool calls")
    results: list[str] = Field(default=[], description="of the calls of the answer before")


class LeftOut(Json):
    """Messages that are no longer shown to the model, because the chat exceeds its context window."""

    model_config = KEPT
    messages: Annotated[int, Field(ge=2, multiple_of=2)] = Field(description="from the first on")
    notes: str = Field(description="that it wrote on them, in their place; may be empty")


class ChatDocument(Json):
    """Questions and answers in turn, documents with their text."""

    model_config = KEPT
    schema_: Literal["kvcli.chat/1"] = Field(alias="schema")
    title: str | None
    model: str = Field(description="as it is typed")
    adapters: list[str] = Field(default=[], description="LoRA adapters of the model, each with its weight")
    saved: str = Field(default="", description="when")
    system: str | None
    messages: list[SavedMessage]
    pending: list[SavedDocument] = Field(description="attached, and not asked about yet")
    left_out: LeftOut | None = None

    @model_validator(mode="after")
    def _in_turn(self) -> ChatDocument:
        roles = [message.role.replace("tool", "user") for message in self.messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError("questions and answers do not take turns")
        if self.left_out is not None and self.left_out.messages > len(roles):
            raise ValueError("more is left out than there is")
        return self
