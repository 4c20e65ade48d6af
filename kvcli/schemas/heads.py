"""Documents of `kvcli profile-heads`: the measured role of each attention head of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcli.schemas.base import Bytes, Count, Json, Seconds, Share

Probe = Literal["prompt", "ablate", "needle", "reason", "repeat"]
ByHead = list[list[float]]  # [layers][KV heads]

SAMPLE = 1024  # tokens of a text with hidden facts, at most: short texts show retrieval, and each is read many times
TEXTS = 4  # texts with four hidden facts each


class HeadsPrompt(Json):
    """The prompt of the prompt probe. The text itself is not stored."""

    name: str
    sha256: str = Field(description="of the token ids")
    tokens: Count
    rows: Count = Field(description="number of recorded queries")


class HeadsPolicy(Json):
    """FastGen's policy for each head on this prompt, and all candidates."""

    criterion: str = Field(description="statistic of recovered mass: cvar10 (mean of the worst 10 %), mean, p05")
    recovery: Share | None = Field(description="required recovered mass per head; null: `keep` is set")
    keep: Share | None = Field(description="share of tokens kept over all heads; null: `recovery` is set")
    candidates: list[str] = Field(description="policies, from the smallest to the full cache")
    chosen: list[list[int]] = Field(description="[layers][KV heads] index into candidates; -1: sees only a window")
    forced: list[tuple[int, int]] = Field(description="(layer, KV head) that keep the full cache because of a head map")
    mass: dict[str, list[ByHead]] = Field(description="criterion -> [candidates][layers][KV heads]")
    cost: list[ByHead] = Field(description="[candidates][layers][KV heads] tokens")
    guard: Count = Field(description="newest tokens that every candidate keeps")
    local: Count = Field(description="newest tokens that candidates with `local` keep")
    sinks: Count
    kept: Share = Field(description="share of tokens kept by the chosen policies, over all heads")
    recovered: Share = Field(description="recovered mass of the chosen policies, mean over heads and tokens")
    worst: Share = Field(description="recovered mass of the worst 10 % of tokens")


class HeadsTop(Json):
    """A token with a large attention mass for a head."""

    position: Count
    text: str
    mass: Share


class HeadsKv(Json):
    """Bytes of keys and values, in full and if only some heads keep all tokens."""

    context: Count
    whole: Bytes
    policy: Bytes | None = Field(description="KV cache with the chosen policies; null: the prompt was not probed")
    headmap: Bytes = Field(description="KV cache if only heads in `suggest` keep the full cache")


class HeadsSuggest(Json):
    """Heads that keep all tokens; the others keep the first and the newest tokens."""

    full: list[tuple[int, int]] = Field(description="(layer, KV head), the most important first")
    carried: Share = Field(description="share of all scores in these heads")
    sinks: Count
    window: Count


class HeadsCheck(Json):
    """Questions about hidden facts, answered with all heads full, and with only the suggested heads full."""

    of: Count
    whole: Count = Field(description="correct answers with the full cache")
    restricted: Count = Field(description="correct answers with full suggested heads and the others restricted")
    without: Count = Field(description="correct answers with only the suggested heads restricted")
    kl: Annotated[float, Field(ge=0)] = Field(description="KL divergence with full suggested heads, nats per token")


class HeadsCompare(Json):
    """Comparison with another prompt or another head profile."""

    name: str
    scalar: str = Field(description="which scalar was compared")
    spearman: float | None = Field(description="rank correlation; null: one side is the same everywhere")
    changed: Count | None = Field(description="heads with another policy; null: one side chose none")
    difference: ByHead = Field(description="this run minus the other")


class HeadsStability(Json):
    """The prompt probe repeated while an answer is generated."""

    every: Count
    tokens: list[Count] = Field(description="generated tokens at each repetition of the probe")
    changed: list[Count] = Field(description="heads with another policy than at the end of the prompt")
    drift: list[Share] = Field(description="mean change of recovered mass of the policy chosen first")


class HeadsDocument(Json):
    """Attention of each KV head, its retrieval, and the share of the KV cache that it needs."""

    schema_: Literal["kvcli.heads/1"] = Field(default="kvcli.heads/1", alias="schema")
    kvcli: str
    model: str
    profile: str
    fingerprint: str = Field(description="of the weights and this version")
    weights: str = Field(description="hash of the weight files")
    tokenizer: str = Field(description="hash of the vocabulary")
    layers: Count
    kv_heads: Count
    query_heads: Count
    probed: list[Count] = Field(description="measured layers")
    windows: list[Count | None] = Field(description="attention window per layer; null: full attention")
    ctx: Count = Field(description="maximum prompt tokens")
    samples: Count = Field(description="texts with hidden facts")
    seed: Count
    probes: list[Probe]
    ranked_by: Probe = Field(description="probe of the head map")
    heads: list[list[Share]] = Field(description="head map: from 0.5 a head needs the full context")
    scalars: dict[str, ByHead]
    query: dict[str, ByHead] = Field(description="[layers][query heads]: scores before grouping by KV head")
    offsets: list[list[int]] | None = Field(description="distance of the read needle tokens from the next token")
    policy: HeadsPolicy | None
    distances: list[list[list[float]]] | None = Field(description="mass by distance: 0, 1, 2-3, 4-7, ... tokens")
    kinds: dict[str, ByHead] | None = Field(description="mass by kind of token")
    top: list[list[list[HeadsTop]]] | None
    prompt: HeadsPrompt | None
    kv: list[HeadsKv] = Field(description="the context of the run first")
    suggest: HeadsSuggest
    check: HeadsCheck | None
    stability: HeadsStability | None
    compare: HeadsCompare | None
    seconds: dict[str, Seconds]
    notes: list[str]
