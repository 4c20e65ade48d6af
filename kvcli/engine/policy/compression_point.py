"""A boundary: what a policy is shown of a text before it says what stays."""

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
    """A text between two passes, all of whose tokens are stored."""

    lm: LM
    kv: KVCache
    heard: QueryRecorder
    guard: ProtectedTokens
    ids: Sequence[int]
    kinds: Tensor  # [T] int8, by position; [0] for a policy that asks for none
    phase: Phase
    n_prompt: int  # as in a moment
    is_whole: bool  # was nothing let go so far?
    memory: Any  # what the policy remembers of the text
    _protected: dict[int, Tensor] = field(default_factory=dict)  # by layer, of those it looked at

    @property
    def layers(self) -> range:
        return range(self.lm.n_layers)

    @property
    def open(self) -> list[int]:
        """Layers without a sliding window, which lets go of its past by itself, and with slots of their own."""
        layers = zip(self.lm.sights, self.lm.shapes, strict=True)
        return [i for i, (sight, shape) in enumerate(layers) if sight.window is None and shape.shared_from is None]

    def layer(self, i: int) -> tuple[Slots, LayerContext]:
        """What one layer holds, perhaps as a copy: look at one after the other."""
        slots = self.kv.slots(i)
        if rank := self.lm.shapes[i].rank:
            slots = replace(slots, v=slots.k[..., :rank])
        self._protected[i] = protected = self.guard.covers(slots.pos, self.kinds)
        heard = self.heard.of(i, slots.k)
        of_text = self.phase, len(self.ids), self.n_prompt, heard, self.kinds, protected, self.memory
        return slots, LayerContext.of(self.lm, i, *of_text)

    def ask(self, policy: Policy) -> Steps[Masks]:
        """What the policy keeps, and its guard."""
        masks = yield from await_passes(policy.select(self))
        return [None if mask is None else _guarded(mask, self._protected[i]) for i, mask in enumerate(masks)]


def _guarded(mask: Tensor, protected: Tensor) -> Tensor:
    """With what stays whatever the policy says: in its place, where it names rungs."""
    return mask | protected if mask.dtype is bool_ else mask.masked_fill(protected, 0)
