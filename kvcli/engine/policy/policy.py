"""What a policy is: the answer to one question, which slots to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import Steps
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.compression_point import CompressionPoint
    from kvcli.kernels.attention_mass import Over
    from kvcli.kv.slots import Masks, Slots
    from kvcli.kv.snapshot import Snapshottable

# a prompt is being read in chunks; it has been read; the answer is being written
Phase = Literal["reading", "read", "answering"]


@dataclass(frozen=True, slots=True)
class ProtectedTokens:
    """What no policy takes away, and no pruner leaves behind: the engine keeps it whatever they say."""

    sinks: int = 0  # first tokens
    recent: int = 0  # newest tokens
    kinds: frozenset[int] = (
        frozenset()
    )  # kinds of tokens (kvcli.engine.sequence.token_kinds), such as those of the system prompt

    def covers(self, pos: Tensor, kinds: Tensor) -> Tensor:
        """bool like `pos` [.., S]: of these positions, -1 = empty, those that stay. `kinds` [T] by position."""
        newest = pos.amax(dim=-1, keepdim=True) if pos.shape[-1] else pos
        mask = (pos < self.sinks) | (pos > newest - self.recent)
        if self.kinds and kinds.shape[0]:
            of = kinds.to(pos.device)[pos.clamp(min=0).long()]
            for kind in self.kinds:
                mask |= of == kind
        return mask & (pos >= 0)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """A boundary, as one layer sees it."""

    layer: int
    n_layers: int
    phase: Phase
    n: int  # tokens stored: every position is below
    n_prompt: int  # tokens stored when the last prompt had been read; while one is being read, so far
    q: Tensor  # [H, w, D] the queries that the policy asked for and no more, after rotary embedding; w may be 0
    q_pos: Tensor  # [w] their positions, rising; a query sees slots up to its own position
    kinds: Tensor  # [T] int8, token kinds by position; [0] where neither the policy nor its guard asks for them
    protected: Tensor  # [K, S] bool: slots that stay whatever the policy says
    scale: float  # of scores, before the softmax
    softcap: float = 0.0  # > 0: scores are bent by softcap * tanh(score / softcap)
    window: int | None = None  # tokens that this layer sees at all; None = all
    sink: Tensor | None = None  # [H] learned logits that take attention and give nothing (gpt-oss)
    memory: Any = None  # what the policy remembers of the text

    @classmethod
    def of(
        cls,
        lm: LM,
        layer: int,
        phase: Phase,
        n: int,
        n_prompt: int,
        heard: tuple[Tensor, Tensor],
        kinds: Tensor,
        protected: Tensor,
        memory: Any = None,
    ) -> LayerContext:
        """In a layer of this model; `heard`: queries and their positions."""
        s, sink, (q, pos) = lm.sights[layer], lm.sinks[layer], heard
        of_text = phase, n, n_prompt, q, pos, kinds, protected
        return cls(layer, lm.n_layers, *of_text, s.scale, s.softcap, s.window, sink, memory)

    def mass(self, s: Slots, first: int = 0, over: Over = "mean") -> Tensor:
        """[K, S] float32 at least: attention that slots get from the queries from row `first` on, computed again.

        By default its mean over these queries and over the query heads of a KV head; zeros where nothing was heard.
        """
        from kvcli.kernels.attention_mass import attention_mass

        q, q_pos = self.q[:, first:], self.q_pos[first:]
        return attention_mass(q, q_pos, s.k, s.pos, self.scale, softcap=self.softcap, window=self.window, over=over)


@dataclass(frozen=True, slots=True)
class PolicyRequirements:
    """What a policy is to be shown of the texts of one model, and what it begins to remember of each."""

    recent: int = 0  # of the latest accepted queries
    probes: Callable[[int], Sequence[int]] = lambda n: ()  # tokens of a prompt -> positions whose queries to hold
    lasting: bool = False  # hold those also while the answer is written
    kinds: bool = False  # tell it the kinds of tokens, beside its guard
    marks: frozenset[int] = frozenset()  # kinds that are looked for in a prompt only where somebody asks
    guard: ProtectedTokens = ProtectedTokens()  # what stays whatever it says
    memory: Callable[[], Snapshottable | None] = lambda: None  # what it knows of a text of which nothing was read


class Policy(Protocol):
    """Picks slots to keep. What happens to the rest (drop, demote, hide) is not its business.

    A policy is the `[policy]` table of a profile: each method's frozen dataclass, shared by all texts. What it learns
    of one lies in that text's memory, and goes when the text does.
    """

    @property
    def compression_interval(self) -> int | None:
        """Tokens between two boundaries while decoding; None = the past never changes."""

    def requirements(self, lm: LM) -> PolicyRequirements:
        """What it is to be shown. Raises BadModel for a model that it cannot judge, BadInput for a file that it cannot
        read."""

    def select(self, at: CompressionPoint) -> Steps[Masks] | Masks:
        """At a boundary, slots to keep by layer: bool [K, S], heads may keep different numbers; None = all of them.

        It may ask for passes of its own (kvcli.engine.forward_request).
        """

    def slots(self, n: int) -> int:
        """How many of n slots a head keeps at a boundary, averaged over heads: what memory is planned with."""

    def max_slots_in_prefill(self, n: int) -> int:
        """How many slots a head holds at most while n tokens are read, the last chunk aside."""

    def extra_rows(self, n: int) -> int:
        """How many rows run once more behind a prompt of n tokens when it has been read: what its time is planned with.

        0 = it is read once. Each such row sees all that was stored by then. What the policy itself computes from its
        queries is not counted.
        """

    def scoring_bytes(self, n: int, heads: int, kind: str, number: int) -> int:
        """Bytes beside a pass that judging a prompt of n tokens takes, by a layer of so many query heads.

        `kind`: of the device. `number`: bytes of a number of attention.
        """

    @property
    def is_uneven(self) -> bool:
        """May heads keep different numbers of slots?"""

    @property
    def describe_kept(self) -> str:
        """What stays of a text that is too long for it, in words; "" = everything."""

    def describe_result(self, memory: Any) -> str:
        """What it found out about one text, from what it remembers of it, in words; "" = nothing to tell."""


class PolicyDefaults:
    """What most share: nothing to be shown, a text read once, all heads alike."""

    is_uneven = False

    def requirements(self, lm: LM) -> PolicyRequirements:
        return PolicyRequirements()

    def slots(self, n: int) -> int:
        raise NotImplementedError

    def max_slots_in_prefill(self, n: int) -> int:
        """As many while reading: each chunk's end is a boundary."""
        return self.slots(n)

    def extra_rows(self, n: int) -> int:
        """Nothing is read twice."""
        return 0

    def scoring_bytes(self, n: int, heads: int, kind: str, number: int) -> int:
        """None."""
        return 0

    def describe_result(self, memory: Any) -> str:
        """Nothing."""
        return ""


class PerLayerPolicy(PolicyDefaults):
    """A policy that judges each layer by itself, as a view of scouts must."""

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        """bool [K, S]: slots of one layer that stay."""
        raise NotImplementedError

    def select(self, at: CompressionPoint) -> Masks:
        """Layer by layer."""
        return [self.mask(*at.layer(i)) if at.lm.shapes[i].shared_from is None else None for i in at.layers]
