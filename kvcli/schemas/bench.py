"""Benchmark documents: sides on the same prompts with every repetition, and earlier results as a trend."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcli.schemas.base import Bytes, Count, Json, Seconds, Share
from kvcli.schemas.quality import QualityDocument

Verdict = Literal["faster", "slower", "≈"]
Rate = Annotated[float, Field(ge=0, description="tokens per second")]


class BenchModel(Json):
    id: str
    path: str
    revision: str | None = Field(description="commit on the Hugging Face hub")
    family: str
    parameters: Count
    dtype: str
    quant: str
    limit: Count = Field(description="context limit of the model, tokens")


class BenchEnv(Json):
    """Environment of the measurement."""

    date: str = Field(description="ISO 8601 with the offset to UTC")
    system: str
    cpu: str | None
    gpus: list[str]
    device: str = Field(description="device of the model")
    cores: Count | None
    threads: Count | None
    memory_total: Bytes
    versions: dict[str, str | None]
    commit: str | None = Field(description="commit of the kvcli checkout; a + at the end means uncommitted changes")
    load_before: list[float] | None = Field(description="the machine's load average over 1, 5 and 15 minutes")
    load_after: list[float] | None
    quiet: bool | None = Field(description="true: no other program used the cores; null: unknown")

    @property
    def machine(self) -> str | None:
        """The processor or GPU that `device` means."""
        return self.gpus[0] if self.device.startswith("cuda") and self.gpus else self.cpu


class BenchArgs(Json):
    """Arguments of the benchmark, with the defaults filled in."""

    model: str
    profiles: list[str]
    vary: list[str]
    baselines: list[str]
    ctx: list[Count] = Field(description="prompt and new tokens together")
    new: Count
    reps: Count
    warmup: Count
    workloads: list[str]
    interleave: bool
    memory: bool
    quality: str
    seed: int
    set: list[str]
    fail_if: list[str]
    # results of earlier versions lack these
    temperature: float = Field(default=0.0, description="0 = greedy")
    named: list[str] | None = Field(default=None, description="--profiles as typed; null: exact and the current one")
    current: str | None = Field(default=None, description="-P as typed")
    device: str | None = None
    dtype: str | None = None
    quant: str | None = None
    budget: str | None = None
    allow_pickle: bool = False
    query_visible: bool = False
    quality_n: Count | None = None
    quality_lengths: str | None = None
    batch: Count = Field(default=1, description="texts side by side; tok_s and read_tok_s are of all together")


class Samples(Json):
    """A number for each repetition, in the order they ran."""

    tok_s: list[Rate] = Field(description="decoding speed after the first token; 0 if there was only one token")
    read_tok_s: list[Rate] = Field(description="prompt tokens divided by the time to the first token")
    first_token: list[Seconds]


class Figures(Json):
    """A statistic of each list of `samples`; null where there is none."""

    tok_s: float | None
    read_tok_s: float | None
    first_token: float | None


class Ratio(Json):
    """Speed over the baseline's in the same repetition."""

    samples: list[float]
    median: float
    low: float
    high: float
    verdict: Verdict = Field(description="≈ when 1 lies between low and high")


class Ratios(Json):
    tok_s: Ratio | None
    read_tok_s: Ratio | None


class Accept(Json):
    """Drafting, summed over the repetitions."""

    method: str
    new: Count
    passes: Count
    drafted_passes: Count
    drafted_share: Share = Field(description="drafted_passes / passes")
    draft_tokens: Count
    accepted_tokens: Count
    mean_acceptance_length: float = Field(description="1 + accepted_tokens / drafted_passes; 1 without a draft")
    tokens_per_pass: float
    acceptance_rate: Share = Field(description="accepted_tokens / draft_tokens")
    histogram: list[Count] = Field(description="histogram[i]: drafted passes that accepted i draft tokens")
    per_position: list[Share] = Field(description="per_position[i]: share of them that accepted more than i")


class Same(Json):
    """Agreement with the baseline's text, token by token up to the first difference."""

    tokens: Count = Field(description="equal tokens before the first difference")
    of: Count
    share: Share
    first_difference: Count | None = Field(description="position of the first different token, from 0")
    near_tie: bool | None = Field(description="true: rounding explains the difference; null: equal, or not checked")
    margin: float | None = Field(description="difference between the highest logit and that of the other token")
    bound: float | None = Field(description="largest margin that rounding explains")


class BenchRow(Json):
    """Result of one side at one context length on one workload."""

    profile: str = Field(description="a profile, hf, hf-lookup, llama.cpp, or a result of a file")
    ctx: Count
    workload: str
    prompt: Count = Field(description="tokens of the prompt")
    prompt_hash: str = Field(description="hash of the token ids of the prompt")
    new: Count
    samples: Samples
    median: Figures
    low: Figures
    high: Figures
    mean: Figures
    sd: Figures = Field(description="standard deviation; null for one repetition")
    ratio: Ratios = Field(description="both null for the baseline itself")
    text_tok_s: float | None = Field(default=None, description="median decoding speed of one text of a batch")
    accept: Accept | None = Field(description="null: no drafting")
    kv_bytes: Bytes | None
    peak_bytes: Bytes | None = Field(description="peak memory, measured in a separate process")
    same: Same | None = Field(description="null for the baseline itself, or where texts cannot be compared")
    steady: bool | None = Field(description="true: all repetitions gave the same text; null: fewer than two")
    exactness: str | None = Field(description="exactness of the profile; null for other baselines")
    setup: dict[str, str] = Field(description="other settings of this profile or baseline")
    ids: list[Count] = Field(description="token ids of the last repetition")
    ends: Count | None = Field(description="position of the first stop token; later tokens are not part of the answer")
    error: str | None = Field(description="reason for missing figures")


class BenchLine(BenchRow):
    """A row by itself, one line of --format jsonl."""

    schema_: Literal["kvcli.bench_row/1"] = Field(default="kvcli.bench_row/1", alias="schema")
    kvcli: str
    model: str
    date: str
    commit: str | None
    machine: str | None
    baseline: str


class Check(Json):
    """Result of one --fail-if on one row."""

    expression: str
    profile: str
    ctx: Count
    workload: str
    value: float | None = Field(description="null: the result has no such figure; the check fails")
    limit: float
    failed: bool


class BenchDocument(Json):
    """Sides compared on the same prompts, repetitions interleaved."""

    schema_: Literal["kvcli.bench/1"] = Field(default="kvcli.bench/1", alias="schema")
    kvcli: str
    model: BenchModel
    env: BenchEnv
    args: BenchArgs
    complete: bool = Field(description="false: stopped before the end")
    baseline: str = Field(description="profile or baseline that `ratio` and `same` refer to")
    rows: list[BenchRow]
    checks: list[Check]
    quality: QualityDocument | None
    notes: list[str]


class PlannedSide(Json):
    name: str
    kind: str = Field(description="profile, or the name of a baseline")
    profile_hash: str | None


class BenchPlanDocument(Json):
    """The planned measurements; printed by --dry-run."""

    schema_: Literal["kvcli.bench_plan/1"] = Field(default="kvcli.bench_plan/1", alias="schema")
    args: BenchArgs
    baseline: str
    sides: list[PlannedSide]
    runs: Count = Field(description="measured and warm-up runs")
    memory_runs: Count = Field(description="runs in separate processes, for peak memory")
    notes: list[str]


class ServerBenchRow(Json):
    """Result of a server for one number of clients."""

    clients: Count = Field(description="requests at the same time")
    answers: Count = Field(description="measured requests")
    prompt: Count = Field(description="tokens, median")
    cached: Count = Field(description="tokens of the prompt that the server had already, median")
    new: Count = Field(description="tokens of an answer, median")
    tok_s: list[Rate] = Field(description="of each round: tokens of all answers by the time to the end of the last one")
    first_token: Seconds = Field(description="time to the first text of an answer, median")
    gap_p95: Seconds | None = Field(description="time between two pieces of text: 95 of 100 are shorter")
    acceptance_rate: Share | None = Field(description="accepted_tokens / draft_tokens, if the server tells them")
    kv_bytes: Bytes | None = Field(description="KV cache of an answer, the largest, if the server tells it")


class ServerBenchDocument(Json):
    """Speed of an OpenAI-compatible server as its clients see it; rounds of all numbers of clients take turns."""

    schema_: Literal["kvcli.server_bench/1"] = Field(default="kvcli.server_bench/1", alias="schema")
    url: str
    server: str = Field(description="program, if it says so")
    model: str
    workload: str
    rows: list[ServerBenchRow]


class HistoryEntry(Json):
    """A row of an earlier benchmark."""

    date: str
    commit: str | None
    kvcli: str
    profile: str
    ctx: Count
    workload: str
    tok_s: float | None = Field(description="median")
    first_token: float | None
    ratio: float | None = Field(description="median, relative to the baseline of that run")
    baseline: str
    verdict: Verdict | None
    same: Share | None
    peak_bytes: Bytes | None
    quiet: bool | None
    machine: str | None = Field(description="processor or GPU")
    file: str


class BenchHistoryDocument(Json):
    """Saved benchmarks of one model, oldest first."""

    schema_: Literal["kvcli.bench_history/1"] = Field(default="kvcli.bench_history/1", alias="schema")
    model: str
    entries: list[HistoryEntry]
