"""Documents of memory planning: model fit, machine calibration, and the memory of earlier runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcli.schemas.base import Bytes, Count, Json, Seconds
from kvcli.settings.schema import Order

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Duration = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # seconds, more than 0


class FitChange(Json):
    """A change with which the model fits, verified by a plan."""

    type: str = Field(description="what to type after the command")
    total: Bytes = Field(description="peak with it")
    ctx: Count


class FitSpeed(Json):
    """Estimates of time."""

    first_token: Seconds = Field(description="of a prompt that fills the context")
    tok_s: Rate = Field(description="plain decoding at the end of that context, without drafts")
    basis: Literal["model", "machine"] = Field(description="passes of this model were timed, or only the machine was")


class FitRuns(Json):
    """Earlier runs of this model on this kind of device, under any profile."""

    runs: Count
    low: int = Field(description="bytes measured beyond the estimate")
    high: int


class FitSplit(Json):
    """Split of a model larger than the GPU: the first layers and the embeddings are on the CPU."""

    layers: Count = Field(description="last layers, on the GPU")
    of: Count = Field(description="layers of the model")
    read: Bytes = Field(description="bytes of weights and KV cache that the CPU reads per token")
    seconds: Seconds = Field(description="added time per token: bytes divided by bandwidth")
    bandwidth: Rate = Field(description="bandwidth of host memory, bytes per second")
    basis: Literal["machine", "assumed"] = Field(description="machine: the bandwidth was measured")
    whole_with: str = Field(
        default="", description="settings with which all layers fit on the GPU, if fewer bits of KV do it"
    )


class FitLevel(Json):
    """Precision level of `memory.budget`, from full precision to dropped."""

    bits: Count = Field(description="16: full precision; 0: offloaded or dropped")
    is_found: bool = Field(description="true: offloaded, so not in device memory")
    token: Bytes = Field(description="bytes per token, all heads and layers")
    room: Count = Field(description="maximum tokens at this level; 0: they take no memory")
    share: float = Field(ge=0, le=1, description="share of the context at equal importance")


class FitBudget(Json):
    """Division of `memory.budget`."""

    asked: str = Field(description='memory.budget; "": only memory.max_loss is set')
    lose: float = Field(ge=0, lt=1, description="memory.max_loss: share of the total score that may be lost")
    told: str = Field(description="summary of the plan")
    bytes: Bytes = Field(description="maximum KV cache at a compression point")
    whole: Bytes = Field(description="KV cache at full precision")
    always: Count = Field(description="first and newest tokens at full precision, as system prompt and tool output")
    always_bytes: Bytes
    is_late: bool = Field(description="true: the cache is compressed only after prefill")
    beside: Bytes = Field(description="additional KV bytes: a forward pass, and the scores of tokens")
    levels: list[FitLevel]
    layers: list[Bytes] = Field(description="bytes per token at full precision, by layer")
    score: str = Field(description="method that scores tokens")
    by: str = Field(description="basis of the score")
    again: Count = Field(description="prompt tokens that are computed twice")
    headmap: str = Field(description='policy.headmap; "": all heads have equal weight')
    is_mapped: bool = Field(description="true: the head map exists")
    passes: Count = Field(description="forward passes to measure the head map of the model")
    map_seconds: Seconds | None = Field(description="time of these passes; null: none, or not measured")
    recall: str = Field(description='how offloaded tokens are read; "": all of them, or none are offloaded')
    elsewhere: str = Field(description='place of tokens beyond the budget; "": they are dropped')


class FitPart(Json):
    """Memory use of one component."""

    name: str
    bytes: Bytes
    changes: list[FitChange] = Field(description="settings that reduce it")


class FitPlan(Json):
    """Memory plan of one profile at one context."""

    profile: str
    profile_hash: str
    exactness: str
    ctx: Count = Field(description="tokens")
    fits: bool
    weights: Bytes
    kv: Bytes = Field(description="KV cache of the context on the device, with spare capacity and index")
    kv_tiers: dict[str, Bytes] = Field(description="KV cache by place: device, host, disk")
    kv_per_token: Bytes
    draft: Bytes
    working: Bytes = Field(description="activations of one pass: hidden states, scores, logits, allocator overhead")
    base: Bytes = Field(description="process without a model, with correction; on a GPU only the correction")
    loading: Bytes = Field(description="additional memory at the peak of loading; 0: loading is not the peak")
    mapped: Bytes = Field(description="pages of weight files during loading, which the system can free")
    total: Bytes = Field(description="peak: base, weights, kv, draft, working and loading together")
    needed: Bytes = Field(description="required free memory: total without mapped pages")
    missing: Bytes = Field(description="missing bytes; 0: it fits")
    max_ctx: Count = Field(description="the longest context that fits, tokens")
    correction: int = Field(
        description="median difference of earlier runs to their estimates, bytes; with fewer than three runs "
        "missing ones count as 0"
    )
    runs: FitRuns | None
    binding: str | None = Field(description="limiting memory; null: it fits")
    order: Order = Field(description="prefill order: in chunks, or layer by layer")
    chosen: dict[str, int | str] = Field(description="settings chosen automatically to fit, by dotted key")
    places: dict[str, Bytes] = Field(description="memory by place: device, host, disk")
    split: FitSplit | None = Field(description="null: the whole model runs on one device")
    changes: list[FitChange]
    speed: FitSpeed | None
    budget: FitBudget | None = Field(description="null: the profile has no budget")
    parts: list[FitPart] | None = Field(description="with --explain, for profiles without a budget")


class FitDocument(Json):
    """Memory needs of a model, profile by profile."""

    schema_: Literal["kvcli.fit/3"] = Field(default="kvcli.fit/3", alias="schema")
    kvcli: str
    model: str
    layers: Count
    kv_heads: Count
    head_dim: Count
    limit: Count = Field(description="context limit of the model, tokens")
    dtype: str
    ctx: Count | None = Field(description="first requested context; null: each plan has its own")
    device: str = Field(description="device of the first plan")
    free_bytes: Bytes = Field(description="available memory of the device")
    kept_free: Bytes = Field(description="part of it that stays free")
    described: bool = Field(description="true: another machine, described by --vram or --ram")
    plans: list[FitPlan]
    calibrated: str | None = Field(description="date of the speed measurement, ISO 8601; null: never")
    notes: list[str]


class PassTime(Json):
    """Time of a pass of `rows` rows over `context` stored tokens."""

    rows: Count
    context: Count
    seconds: Duration = Field(description="median")
    low: Duration
    high: Duration


class ModelTimes(Json):
    """Pass times of one model."""

    id: str
    fingerprint: str
    dtype: str
    quant: str
    device: str
    passes: Annotated[list[PassTime], Field(min_length=1)]


class QuickTimes(ModelTimes):
    """Pass times from a short measurement of one model; empty if the model was too slow for it."""

    passes: list[PassTime]


class CalibrationDocument(Json):
    """Measured speed of this machine."""

    schema_: Literal["kvcli.calibration/2"] = Field(default="kvcli.calibration/2", alias="schema")
    kvcli: str
    date: str = Field(description="ISO 8601 with the offset to UTC")
    fingerprint: str
    cpu: str | None
    device: str
    threads: Count
    torch: str
    bandwidth: Rate = Field(description="memory bandwidth of the device, bytes per second")
    gemm: dict[str, Rate] = Field(min_length=1, description="FLOP/s of a large matrix product, by dtype")
    launch: Seconds = Field(description="time of one minimal operation")
    links: dict[str, Rate] = Field(description="host to device and back, bytes per second; empty without a GPU")
    disk: Rate | None = Field(description="speed of reading an uncached file, bytes per second")
    model: ModelTimes | None


class RunEntry(Json):
    """A line of the run log: one for each turn, of which the last of a process counts. It has no text of the user."""

    schema_: Literal["kvcli.run/2"] = Field(default="kvcli.run/2", alias="schema")
    kvcli: str
    date: str
    run: str = Field(description="process id of the run: answers of one chat count once")
    model: str = Field(description="name as typed: a hub id or a folder")
    profile: str
    profile_hash: str
    device: str
    ctx: Count = Field(description="tokens in the KV cache")
    build: str = Field(description="versions of torch and other imports, which determine the base memory")
    predicted: Bytes = Field(description="estimate without correction by earlier runs")
    measured: Bytes
