"""Protocol of a drafter, which proposes draft tokens and observes how many were accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Draft, LogitsHook, Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.engine.stats import DraftReport, Step
    from kvcli.kv.slots import KVCache, Usage
    from kvcli.kv.views.view import CompactView
    from kvcli.models.retokenizer import TokenMapping


# tokens of context -> rows of a pass -> its time, in passes of one row
Costs = Callable[[int], Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """Specification of a cache view for lookahead rows or draft tokens: the slots that a policy selects anew every
    `every` tokens."""

    method: str  # "stream" or "quest"; kvcli/assemble.py maps it to a policy
    settings: Mapping[str, int]  # settings of the policy
    every: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ModelPair:
    """The target model and the draft model, which may be the same."""

    target: LM
    draft: LM
    spelling: TokenMapping | None = None  # retokenization between their ids; None = they share a tokenizer


class DraftContext(Protocol):
    """KV of a sequence, as read by passes of a drafter. KV of draft tokens is never stored there."""

    @property
    def cache(self) -> KVCache:
        """The KV cache of the target model."""

    @property
    def view(self) -> CompactView | None:
        """The cache view that the drafter's `view` specifies."""


class Drafter(Protocol):
    """Protocol of a drafter. A drafter cannot change the text, because `accepted_path` (commit.py) samples each token
    as if nothing were drafted, and only then compares it with the draft.

    `start`, `propose` and `observe` may be generators that request passes of a draft model (forward_request.py).
    """

    @property
    def view(self) -> ViewSpec | None:
        """Cache view of the lookahead rows; None = they read the whole KV cache."""

    @property
    def logits_hook(self) -> LogitsHook | None:
        """Function of each row's logits whose result is in `Step.hook_output`; None = none."""

    def expect(self, costs: Costs) -> None:
        """Set the pass times measured earlier on this machine, as initial values only."""

    def start(self, ids: Sequence[int], sampler: Sampler | None = None) -> Passes[None] | None:
        """Start from the committed text `ids` (a new prompt, or an earlier point after an undo).

        `sampler`: how tokens will be sampled, so that draft tokens are sampled alike; None = greedily.
        """

    def propose(self, ids: Sequence[int], room: int, context: DraftContext) -> Passes[Draft] | Draft:
        """Propose draft tokens after `ids`, with no path deeper than `room` tokens. The draft may be empty.

        `context.cache` holds the KV of all ids but the last; it may change between two steps.
        """

    def observe(self, step: Step) -> Passes[None] | None:
        """Observe the result of a decoding step; called once after each step, in order."""

    def usage(self) -> list[Usage]:
        """Return the memory of the KV that the drafter itself stores."""

    def report(self) -> DraftReport | None:
        """Return figures on drafting and why it pauses, for users; None if there is nothing to report."""
