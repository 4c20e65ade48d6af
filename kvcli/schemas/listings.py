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
    bytes: Bytes = Field(description="of its weights, or to fetch")
    cost: float = Field(description="of a pass in passes of the one that writes, by their bytes")
    here: bool = Field(description="false: kvcli models get fetches it")


class ModelEntry(Json):
    name: str
    kind: Literal["demo", "config", "fetched", "cache", "folder", "file"]
    path: str | None
    bytes: Bytes | None = Field(description="of the weights")
    family: str | None
    dtype: str | None
    context: Count | None = Field(description="the model's own limit, tokens")
    supported: bool | None = Field(description="null when nothing on disk could be looked at")
    reason: str | None = Field(description="why it is not supported")
    profile: str | None = Field(description="profile that the config names for it")
    drafts: list[SiblingEntry] = Field(default=[], description="models that can draft for it, the best first")
    heads: list[str] = Field(default=[], description="what drafts in its own files, and how, or why it is not used")


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
    purpose: str = Field(description="what it is for; the list goes by it")
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
    """Output of the commands under `kvcli profiles`; fields that do not apply to a command are left out."""

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


class CheckMemory(Json):
    """Memory needed for a run of `ctx` tokens."""

    ctx: Count = Field(description="tokens")
    bytes: Bytes = Field(description="that must be free")
    fits: bool


class CheckDocument(Json):
    """A supported model, by its headers; an unsupported one ends in kvcli.error/1."""

    schema_: Literal["kvcli.check/1"] = Field(default="kvcli.check/1", alias="schema")
    model: str
    path: str
    family: str
    is_decided: bool = Field(description="false: whether its attention is served shows when it is loaded")
    context: Count | None = Field(description="the model's own limit, tokens")
    numbers: str = Field(description="that it computes in")
    quant: str = Field(description="load.quant of the profile, or what is chosen so that it fits")
    packed: str | None = Field(description="how the weights of its files are packed; null where they are not")
    unpacks: bool = Field(description="whether these become plain numbers while loading")
    file_bytes: Bytes
    weight_bytes: Bytes = Field(description="once loaded")
    device: str
    available_bytes: Bytes
    profile: str
    memory: list[CheckMemory] = Field(description="at 8,192 and at 32,768 tokens, or at the model's own limit")
    drafts: list[SiblingEntry] = Field(description="models that can draft for it, the best first")
    heads: list[str] = Field(description="what drafts in its own files, and how, or why it is not used")
    notes: list[str]


Group = Literal["with ease", "takes most", "does not fit"]  # shares of the memory


class Suggestion(Json):
    """A model of the catalog, and its fit on this machine."""

    name: str
    id: str = Field(description="of the hub")
    licence: str
    terms: str | None = Field(description="where the terms are that have to be accepted")
    about: str = Field(description="what it is good for")
    parameters: Count
    download_bytes: Bytes
    needs_bytes: Bytes = Field(description="memory with 8,192 tokens, its weights as `quant` says")
    quant: str
    fits: bool = Field(description="into the memory of the device, whatever else takes some of it now")
    group: Group = Field(description="with ease: into half of it")
    recommended: bool = Field(description="true of one model at most")
    context: Count = Field(description="tokens that fit here")
    fetched: bool
    command: str | None = Field(description="what to type; null where it does not fit")


class SuggestionsDocument(Json):
    """Real models, those that suit this machine best first."""

    schema_: Literal["kvcli.suggestions/1"] = Field(default="kvcli.suggestions/1", alias="schema")
    device: str
    available_bytes: Bytes
    total_bytes: Bytes = Field(description="by which the models are ranked")
    models: list[Suggestion]


class PlanDocument(Json):
    """The plan of a run; printed by --dry-run."""

    schema_: Literal["kvcli.plan/1"] = Field(default="kvcli.plan/1", alias="schema")
    model: ModelEntry
    profile: str
    profile_hash: str
    exactness: str
    context: Count | None = Field(description="the window, tokens")
    kv_bytes: Bytes | None = Field(description="keys and values of a full window, wherever they lie")
    estimate_bytes: Bytes | None = Field(description="peak memory with a full window")
    available_bytes: Bytes | None = Field(description="memory of the device")
    fits: bool | None
    order: Order | None = Field(description="what of a prompt is finished first while it is read: a chunk, or a layer")
    documents: list[dict[str, Any]]
    settings: dict[str, Any]
    origins: dict[str, str]


class PathsDocument(Json):
    """Folders that kvcli reads and writes."""

    schema_: Literal["kvcli.paths/1"] = Field(default="kvcli.paths/1", alias="schema")
    paths: dict[str, str]


class CacheKind(Json):
    kind: str
    about: str
    entries: Count
    bytes: Bytes
    freed_entries: Count = Field(description="prune: how many of them went, or would go")
    freed_bytes: Bytes


class CacheDocument(Json):
    """Cached data, which only saves time."""

    schema_: Literal["kvcli.cache/1"] = Field(default="kvcli.cache/1", alias="schema")
    folder: str
    removed: bool = Field(description="whether what is counted as freed is gone")
    kinds: list[CacheKind]


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
    sandbox: list[str] = Field(description="what shuts in the process that parses documents: seccomp, landlock, limits")
    demo_model: bool
    steps: dict[int, float] = Field(
        description="with --speed: steps a second of a random 86M model in bf16, by threads"
    )
    problems: list[str]
