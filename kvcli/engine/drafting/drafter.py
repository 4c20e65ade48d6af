"""What a drafter is: something that proposes rows, and hears what became of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcli.engine.drafting.report import DraftReport
    from kvcli.engine.forward_request import LogitsHook, Steps
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.rows import Draft
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.engine.stats import Step
    from kvcli.kv.slots import CacheView, KVCache, Usage
    from kvcli.models.retokenizer import TokenMapping


# tokens of context -> rows of a pass -> its time in passes of one row
Costs = Callable[[int], Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """How scouts or guesses read the past: what a policy keeps, chosen anew every `every` tokens."""

    kind: str  # "stream" or "quest"; which policy that is, kvcli/assemble.py knows
    settings: Mapping[str, int]  # of the policy
    every: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ModelPair:
    """The model that writes, and the one that drafts for it, which may be the same."""

    target: LM
    draft: LM
    spelling: TokenMapping | None = None  # of text in both their ids; None = they share them


class DraftContext(Protocol):
    """What is stored of a text, for passes of guesses to read: nothing of theirs is ever stored in it."""

    @property
    def cache(self) -> KVCache:
        """The past of what is written."""

    @property
    def view(self) -> CacheView | None:
        """The part of it that the drafter's view asks for."""


class Drafter(Protocol):
    """Proposes guesses. Nothing it does can change the text: the engine samples, then matches.

    `start`, `propose` and `observe` may be generators, which ask for passes of a model of their own
    (forward_request.py).
    """

    @property
    def view(self) -> ViewSpec | None:
        """How scouts read the past; None = they read all of it."""

    @property
    def logits_hook(self) -> LogitsHook | None:
        """What it wants to know of each row's logits, by `Step.hook_output`; None = nothing."""

    def expect(self, costs: Costs) -> None:
        """What passes take, as measured on this machine before: a start, no more."""

    def start(self, ids: Sequence[int], sampler: Sampler | None = None) -> Steps[None] | None:
        """The committed text is now `ids` (a new prompt, or an earlier point after an undo).

        `sampler`: how its tokens will be drawn, for guesses to be drawn alike; None = greedily.
        """

    def propose(self, ids: Sequence[int], room: int, past: DraftContext) -> Steps[Draft] | Draft:
        """Guesses for what follows `ids`; no path deeper than `room` tokens. May be empty.

        `past` holds all but the last of them, and changes between two steps.
        """

    def observe(self, step: Step) -> Steps[None] | None:
        """What one step made of the proposal; called once after each step, in order."""

    def usage(self) -> list[Usage]:
        """Bytes of keys and values of its own."""

    def report(self) -> DraftReport | None:
        """How drafting fares and why it pauses, for people; None if there is nothing to say."""
