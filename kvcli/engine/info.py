"""Facts about a loaded model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded."""

    id: str  # as the user named it
    path: str
    family: str  # config.model_type
    parameters: int
    layers: int
    heads: int
    kv_heads: int  # as the others: the most of any layer
    head_dim: int
    vocab: int
    dtype: str  # bfloat16 | float16 | float32 | float64
    quant: str  # none | int8 | int4 | nf4
    backend: str  # what runs the linear layers, in words: "torch", "native packed int8", "bitsandbytes nf4"
    device: str
    limit: int  # the model's own context limit, tokens
    weight_bytes: int
    load_seconds: float
    revision: str = ""
    notes: tuple[str, ...] = ()  # what the user should know, one line each
    details: tuple[str, ...] = ()  # and what is of use to those who ask for more
