"""Sequence state: token ids and their kinds, the KV cache, how far it can be rewound, and repetition of the answer."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from kvcli.engine.hf.rope import rotaries
from kvcli.engine.policy.compression_point import QueryRecorder
from kvcli.engine.policy.policy import Policy, PolicyRequirements
from kvcli.engine.prefill.aux_cache import AuxCache
from kvcli.engine.prefill.layerwise import LayerwisePrefill, check_model
from kvcli.engine.sequence.sampler import Sampler, SeenTokens
from kvcli.kv.recurrent_state import RecurrentStates
from kvcli.kv.slots import CacheView, KVCache, Loss
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, Snapshottable, State

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import Drafter
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.aux_cache import PromptPruning
    from kvcli.engine.prefill.span_reuse import ReusableSpans, ReuseMethod
    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.settings.schema import Order

# Kinds of tokens, which policies distinguish: by id, and by position in the prompt.


TEXT, SPECIAL, PUNCT, NEWLINE, SYSTEM, END, QUESTION, TOOLS, SHOT = range(9)
# END: punctuation that ends a sentence; TOOLS: output of a tool; SHOT: the first token of an example (a paragraph)


class KindSpan(NamedTuple):
    """A span of positions, start to end - 1, whose tokens have this kind whatever their ids are."""

    start: int
    end: int
    kind: int


def edit_points(spans: Sequence[KindSpan]) -> set[int]:
    """Return positions where a user is likely to edit the text, if spans mark them: where the last message begins
    (behind the template text before it), and where its question begins."""
    specials = [span.end for span in spans if span.kind == SPECIAL]
    return {*specials[-2:-1], *(span.start for span in spans if span.kind == QUESTION)}


def kinds_of(ids: Sequence[int], table: Tensor | None, spans: Sequence[KindSpan]) -> Tensor:
    """Return the kind of each token, [T] int8. `table` [V] gives kinds by id; None = all are text."""
    t = len(ids)
    kinds = torch.zeros(t, dtype=torch.int8) if table is None else table[torch.tensor(ids, dtype=torch.int64)]
    for span in spans:
        kinds[span.start : span.end] = span.kind
    return kinds


# Detect an answer that repeats itself in a loop, from its tokens alone.


ROUNDS = 4  # repetitions of a cycle that count as a loop, however long it is
LONGEST = 256  # longest cycle, in tokens


@dataclass(frozen=True, slots=True)
class Repetition:
    """A loop at the end of a text: `length` tokens that repeat a cycle of `period` tokens."""

    period: int
    length: int

    def __str__(self) -> str:
        what = f"{self.period} tokens" if self.period > 1 else "one token"
        return f"the answer repeated a loop of {what}"


class RepetitionDetector:
    """A detector that gets the answer token by token and reports when its end is a loop.

    A cycle counts as a loop once it fills `least` tokens (0 = never) and occurred ROUNDS times. The answer may copy
    from the prompt, so a loop that occurs in `prompt`, such as a table of zeros, does not count. The result depends on
    the tokens alone, so a text ends at the same token with any drafter.
    """

    def __init__(self, least: int, prompt: Sequence[int] = ()) -> None:
        self._least, self._prompt = least, prompt
        self._ids: list[int] = []
        self._seen: dict[int, deque[int]] = {}  # token -> its positions within the last LONGEST tokens
        self._runs: dict[int, int] = {}  # period -> consecutive tokens so far that equal the token one period earlier

    def push(self, token: int) -> Repetition | None:
        """Add the next token. Return the loop that it completes, or None."""
        if not self._least:
            return None
        at = len(self._ids)
        self._ids.append(token)
        seen = self._seen.setdefault(token, deque())
        while seen and at - seen[0] > LONGEST:
            seen.popleft()
        self._runs = {at - i: self._runs.get(at - i, 0) + 1 for i in reversed(seen)}  # shortest period first
        seen.append(at)
        for period, run in self._runs.items():
            if (n := run + period) >= max(self._least, ROUNDS * period) and not self._is_copy(n):
                return Repetition(period, n)
        return None

    def _is_copy(self, n: int) -> bool:
        return "".join(map(chr, self._ids[-n:])) in self._prompt_text

    @cached_property
    def _prompt_text(self) -> str:
        return "".join(map(chr, self._prompt))  # one character per token, because string search is fast


class SequenceState:
    """The state of one sequence: ids, of which `committed` are in the KV cache and the last is pending.
    `GenerationSession` extends it."""

    def __init__(
        self,
        lm: LM,
        kv: KVCache,
        drafter: Drafter,
        sampler: Sampler,
        *,
        view: CacheView | None = None,
        policy: Policy | None = None,
        chunk: int = 2048,
        every: int | None = None,
        kinds: Tensor | None = None,
        pruning: PromptPruning | None = None,
        by_layers: bool = False,
        reusing: ReuseMethod | None = None,
        checkpoints: int = 8,
    ) -> None:
        """`chunk`: rows per prefill pass. `every`: committed tokens between two compression points (None: none).

        `kinds` [V] int8: the kind of each id, for policies that distinguish kinds (kvcli.engine.sequence.state).
        `pruning`: chooses the prompt rows that are deferred between layers. `by_layers`: layer-wise prefill in chunks
        of `chunk` rows, always used with `pruning`; the policy then runs once, after prefill. Raises BadModel if the
        model cannot stop rows between layers, or `pruning` does not support it. `reusing`: span reuse; raises BadModel
        if the model's keys cannot be rotated to new positions. `checkpoints`: most saved recurrent states.
        """
        self.lm, self.cache, self.drafter, self.sampler = lm, kv, drafter, sampler
        self.states = RecurrentStates(lm.recurrent_layers.like, checkpoints)
        self.view, self.policy, self.pruning, self.reusing = view, policy, pruning, reusing
        self.chunk_rows, self.compression_interval = chunk, every
        self.ids: list[int] = []
        self.committed = 0
        self._n_prompt = 0  # tokens committed at the end of the last prefill
        self.aux_cache = AuxCache(lm, pruning)  # deferred prompt tokens
        self.next_compression_at = self._next_compression()
        self.seen = SeenTokens(lm.vocab, "cpu" if lm.device.type == "mps" else lm.device)  # the device that samples
        self.constraint: Constraint | None = None  # constraint of the answer, which starts at `answer_at`
        self.answer_at = 0
        self.kinds = kinds  # token kinds by id
        self.kind_spans: Sequence[KindSpan] = ()  # token kinds by position
        self._wants = policy.requirements(lm) if policy is not None else PolicyRequirements()
        self.marks = self._wants.marks  # kinds that the policy needs to be marked in prompts
        self.query_recorder = QueryRecorder(self._wants.recent_queries, self._wants.probes)
        self.policy_state: Snapshottable | None = self._wants.policy_state()  # the policy's state for this sequence
        self._is_whole = True  # no policy has evicted or moved a slot, and no pruner has deferred a token
        self._has_deferred = False  # tokens of a prompt were deferred
        self.order: Order = "layers" if by_layers or pruning is not None else "chunks"  # layer-wise or chunked prefill
        self._under_way: LayerwisePrefill | None = None  # running layer-wise prefill
        if self.order == "layers":
            check_model(lm, pruning)
        if reusing is not None:
            rotaries(lm)  # reused keys are rotated to other positions
            if reusing.recompute:
                check_model(lm, None)
        self.reusable_spans: ReusableSpans | None = None  # spans of other sequences, for the current prompt
        self.reused = 0  # tokens whose KV was reused
        self._foreign_from = math.inf  # first position whose KV was computed with another prefix; inf = none
        self.condensed = 0  # first tokens that stand for a longer text; each head keeps different tokens of it
        self.condensed_scores: Mapping[int, Tensor] = {}  # by layer [K, condensed]: scores that chose these tokens

    def rewind(self, n: int) -> int:
        """Rewind to the first n ids. Returns how many of them still have their KV stored:

        - all but the pending one, if their KV is in the cache;
        - with recurrent layers, as many as a checkpoint of the states covers;
        - none, if an eviction or a recorded query cannot be undone.
        """
        keep = self.states.reaches(max(0, min(self.committed, n - 1)))
        is_back, is_cut = keep < self.committed, self._under_way is not None
        must_restart = is_back and (self._forgot or bool(self.query_recorder))  # neither can be undone in part
        must_restart |= self.aux_cache.is_torn or keep < self.condensed
        if must_restart or ((is_back or is_cut) and not self.cache.reaches(keep)):
            keep = 0
        elif is_back and not self._is_whole:  # no slot is missing, but the policy chose levels by later tokens
            self.policy_state = self._wants.policy_state()
        self.cache.crop(keep)
        self.states.crop(keep)
        self._under_way, self._n_prompt = None, min(self._n_prompt, keep)
        self._foreign_from = self._foreign_from if keep > self._foreign_from else math.inf
        self.ids, self.committed = self.ids[: keep + 1 if keep else 0], keep
        if not keep:
            self._is_whole, self._has_deferred, self._n_prompt = True, False, 0
            self.condensed, self.condensed_scores = 0, {}
            self.query_recorder.clear()
            self.aux_cache.clear()
            self.policy_state = self._wants.policy_state()
        self.seen.clear()
        self.seen.add(self.ids)
        self.next_compression_at = self._next_compression()
        return keep

    def take_over(self, other: SequenceState) -> None:
        """Continue the sequence and KV cache of `other`, which becomes empty. Both must store KV in the same way.

        Each keeps its own cache view, which belongs to the drafter. `chunk_rows` becomes the smaller of both, because
        the cache was planned for chunks of `other`.
        """
        other.rewind(len(other.ids))  # a prompt in layer-wise prefill is discarded
        self.chunk_rows = min(self.chunk_rows, other.chunk_rows)
        own_cache = self.cache
        self.replace_cache(other.cache)
        other.replace_cache(own_cache)
        self.states, other.states = other.states, self.states
        self.query_recorder, other.query_recorder = other.query_recorder, self.query_recorder
        self.policy_state, other.policy_state = other.policy_state, self.policy_state
        self._is_whole, self._has_deferred = other._is_whole, other._has_deferred
        self.aux_cache, other.aux_cache = other.aux_cache, self.aux_cache
        self._n_prompt, self._foreign_from = other._n_prompt, other._foreign_from
        self.condensed, self.condensed_scores = other.condensed, other.condensed_scores
        self.ids, self.committed = other.ids, other.committed
        self.rewind(len(self.ids))
        other.rewind(0)

    def adopt(self, ids: Sequence[int], n: int, past: Iterable[tuple[int, Tensor, Tensor, int]]) -> None:
        """Continue as if the first n of `ids`, which start with the ids of the sequence, had been prefilled here.

        `past`: per layer, keys [K, M, D] and values [K, M, E] of tokens not yet stored, and the position of the first.
        """
        assert self.committed < n < len(ids), "no token would be added, or none would be pending"
        self._append(past, n)
        self.seen.add(ids[len(self.ids) : n + 1])
        self.ids = list(ids[: n + 1])
        self.next_compression_at = self._next_compression()

    def _append(self, past: Iterable[tuple[int, Tensor, Tensor, int]], n: int) -> None:
        """Store the KV of the tokens up to n, or nothing if that fails."""
        assert not self.lm.recurrent_layers, "the model has recurrent layers, whose states are not given"
        try:
            self.cache.reserve(n)
            for layer, k, v, start in past:
                self.cache.append(layer, k, v, start)
        except BaseException:
            self.cache.crop(self.committed)
            raise
        self.committed = n

    def state(self) -> State:
        """Return a snapshot of everything that later tokens depend on, without settings and sampling; between passes
        only."""
        fields = {"n_prompt": self._n_prompt, "is_whole": self._is_whole, "has_deferred": self._has_deferred}
        fields |= {"own": int(min(self._foreign_from, self.committed))}
        parts = {"query_recorder": self.query_recorder.state(), "aux_cache": self.aux_cache.state()}
        parts |= {"kv": self.cache.snapshot(), "states": self.states.state()}
        ids = torch.tensor(self.ids[: self.committed], dtype=torch.int32)
        policy_state: State = self.policy_state.snapshot() if self.policy_state is not None else {}
        return {**fields, **parts, "ids": ids, "policy_state": policy_state, "has_empty": True}

    def restore(self, state: State, pending: int) -> None:
        """Restore a snapshot, with another pending token. The sampler is kept.

        Raises SnapshotMismatch for a snapshot of another model or other settings. Any failure leaves an empty sequence.
        """
        self.rewind(0)
        try:
            self._restore(state, pending)
        except BaseException:
            self.committed = 0
            self.rewind(0)
            raise

    def _restore(self, state: State, pending: int) -> None:
        ids = SnapshotReader(state, self.lm.vocab).positions("ids", None).tolist()
        if not 1 <= len(ids) < self.lm.limit:
            raise SnapshotMismatch("its length does not fit the context window")
        given = SnapshotReader(state, len(ids), lacks_empty="has_empty" not in state)
        self.cache.restore(given.part("kv"))
        self.states.restore(given.part("states"))
        self.query_recorder.restore(given.part("query_recorder"), self.lm, self.cache.dtype)
        self.aux_cache.restore(given.part("aux_cache"))
        of_policy = given.part("policy_state")
        if self.policy_state is not None:
            self.policy_state.restore(of_policy)
        self.ids, self.committed, self._n_prompt = [*ids, pending], len(ids), given.number("n_prompt", len(ids))
        self._is_whole, self._has_deferred = (bool(given.number(name, 1)) for name in ("is_whole", "has_deferred"))
        own = given.number("own", len(ids))
        self._foreign_from = own if own < len(ids) else math.inf
        self.seen.clear()
        self.seen.add(self.ids)
        self.next_compression_at = self._next_compression()

    def replace_cache(self, kv: KVCache) -> None:
        """Continue with the KV in the cache `kv`."""
        self.cache = kv
        if self.view is not None:
            self.view = self.view.rebind(kv)

    def fork(self) -> Self:
        """Return a second session with the same sequence and a separate KV cache. The weights are shared."""
        return copy.deepcopy(self, {id(self.constraint): self.constraint})

    def resume(self, ids: Sequence[int]) -> int:
        """Rewind to the prefix shared with `ids`. Returns how many of `ids` need no prefill."""
        shared = self._shared(ids)
        if shared == self.committed < len(ids):  # the pending token has no stored KV, so any token may replace it
            self.ids[shared:] = ids[shared : shared + 1]
            shared += 1
        return self.rewind(shared)

    def _shared(self, ids: Sequence[int]) -> int:
        """Return how many first tokens the sequence and `ids` share."""
        shared = next((i for i, (a, b) in enumerate(zip(self.ids, ids, strict=False)) if a != b), None)
        return min(len(self.ids), len(ids)) if shared is None else shared

    @property
    def approximations(self) -> set[Loss]:
        """Losses of the KV cache so far, which make the answer approximate."""
        found: set[Loss] = {use.lost for use in self.cache.usage() if use.lost is not None}
        if self._forgot or self.condensed:
            found.add("forgotten")
        if self.committed and self.cache.dtype != self.lm.dtype and self.cache.dtype.itemsize <= self.lm.dtype.itemsize:
            found.add("rounded")
        if self._foreign_from < self.committed:
            found.add("reused")
        return found

    @property
    def _forgot(self) -> bool:
        """True if a policy evicted KV for good, or a pruner ever deferred a token, even one that was revived later."""
        return self._has_deferred or (not self._is_whole and self.cache.forgets)

    def _next_compression(self) -> float:
        """Return the token count of the next compression point: a multiple of the compression interval, or of that for
        revivals counted from the start of the answer."""
        n = self.committed
        return n + min(
            _until(n, self.compression_interval), _until(n - self._n_prompt, self.aux_cache.compression_interval)
        )


def _until(n: int, every: int | None) -> float:
    """Return the tokens from n to the next larger multiple of `every`."""
    return math.inf if every is None else every - n % every
