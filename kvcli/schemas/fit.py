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

    type: str = Field(description="what to type behind the command")
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

    layers: Count = Field(description="on the GPU, the last ones")
    of: Count = Field(description="layers of the model")
    read: Bytes = Field(description="weights, keys and values that the CPU reads for each token")
    seconds: Seconds = Field(description="that this takes, beside the GPU's part: bytes over bandwidth")
    bandwidth: Rate = Field(description="of host memory, bytes a second")
    basis: Literal["machine", "assumed"] = Field(description="whether that was measured here")


class FitRung(Json):
    """Precision level of `memory.budget`, from full precision to dropped."""

    bits: Count = Field(description="16: as they come; 0: elsewhere or nowhere")
    is_found: bool = Field(description="is it another place, whose bytes are not the device's?")
    token: Bytes = Field(description="of all heads and layers; layers may differ")
    room: Count = Field(description="tokens there is room for, were all of them here; 0 where they take nothing")
    share: float = Field(ge=0, le=1, description="of the context, were all its tokens worth alike")


class FitBudget(Json):
    """Division of `memory.budget`."""

    asked: str = Field(description='memory.budget; "": only memory.max_loss says how much')
    lose: float = Field(ge=0, lt=1, description="memory.max_loss: share of a text's worth that may go")
    told: str = Field(description="the plan in a line")
    bytes: Bytes = Field(description="that keys and values may take at a boundary")
    whole: Bytes = Field(description="that the context would take in full")
    always: Count = Field(description="first and newest tokens that stay in full, as do system prompt and tool text")
    always_bytes: Bytes
    is_late: bool = Field(description="nothing is placed before a prompt has been read: it lies in memory whole")
    beside: Bytes = Field(description="of kv, what comes on top of it: a pass, and what is remembered of tokens")
    rungs: list[FitRung]
    layers: list[Bytes] = Field(description="of a token in full, by layer")
    score: str = Field(description="method that says what a token is worth")
    by: str = Field(description="what it goes by")
    again: Count = Field(description="rows that run once more behind a prompt of this length")
    headmap: str = Field(description='policy.headmap; "": heads weigh alike')
    is_mapped: bool = Field(description="a map that this asks for is there")
    passes: Count = Field(description="that making the model's own map takes: few rows each, behind 4 texts")
    map_seconds: Seconds | None = Field(description="that these take; null: there is none, or passes were not timed")
    recall: str = Field(description='how what is elsewhere is read; "": all of it, or there is no such place')
    elsewhere: str = Field(description='place of what has no room; "": it is gone')


class FitPart(Json):
    """Memory use of one component."""

    name: str
    bytes: Bytes
    changes: list[FitChange] = Field(description="that make it smaller, each planned")


class FitPlan(Json):
    """Memory plan of one profile at one context."""

    profile: str
    profile_hash: str
    exactness: str
    ctx: Count = Field(description="tokens")
    fits: bool
    weights: Bytes
    kv: Bytes = Field(
        description="keys and values on the device, of the whole context, with spare room and recall's index"
    )
    kv_tiers: dict[str, Bytes] = Field(description="the same by where they lie: the device, host behind a GPU, disk")
    kv_per_token: Bytes
    draft: Bytes
    working: Bytes = Field(description="one pass: activations, scores, logits, and what the allocator keeps")
    base: Bytes = Field(description="the process without a model, correction included; on a GPU the correction alone")
    loading: Bytes = Field(description="what the highest moment of loading takes beyond all these; 0 where it is lower")
    mapped: Bytes = Field(description="while loading: pages of weight files, which the system can take back")
    total: Bytes = Field(description="peak: base, weights, kv, draft, working and loading together")
    needed: Bytes = Field(description="that must be free: total without mapped pages")
    missing: Bytes = Field(description="0 where it fits")
    max_ctx: Count = Field(description="the longest context that fits, tokens")
    correction: int = Field(
        description="bytes that earlier runs took beyond their estimates, the middle of at least three; of fewer, "
        "the missing ones count as 0"
    )
    runs: FitRuns | None
    binding: str | None = Field(description="what it fails on; null where it fits")
    order: Order = Field(description="what of a prompt is finished first while it is read: a chunk of it, or a layer")
    chosen: dict[str, int | str] = Field(description="settings that nobody typed, by dotted key: what fits")
    places: dict[str, Bytes] = Field(description="all of it by where it lies while it runs: a device, host, disk")
    split: FitSplit | None = Field(description="null: all of the model runs on one device")
    changes: list[FitChange]
    speed: FitSpeed | None
    budget: FitBudget | None = Field(description="null: the profile has none")
    parts: list[FitPart] | None = Field(description="with --explain, of a profile without a budget")


class FitDocument(Json):
    """Memory needs of a model, profile by profile."""

    schema_: Literal["kvcli.fit/2"] = Field(default="kvcli.fit/2", alias="schema")
    kvcli: str
    model: str
    layers: Count
    kv_heads: Count
    head_dim: Count
    limit: Count = Field(description="the model's own context limit, tokens")
    dtype: str
    ctx: Count | None = Field(description="the first context asked for; null: each plan's own")
    device: str = Field(description="of the first plan")
    free_bytes: Bytes = Field(description="available on it")
    kept_free: Bytes = Field(description="of these, what no plan uses")
    described: bool = Field(description="not this machine, but one that --vram or --ram describes")
    plans: list[FitPlan]
    calibrated: str | None = Field(description="when times were measured here, ISO 8601; null: never")
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
    bandwidth: Rate = Field(description="reading memory of the device, bytes a second")
    gemm: dict[str, Rate] = Field(min_length=1, description="FLOP a second of a large product, by dtype")
    launch: Seconds = Field(description="one operation on almost nothing")
    links: dict[str, Rate] = Field(description="host to device and back, bytes a second; empty without a GPU")
    disk: Rate | None = Field(description="reading a file that is not in memory, bytes a second")
    model: ModelTimes | None


class RunEntry(Json):
    """A line of the run log: one for each turn, of which the last of a process counts. It has no text of the user."""

    schema_: Literal["kvcli.run/2"] = Field(default="kvcli.run/2", alias="schema")
    kvcli: str
    date: str
    run: str = Field(description="of one process, so that many turns of a long chat count once")
    model: str = Field(description="as it was named: a hub id or a folder")
    profile: str
    profile_hash: str
    device: str
    ctx: Count = Field(description="tokens in memory")
    build: str = Field(description="of torch and what else is imported: how much the program takes depends on it")
    predicted: Bytes = Field(description="before any correction by earlier runs")
    measured: Bytes
