"""The JSON documents kvcli prints, as models: what writes them and what `kvcli config schema NAME` prints.

Bytes are integers, times seconds, text is not shortened. What is not known, or has no meaning here, is null.
Adding a field keeps the number behind the name; anything else raises it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from kvcli.api import Finish

if TYPE_CHECKING:
    from kvcli.errors import KvcliError

Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Json(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)

    def document(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)


class ModelFacts(Json):
    id: str
    revision: str | None = Field(description="commit of the hub")
    dtype: str
    quant: str


class Tokens(Json):
    prompt: Count = Field(description="tokens of the prompt, cached ones included")
    cached: Count = Field(description="of these, tokens that were in memory and not read again")
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
    histogram: list[Count] = Field(description="histogram[i]: drafted passes that accepted i guesses")
    per_position: list[Share] = Field(description="per_position[i]: share of them that accepted more than i")


class Memory(Json):
    kv_bytes: Bytes
    kv_bytes_fp16: Bytes | None = Field(description="the same keys and values at 16 bit")
    kv_tiers: dict[str, Bytes]
    peak_bytes: Bytes | None
    estimate_bytes: Bytes | None
    device: str
    limit_bytes: Bytes | None


class TurnDocument(Json):
    """One question answered."""

    schema_: Literal["kvcli.turn/1"] = Field(default="kvcli.turn/1", alias="schema")
    kvcli: str
    session: str | None
    turn: Annotated[int, Field(ge=1)]
    model: ModelFacts
    engine: Literal["local"]
    profile: str
    profile_hash: str | None
    exactness: str | None
    text: str
    finish: Finish
    tokens: Tokens
    time: Times
    speed: Speed
    spec: Spec
    memory: Memory
    overflow: dict[str, Any] | None
    events: list[dict[str, Any]] = Field(description="what happened on the way; kind is note for now")


class ErrorDocument(Json):
    """What went wrong. `code` is stable."""

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
    engine: Literal["local"]
    profile: str


class ReadEvent(Json):
    event: Literal["read"]
    done: Count
    total: Count
    cached: Count
    seconds: Seconds


class TextEvent(Json):
    event: Literal["text"]
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


class ModelEntry(Json):
    name: str
    kind: Literal["demo", "config", "cache", "folder"]
    path: str | None
    bytes: Bytes | None = Field(description="of the weights")
    family: str | None
    dtype: str | None
    context: Count | None = Field(description="the model's own limit, tokens")
    supported: bool | None = Field(description="null when nothing on disk could be looked at")
    reason: str | None = Field(description="why it is not supported")
    profile: str | None = Field(description="profile that the config names for it")


class ProblemEntry(Json):
    source: str
    line: int | None
    column: int | None
    key: str | None
    message: str
    hint: str | None


class ProfileEntry(Json):
    """A profile in a list."""

    name: str
    description: str
    extends: list[str]
    chain: list[str] = Field(description="the profile and all it extends, nearest first")
    exactness: Literal["exact", "certified", "approx"]
    level: str = Field(description="where it is defined")
    problems: list[ProblemEntry]


class ProfileDocument(Json):
    """A profile with all its values."""

    name: str
    description: str
    chain: list[str]
    exactness: Literal["exact", "certified", "approx"]
    hash: str
    values: dict[str, Any]
    origins: dict[str, str]


class ProfilesDocument(Json):
    """What the commands under `kvcli profiles` print; fields that a command has nothing for are left out."""

    schema_: Literal["kvcli.profiles/1"] = Field(default="kvcli.profiles/1", alias="schema")
    profiles: list[ProfileEntry] | list[ProfileDocument] | list[str]
    default: str = Field(default="", description="list: the profile used when none is named")
    differences: Any = Field(default=None, description="diff: keys with unequal values")
    problems: list[ProblemEntry] = Field(default=[], description="check: always empty; problems end in kvcli.error/1")
    file: str = Field(default="", description="new: the file written")


class ModelsDocument(Json):
    """Models on this machine."""

    schema_: Literal["kvcli.models/1"] = Field(default="kvcli.models/1", alias="schema")
    models: list[ModelEntry]


class PlanDocument(Json):
    """What a run would do; printed by --dry-run."""

    schema_: Literal["kvcli.plan/1"] = Field(default="kvcli.plan/1", alias="schema")
    model: ModelEntry
    profile: str
    profile_hash: str
    exactness: str
    context: Count | None = Field(description="the window, tokens")
    kv_bytes: Bytes | None = Field(description="keys and values of a full window, stored as in the model's dtype")
    documents: list[dict[str, Any]]
    settings: dict[str, Any]
    origins: dict[str, str]


class PathsDocument(Json):
    """Where kvcli reads and writes."""

    schema_: Literal["kvcli.paths/1"] = Field(default="kvcli.paths/1", alias="schema")
    paths: dict[str, str]


class Device(Json):
    name: str
    kind: str
    total_bytes: Bytes | None
    free_bytes: Bytes | None


class Kernel(Json):
    device: str
    op: str
    choice: str
    reason: str


class DoctorDocument(Json):
    """This installation and machine, without names of people or secrets."""

    schema_: Literal["kvcli.doctor/1"] = Field(default="kvcli.doctor/1", alias="schema")
    versions: dict[str, str | None]
    system: str
    cpu: str | None
    cpu_flags: list[str]
    cores: Count | None
    threads: Count | None
    memory_total: Bytes
    memory_free: Bytes
    devices: list[Device]
    kernels: list[Kernel]
    quant: dict[str, str] = Field(description="what runs quantized weights, by device")
    paths: dict[str, str]
    environment: dict[str, str]
    demo_model: bool
    problems: list[str]


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


DOCUMENTS: Mapping[str, Any] = {
    "turn": TurnDocument,
    "error": ErrorDocument,
    "event": EventDocument,
    "models": ModelsDocument,
    "profiles": ProfilesDocument,
    "doctor": DoctorDocument,
    "paths": PathsDocument,
    "plan": PlanDocument,
}


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of one of `DOCUMENTS`."""
    schema = TypeAdapter(DOCUMENTS[name]).json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
