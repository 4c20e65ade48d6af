"""Eviction policies: their base class, and their input at a compression point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvcli.kv.footprint import NO_SIZES, Footprint, ModelSizes

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy_inputs import QueryRecorder
    from kvcli.kernels.attention_mass import Over
    from kvcli.kv.slots import KVCache, Masks, Slots
    from kvcli.kv.snapshot import Snapshottable

# "reading": a chunk of the prompt was prefilled; "read": all of it; "answering": the answer is being decoded
Phase = Literal["reading", "read", "answering"]


@dataclass(frozen=True, slots=True)
class ProtectedTokens:
    """Tokens that no policy may evict and no pruner defer. `CompressionPoint.ask` adds them to every mask of a policy;
    a pruner gets them as rows that run through every layer."""

    sinks: int = 0  # first tokens
    recent: int = 0  # newest tokens
    # kinds of tokens (kvcli.engine.sequence.state), such as those of the system prompt
    kinds: frozenset[int] = frozenset()

    def covers(self, pos: Tensor, kinds: Tensor) -> Tensor:
        """Return which of the positions `pos` [.., S] are protected; -1 = empty. `kinds` [T]: by position."""
        newest = pos.amax(dim=-1, keepdim=True) if pos.shape[-1] else pos
        mask = (pos < self.sinks) | (pos > newest - self.recent)
        if self.kinds and kinds.shape[0]:
            of = kinds.to(pos.device)[pos.clamp(min=0).long()]
            for kind in self.kinds:
                mask |= of == kind
        return mask & (pos >= 0)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The context of one layer at a compression point."""

    layer: int
    n_layers: int
    phase: Phase
    n: int  # tokens stored: every position is below it
    n_prompt: int  # tokens stored at the end of the last prefill; during prefill, so far
    q: Tensor  # [H, w, D] the queries that the policy requires, after rotary embedding; w may be 0
    q_pos: Tensor  # [w] their positions, rising; a query attends to slots up to its own position
    kinds: Tensor  # [T] int8, token kinds by position; [0] if neither the policy nor its protected tokens need them
    protected: Tensor  # [K, S] bool: protected slots
    scale: float  # scale of attention scores, before the softmax
    softcap: float = 0.0  # > 0: attention scores become softcap * tanh(score / softcap)
    window: int | None = None  # sliding window of this layer in tokens; None = all
    sink: Tensor | None = None  # [H] learned sink logits, which take attention but have no value (gpt-oss)
    policy_state: Any = None  # the policy's state for the sequence; in a cache view, the last `Selection`

    @classmethod
    def of(
        cls,
        lm: LM,
        layer: int,
        phase: Phase,
        n: int,
        n_prompt: int,
        recorded: tuple[Tensor, Tensor],
        kinds: Tensor,
        protected: Tensor,
        policy_state: Any = None,
    ) -> LayerContext:
        """Return the context of a layer of this model. `recorded`: recorded queries and their positions."""
        s, sink, (q, pos) = lm.attention_params[layer], lm.sinks[layer], recorded
        of_text = phase, n, n_prompt, q, pos, kinds, protected
        return cls(layer, lm.n_layers, *of_text, s.scale, s.softcap, s.window, sink, policy_state)

    def mass(self, s: Slots, first: int = 0, over: Over = "mean") -> Tensor:
        """Return the attention mass of each slot, [K, S] in float32 or wider, recomputed for the queries from row
        `first` on.

        By default it is the mean over these queries and over the query heads of a KV head. Without queries it is zero.
        """
        from kvcli.kernels.attention_mass import attention_mass

        q, q_pos = self.q[:, first:], self.q_pos[first:]
        return attention_mass(q, q_pos, s.k, s.pos, self.scale, softcap=self.softcap, window=self.window, over=over)


@dataclass(frozen=True, slots=True)
class PolicyRequirements:
    """Requirements of a policy for the sequences of one model: recorded queries, kinds of tokens, and a state."""

    recent_queries: int = 0  # number of newest accepted rows whose queries are recorded
    probes: Callable[[int], Sequence[int]] = lambda n: ()  # prompt tokens -> positions whose queries are recorded
    lasting: bool = False  # keep the queries of `probes` while decoding too, as those of the newest rows always are
    kinds: bool = False  # the policy needs kinds of tokens, besides its protected tokens
    marks: frozenset[int] = frozenset()  # kinds that the chat has to mark in prompts (`chat_spans`)
    guard: ProtectedTokens = ProtectedTokens()  # protected tokens
    policy_state: Callable[[], Snapshottable | None] = lambda: None  # makes the policy's state for a new sequence


class Policy:
    """Base of eviction policies, which select the slots to keep. The KV cache or the cache view that a policy works on
    evicts, demotes or hides the others. By default a policy has no requirements and keeps all slots.

    A policy is the `[policy]` table of a profile: a frozen dataclass per method, shared by all sequences. What it knows
    of one sequence is in `LayerContext.policy_state`, which belongs to that sequence.
    """

    # tokens between two compression points while decoding; None = there are none then, and `assemble.session` installs
    # no policy
    compression_interval: int | None
    # True if heads may be in several processes: none depends on others, except by budgets that TopK divides among all
    splits_heads: ClassVar[bool] = False

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Return the requirements for this model. Raises BadModel if the policy does not support the model, BadInput
        for an unreadable file."""
        return PolicyRequirements()

    def select(self, at: CompressionPoint) -> Passes[Masks] | Masks:
        """Select the slots to keep at a compression point, by layer: bool [K, S], heads may keep different numbers;
        None = all.

        It may request forward passes (kvcli.engine.forward_request).
        """
        raise NotImplementedError

    def footprint(self, n: int, of: ModelSizes = NO_SIZES) -> Footprint:
        """Return the slots that the policy keeps of n tokens, and what selecting them takes. Computation by the policy
        itself from its queries is not counted."""
        return Footprint(n, n)

    def describe_result(self, policy_state: Any) -> str:
        """Describe the result for one sequence, from the policy's state for it, in words; "" = nothing to report."""
        return ""


class PerLayerPolicy(Policy):
    """A policy that selects the slots of each layer independently, as a cache view of lookahead rows requires."""

    reads_queries: ClassVar[bool] = False  # in a cache view, it selects by the queries of the running pass

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        """Return which slots of one layer to keep, bool [K, S]."""
        raise NotImplementedError

    def select(self, at: CompressionPoint) -> Masks:
        """Select the slots layer by layer."""
        return [self.mask(*at.layer(i)) if at.lm.shapes[i].shared_from is None else None for i in at.layers]


@dataclass(slots=True)
class CompressionPoint:
    """The input of a policy at a compression point: a sequence between two passes, with the slots to choose from."""

    lm: LM
    kv: KVCache
    query_recorder: QueryRecorder
    guard: ProtectedTokens
    ids: Sequence[int]
    kinds: Tensor  # [T] int8, by position; [0] if the policy does not need kinds
    phase: Phase
    n_prompt: int  # as in LayerContext
    is_whole: bool  # no policy has evicted or moved a slot so far, and no pruner has deferred a token
    policy_state: Any  # the policy's state for this sequence
    pending: int = 0  # id of the pending token
    end: int = 0  # lowest position of later rows
    masks: Masks = ()  # what the policy selected
    _protected: dict[int, Tensor] = field(default_factory=dict)  # by layer, of those requested so far

    @property
    def layers(self) -> range:
        return range(self.lm.n_layers)

    @property
    def full_layers(self) -> list[int]:
        """Layers that a policy compresses: they store slots, and no sliding window evicts them."""
        layers = zip(self.lm.attention_params, self.lm.shapes, strict=True)
        return [i for i, (params, shape) in enumerate(layers) if params.window is None and shape.shared_from is None]

    def layer(self, i: int) -> tuple[Slots, LayerContext]:
        """Return the slots of one layer, which may be a copy. Process one layer after the other."""
        slots = self.kv.slots(i)
        if rank := self.lm.shapes[i].rank:
            slots = replace(slots, v=slots.k[..., :rank])
        self._protected[i] = protected = self.guard.covers(slots.pos, self.kinds)
        recorded = self.query_recorder.of(i, slots.k)
        of_text = self.phase, len(self.ids), self.n_prompt, recorded, self.kinds, protected, self.policy_state
        return slots, LayerContext.of(self.lm, i, *of_text)

    def ask(self, policy: Policy) -> Passes[Masks]:
        """Return the masks of the policy with the protected tokens added."""
        from kvcli.engine.forward_request import await_passes  # late: reading a profile must not import torch

        masks = yield from await_passes(policy.select(self))
        return [None if mask is None else _guarded(mask, self._protected[i]) for i, mask in enumerate(masks)]


def _guarded(mask: Tensor, protected: Tensor) -> Tensor:
    """Add the protected slots to a mask; in a mask of levels they get level 0."""
    from torch import bool as bool_

    return mask | protected if mask.dtype is bool_ else mask.masked_fill(protected, 0)
