"""Status of a model's engine, for health checks and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Status of a model's engine at one time. Counters grow from the load of the model on."""

    running: int = 0  # answers
    waiting: int = 0  # answers that have no memory yet
    idle: int = 0  # open sessions with a KV cache and no answer
    # bytes by (tier, state); tiers as in `TextSession.kv_table`, state "running" or "idle"
    kv_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    pool_bytes: int | None = None  # memory of all KV caches; None = not limited
    promised_bytes: int = 0  # of these, for running answers
    step_age: float | None = None  # seconds since the engine's last sign of life while answers run; None = none runs
    step_rows: int = 0  # of the last engine step: tokens of its forward passes
    step_seconds: float = 0.0  # of the last engine step
    preempted: int = 0  # counter: answers whose KV cache was dropped for others and computed again
    # counter: prompt tokens that were not prefilled: "warm" (own KV cache), "copy" (another session), "disk"
    reused: Mapping[str, int] = field(default_factory=dict)
