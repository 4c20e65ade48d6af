"""A compression point: the state of a sequence that an eviction policy gets to select the slots to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch import bool as bool_

from kvcli.engine.forward_request import Steps, await_passes
from kvcli.engine.policy.policy import LayerContext, Phase, Policy, ProtectedTokens
from kvcli.kv.slots import KVCache, Masks, Slots

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.query_recorder import QueryRecorder


@dataclass(frozen=True, slots=True)
class CompressionPoint:
    """A sequence between two passes whose tokens are all stored, at which slots may be evicted or demoted."""

    lm: LM
    kv: KVCache
    query_recorder: QueryRecorder
    guard: ProtectedTokens
    ids: Sequence[int]
    kinds: Tensor  # [T] int8, by position; [0] if the policy does not need kinds
    phase: Phase
    n_prompt: int  # as in LayerContext
    is_whole: bool  # has nothing been evicted so far?
    memory: Any  # the policy's memory of this sequence
    _protected: dict[int, Tensor] = field(default_factory=dict)  # by layer, of those requested so far

    @property
    def layers(self) -> range:
        return range(self.lm.n_layers)

    @property
    def open(self) -> list[int]:
        """Layers that store slots and have no sliding window, which evicts old slots by itself."""
        layers = zip(self.lm.attention_params, self.lm.shapes, strict=True)
        return [i for i, (sight, shape) in enumerate(layers) if sight.window is None and shape.shared_from is None]

    def layer(self, i: int) -> tuple[Slots, LayerContext]:
        """Return the slots of one layer, which may be a copy. Process one layer after the other."""
        slots = self.kv.slots(i)
        if rank := self.lm.shapes[i].rank:
            slots = replace(slots, v=slots.k[..., :rank])
        self._protected[i] = protected = self.guard.covers(slots.pos, self.kinds)
        heard = self.query_recorder.of(i, slots.k)
        of_text = self.phase, len(self.ids), self.n_prompt, heard, self.kinds, protected, self.memory
        return slots, LayerContext.of(self.lm, i, *of_text)

    def ask(self, policy: Policy) -> Steps[Masks]:
        """Return the masks of the policy with the protected tokens added."""
        masks = yield from await_passes(policy.select(self))
        return [None if mask is None else _guarded(mask, self._protected[i]) for i, mask in enumerate(masks)]


def _guarded(mask: Tensor, protected: Tensor) -> Tensor:
    """Add the protected slots to a mask; if the mask names levels, they are kept at level 0."""
    return mask | protected if mask.dtype is bool_ else mask.masked_fill(protected, 0)
