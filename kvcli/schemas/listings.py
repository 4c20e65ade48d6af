"""Listings: models, profiles, folders and devices of this machine, and the plan of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvcli.schemas.base import Bytes, Count, Json
from kvcli.settings.schema import Order


class SiblingEntry(Json):
    """A model that can draft for another one."""

    name: str
    how: Literal["same tokenizer", "by re-encoding"]
    bytes: Bytes = Field(description="size of its weights or of the download")
    cost: float = Field(description="cost of its pass in passes of the model, by bytes")
    here: bool = Field(description="false: kvcli models get downloads it")


class ModelEntry(Json):
    name: str
    kind: Literal["demo", "config", "fetched", "cache", "folder", "file"]
    path: str | None
    bytes: Bytes | None = Field(description="size of the weights")
    family: str | None
    dtype: str | None
    context: Count | None = Field(description="context limit of the model, tokens")
    supported: bool | None = Field(description="null: not on disk, so not checked")
    reason: str | None = Field(description="reason if not supported")
    profile: str | None = Field(description="profile set for it in the config")
    drafts: list[SiblingEntry] = Field(default=[], description="usable draft models, the best first")
    heads: list[str] = Field(default=[], description="draft layers in its own files, and why they are used or not")


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
    purpose: str = Field(description="purpose, by which the list is sorted")
    extends: list[str]
    chain: list[str] = Field(description="the profile and all it extends, nearest first")
    exactness: Literal["exact", "certified", "approx"]
    level: str = Field(description="place of its definition")
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


class ExportedProfile(Json):
    """Settings of another engine that come nearest to a profile."""

    engine: str
    words: list[str] = Field(description="command line; empty if the engine has a file")
    fields: dict[str, Any] = Field(description="of generation_config.json")
    approximated: dict[str, str] = Field(description="profile key -> how the result differs")
    lost: dict[str, str] = Field(description="profile key -> why the engine has nothing for it")


class ServerLoad(Json):
    """Load and speed of an inference server; null: it has no such metric."""

    url: str
    running: float | None = Field(default=None, description="requests")
    waiting: float | None = Field(default=None, description="requests")
    kv: float | None = Field(default=None, description="used share of the KV cache")
    tok_s: float | None = Field(default=None, description="generated tokens per second, of the last interval")
    read_tok_s: float | None = Field(default=None, description="prompt tokens per second")
    acceptance: float | None = Field(default=None, description="accepted share of the draft tokens")
    first_token: float | None = Field(default=None, description="mean seconds to the first token")
    error: str | None = Field(default=None, description="code of the error, if it did not answer")


class TopDocument(Json):
    """Load of inference servers."""

    schema_: Literal["kvcli.top/1"] = Field(default="kvcli.top/1", alias="schema")
    servers: list[ServerLoad]


class ProfilesDocument(Json):
    """Output of the commands under `kvcli profiles`; fields that do not apply to a command are left out."""

    schema_: Literal["kvcli.profiles/2"] = Field(default="kvcli.profiles/2", alias="schema")
    profiles: list[ProfileEntry] | list[ProfileDocument] | list[str]
    default: str = Field(default="", description="list: the default profile")
    differences: Any = Field(default=None, description="diff: keys with unequal values")
    problems: list[ProblemEntry] = Field(default=[], description="check: always empty; problems end in kvcli.error/1")
    file: str = Field(default="", description="new: the file written")
    export: ExportedProfile | None = Field(default=None, description="export: settings of the other engine")


class ModelsDocument(Json):
    """Models on this machine."""

    schema_: Literal["kvcli.models/1"] = Field(default="kvcli.models/1", alias="schema")
    models: list[ModelEntry]


class CheckMemory(Json):
    """Memory needed for a run of `ctx` tokens."""

    ctx: Count = Field(description="tokens")
    bytes: Bytes = Field(description="required free memory")
    fits: bool


class CheckDocument(Json):
    """A supported model, by its headers; an unsupported one ends in kvcli.error/1."""

    schema_: Literal["kvcli.check/1"] = Field(default="kvcli.check/1", alias="schema")
    model: str
    path: str
    family: str
    is_decided: bool = Field(description="false: support of its attention is known only after loading")
    context: Count | None = Field(description="context limit of the model, tokens")
    numbers: str = Field(description="number format of the computation")
    quant: str = Field(description="load.quant of the profile, or chosen to fit")
    packed: str | None = Field(description="quantization of the files; null: not quantized")
    unpacks: bool = Field(description="true: they are dequantized during loading")
    file_bytes: Bytes
    weight_bytes: Bytes = Field(description="size after loading")
    device: str
    available_bytes: Bytes
    profile: str
    memory: list[CheckMemory] = Field(description="at 8,192 and 32,768 tokens, or at the limit of the model")
    drafts: list[SiblingEntry] = Field(description="usable draft models, the best first")
    heads: list[str] = Field(description="draft layers in its own files, and why they are used or not")
    notes: list[str]


Group = Literal["with ease", "takes most", "does not fit"]  # shares of the memory


class Suggestion(Json):
    """A model of the catalog, and its fit on this machine."""

    name: str
    id: str = Field(description="id on the Hugging Face hub")
    licence: str
    terms: str | None = Field(description="address of terms that must be accepted")
    about: str = Field(description="suitable tasks")
    parameters: Count
    download_bytes: Bytes
    needs_bytes: Bytes = Field(description="memory with 8,192 tokens and weights quantized as in `quant`")
    quant: str
    fits: bool = Field(description="true: fits the total memory of the device")
    group: Group = Field(description="with ease: fits half of the memory")
    recommended: bool = Field(description="true for at most one model")
    context: Count = Field(description="maximum context that fits, tokens")
    fetched: bool
    command: str | None = Field(description="command to use it; null: it does not fit")


class SuggestionsDocument(Json):
    """Real models, those that suit this machine best first."""

    schema_: Literal["kvcli.suggestions/1"] = Field(default="kvcli.suggestions/1", alias="schema")
    device: str
    available_bytes: Bytes
    total_bytes: Bytes = Field(description="total memory, by which models are ranked")
    models: list[Suggestion]


class PlanDocument(Json):
    """The plan of a run; printed by --dry-run."""

    schema_: Literal["kvcli.plan/1"] = Field(default="kvcli.plan/1", alias="schema")
    model: ModelEntry
    profile: str
    profile_hash: str
    exactness: str
    context: Count | None = Field(description="context window, tokens")
    kv_bytes: Bytes | None = Field(description="KV cache of a full context window, on all devices")
    estimate_bytes: Bytes | None = Field(description="peak memory with a full context window")
    available_bytes: Bytes | None = Field(description="memory of the device")
    fits: bool | None
    order: Order | None = Field(description="prefill order: in chunks, or layer by layer")
    documents: list[dict[str, Any]]
    notes: list[str] = Field(description="on the files: for example those of a folder that were not read")
    settings: dict[str, Any]
    origins: dict[str, str]


class PathsDocument(Json):
    """Folders that kvcli reads and writes."""

    schema_: Literal["kvcli.paths/2"] = Field(default="kvcli.paths/2", alias="schema")
    paths: dict[str, str]


class CacheKind(Json):
    kind: str
    about: str
    entries: Count
    bytes: Bytes
    freed_entries: Count = Field(description="prune: number of entries removed, or to be removed")
    freed_bytes: Bytes


class CacheDocument(Json):
    """Cached data, which only saves time."""

    schema_: Literal["kvcli.cache/1"] = Field(default="kvcli.cache/1", alias="schema")
    folder: str
    removed: bool = Field(description="true: the freed entries were removed")
    kinds: list[CacheKind]


class ServerEntry(Json):
    """A server whose model other commands use."""

    model: str
    path: str
    pid: Count
    url: str = Field(description="address of its API")
    load: list[str] = Field(description="load settings that differ from the defaults")
    seconds: float = Field(description="time since the model was loaded")
    running: Count = Field(description="commands that run in processes of it")
    bytes: Bytes = Field(description="resident memory, which its commands share")


class ServersDocument(Json):
    """Servers whose models other commands use."""

    schema_: Literal["kvcli.servers/1"] = Field(default="kvcli.servers/1", alias="schema")
    servers: list[ServerEntry]


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

    schema_: Literal["kvcli.doctor/2"] = Field(default="kvcli.doctor/2", alias="schema")
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
    quant: dict[str, str] = Field(description="implementation for quantized weights, by device")
    paths: dict[str, str]
    environment: dict[str, str]
    sandbox: list[str] = Field(description="restrictions of the document parser: seccomp, landlock, limits")
    demo_model: bool
    steps: dict[int, float] = Field(
        description="with --speed: decoding steps per second of a random 86M model in bf16, by threads"
    )
    problems: list[str]


class ServeDocument(Json):
    """A server that listens."""

    schema_: Literal["kvcli.serve/1"] = Field(default="kvcli.serve/1", alias="schema")
    url: str
    model: str
    profile: str
    exactness: str
    kv_bytes: Bytes | None = Field(description="memory of all KV caches together; null: not limited")
