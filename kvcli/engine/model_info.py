"""Facts about a loaded model, for reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a loaded model."""

    id: str  # model name as the user typed it
    path: str
    family: str  # config.model_type
    parameters: int
    layers: int
    heads: int
    kv_heads: int  # largest number in any layer, like the other counts
    head_dim: int
    vocab: int
    dtype: str  # bfloat16 | float16 | float32 | float64
    quant: str  # none | int8 | int4 | nf4
    backend: str  # how the linear layers run: "torch", "native packed int8", "bitsandbytes nf4"
    device: str
    limit: int  # context limit of the model, tokens
    weight_bytes: int
    load_seconds: float
    revision: str = ""
    notes: tuple[str, ...] = ()  # notes for the user, one line each
    details: tuple[str, ...] = ()  # further notes, shown on request
