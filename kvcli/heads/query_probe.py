"""Query probe: a policy that evicts nothing and passes the recorded queries of a prompt to a callback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.engine.policy.policy import LayerContext, PerLayerPolicy, PolicyRequirements
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.quality.controls import full_profile

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.chat.model import Model
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import Slots

Hear = Callable[["Slots", LayerContext], None]
Rows = Callable[[int], Sequence[int]]  # tokens of the prompt -> positions to record, rising


@dataclass(frozen=True)
class QueryProbe(PerLayerPolicy):
    """Policy that passes each layer's slots and the queries at the probed positions to `hear`, and evicts nothing."""

    rows: Rows
    hear: Hear
    recent: int = 0

    compression_interval = None

    def requirements(self, lm: LM) -> PolicyRequirements:
        return PolicyRequirements(self.recent, self.rows, lasting=True, kinds=True)

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        if at.phase != "reading":
            self.hear(s, at)
        return s.pos >= 0


def whole(model: Model) -> GenerationSession:
    """Return a session without eviction and drafting, regardless of the model's profile."""
    return model.with_profile(full_profile(model.profile)).new_session()


def listening(
    model: Model, rows: Rows, hear: Hear, kinds: Tensor | None = None, *, recent: int = 0, every: int | None = None
) -> GenerationSession:
    """Return a new greedy session that calls `hear` with the queries of `rows` after prefill. `kinds` [V] by id.

    While generating, it calls `hear` each `compression_interval` tokens with these and the `recent` newest queries.
    """
    plain = whole(model)
    policy = QueryProbe(rows, hear, recent)
    return GenerationSession(
        plain.lm, plain.cache, plain.drafter, Sampler(), policy=policy, chunk=plain.chunk_rows, every=every, kinds=kinds
    )
