"""Hearing the queries of a prompt while it is read as always: a policy that keeps everything."""

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
Rows = Callable[[int], Sequence[int]]  # tokens of the prompt -> positions to hear, rising


@dataclass(frozen=True)
class QueryProbe(PerLayerPolicy):
    """Hands each layer's stored slots, with the queries at the probed positions, to `hear`; evicts nothing."""

    rows: Rows
    hear: Hear
    recent: int = 0

    compression_interval, describe_kept = None, ""

    def requirements(self, lm: LM) -> PolicyRequirements:
        return PolicyRequirements(self.recent, self.rows, lasting=True, kinds=True)

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        if at.phase != "reading":
            self.hear(s, at)
        return s.pos >= 0


def whole(model: Model) -> GenerationSession:
    """A session with nothing evicted and no drafts, whatever the model's profile."""
    return model.with_profile(full_profile(model.profile)).new_session()


def listening(
    model: Model, rows: Rows, hear: Hear, kinds: Tensor | None = None, *, recent: int = 0, every: int | None = None
) -> GenerationSession:
    """A greedy session of its own that hears these rows once its prompt is read. `kinds` [V] by id.

    While it writes, each `compression_interval` tokens, it hears them and the `recent` newest ones.
    """
    plain = whole(model)
    policy = QueryProbe(rows, hear, recent)
    return GenerationSession(
        plain.lm, plain.cache, plain.drafter, Sampler(), policy=policy, chunk=plain.chunk_rows, every=every, kinds=kinds
    )
