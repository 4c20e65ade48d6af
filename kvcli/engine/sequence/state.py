"""Sequence state: token ids and their kinds, the KV cache, how far it can be rewound, and repetition of the answer."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from kvcli.engine.policy.policy_inputs import QueryRecorder
from kvcli.engine.policy.policy_record import PolicyRecord
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.stored_kv import StoredKV
from kvcli.engine.sequence.token_history import TokenHistory
from kvcli.kv.companion import Companion
from kvcli.kv.recurrent_state import RecurrentStates
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, State

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import Drafter
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import Policy
    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.kv.slots import KVCache, Loss
    from kvcli.kv.views.view import CompactView

C = TypeVar("C", bound=Companion)

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


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first tokens two texts share."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):  # compared in C, because a server compares many
        return n
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


class SequenceState:
    """The state of one sequence: ids, of which `committed` are in the KV cache and the last is pending, and companions.
    `GenerationSession` extends it."""

    def __init__(
        self,
        lm: LM,
        kv: KVCache,
        drafter: Drafter,
        sampler: Sampler,
        *,
        view: CompactView | None = None,
        policy: Policy | None = None,
        companions: Iterable[Companion] = (),
        chunk: int = 2048,
        every: int | None = None,
        kinds: Tensor | None = None,
        checkpoints: int = 8,
    ) -> None:
        """`companions`: those of methods, in the order of their effects. They act after the policy has chosen slots and
        before the KV cache evicts the others. `chunk`: rows per prefill pass. `every`: committed tokens between two
        compression points (None: none). `kinds` [V] int8: the kind of each id, for policies that distinguish kinds.
        `checkpoints`: most saved recurrent states.
        """
        self.lm, self.drafter, self.sampler = lm, drafter, sampler
        self.states, self.stored_kv = RecurrentStates(lm.recurrent_layers.like, checkpoints), StoredKV(kv, view)
        self.policy_record = PolicyRecord(lm, policy, self.stored_kv)
        wants = self.policy_record.wants
        self.query_recorder = QueryRecorder(lm, kv.dtype, wants.recent_queries, wants.probes, lasting=wants.lasting)
        # in the order in which they are rewound and take effect at a compression point
        self.companions = [self.states, self.policy_record, *companions, self.stored_kv, self.query_recorder]
        self.chunk_rows, self.compression_interval = chunk, every
        self.ids: list[int] = []
        self.committed = 0
        self._n_prompt = 0  # tokens committed at the end of the last prefill
        # committed tokens before and all tokens after each prefill; earlier KV was not computed here
        self.prefills: list[tuple[int, int]] = []
        self.answer_end: int | None = None  # ids without those that a pass added behind the end of an answer
        self.next_compression_at = self._next_compression()
        # on the device that samples
        self.history = TokenHistory(lm.vocab, "cpu" if lm.device.type == "mps" else lm.device)
        self.constraint: Constraint | None = None  # constraint of the answer, which starts at `answer_at`
        self.answer_at = 0
        self.is_scored = False  # the logits of each step are read after it
        self.kinds = kinds  # token kinds by id
        self.kind_spans: Sequence[KindSpan] = ()  # token kinds by position
        self.marks = wants.marks  # kinds that the policy needs to be marked in prompts

    def find(self, kind: type[C]) -> C | None:
        """Return the companion of this class, for the method that it belongs to; None = the sequence has none."""
        return next((one for one in self.companions if type(one) is kind), None)

    @property
    def cache(self) -> KVCache:
        return self.stored_kv.cache

    @property
    def view(self) -> CompactView | None:
        """The view that lookahead rows read; None = they read the KV cache."""
        return self.stored_kv.view

    @property
    def policy(self) -> Policy | None:
        return self.policy_record.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self.policy_record.policy = policy

    @property
    def condensed(self) -> int:
        """Number of first tokens that stand for a longer text."""
        return max(one.condensed for one in self.companions)

    def rewind(self, n: int) -> int:
        """Rewind to the first n ids. Returns how many of them still have their KV stored:

        - all but the pending one, if their KV is in the cache;
        - with recurrent layers, as many as a checkpoint of the states covers;
        - none, if an eviction or a recorded query cannot be undone.
        """
        of = self.committed
        keep = max(0, min(of, n - 1))
        for companion in self.companions:
            keep = companion.reaches(keep, of)
        self.committed = 0  # if a companion fails, nothing is left to go on from
        for companion in self.companions:
            companion.rewind(keep, of)
        self.ids, self.committed = self.ids[: keep + 1 if keep else 0], keep
        self._n_prompt = min(self._n_prompt, keep)
        self.history.clear()
        self.history.add(self.ids)
        self.next_compression_at = self._next_compression()
        return keep

    def take_over(self, other: SequenceState) -> None:
        """Continue the sequence and KV cache of `other`, which becomes empty. Both must have been made alike.

        Each keeps its own cache view, which belongs to the drafter. `chunk_rows` becomes the smaller of both, because
        the cache was planned for chunks of `other`.
        """
        other.rewind(len(other.ids))  # a prompt in layer-wise prefill is discarded
        self.chunk_rows = min(self.chunk_rows, other.chunk_rows)
        mine, its = self.stored_kv, other.stored_kv
        mine.view, its.view = its.view, mine.view
        for name in ("companions", "states", "policy_record", "stored_kv", "query_recorder", "prefills", "answer_end"):
            vars(self)[name], vars(other)[name] = vars(other)[name], vars(self)[name]
        for stored_kv in (mine, its):
            stored_kv.replace(stored_kv.cache)
        self.ids, self.committed, self._n_prompt = other.ids, other.committed, other._n_prompt
        self.rewind(len(self.ids))
        other.rewind(0)

    def adopt(self, ids: Sequence[int], n: int, past: Iterable[tuple[int, Tensor, Tensor, int]]) -> None:
        """Continue as if the first n of `ids`, which start with the ids of the sequence, had been prefilled here.

        `past`: per layer, keys [K, M, D] and values [K, M, E] of tokens not yet stored, and the position of the first.
        """
        for _ in self.adopt_by_layer(ids, n, past):
            pass

    def adopt_by_layer(
        self, ids: Sequence[int], n: int, past: Iterable[tuple[int, Tensor, Tensor, int]]
    ) -> Iterator[None]:
        """Do what `adopt` does, and yield after each layer."""
        assert self.committed < n < len(ids), "no token would be added, or none would be pending"
        yield from self.append_by_layer(past, n)
        self.history.add(ids[len(self.ids) : n + 1])
        self.ids = list(ids[: n + 1])
        self.next_compression_at = self._next_compression()

    def append_by_layer(self, past: Iterable[tuple[int, Tensor, Tensor, int]], n: int) -> Iterator[None]:
        """Store the KV of the tokens up to n, and yield after each layer; nothing is stored if that does not end."""
        assert not self.lm.recurrent_layers, "the model has recurrent layers, whose states are not given"
        try:
            for layer in self.lm.storing:
                self.cache.reserve(max(n, len(self.ids)), [layer])
                yield
            for layer, k, v, start in past:
                self.cache.append(layer, k, v, start)
                yield
        except BaseException:
            self.cache.crop(self.committed)
            raise
        self.committed = n

    def state(self) -> State:
        """Return a snapshot of everything that later tokens depend on, without settings and sampling; between passes
        only."""
        ids = torch.tensor(self.ids[: self.committed], dtype=torch.int32)
        found: dict[str, Any] = {"ids": ids, "n_prompt": self._n_prompt, "has_empty": True}
        for companion in self.companions:
            found |= companion.snapshot()
        return found

    def restore(self, state: State, pending: int) -> None:
        """Restore a snapshot, with another pending token. The sampler is kept.

        Raises SnapshotMismatch for a snapshot of another model or other settings. Any failure leaves an empty sequence.
        """
        self.rewind(0)
        self.prefills, self.answer_end = [], None  # a snapshot does not tell how it was computed
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
        for companion in self.companions:
            companion.restore(given)
        self.ids, self.committed, self._n_prompt = [*ids, pending], len(ids), given.number("n_prompt", len(ids))
        self.history.clear()
        self.history.add(self.ids)
        self.next_compression_at = self._next_compression()

    def fork(self) -> Self:
        """Return a second session with the same sequence and a separate KV cache. The weights are shared."""
        return copy.deepcopy(self, {id(self.constraint): self.constraint})

    def resume(self, ids: Sequence[int]) -> int:
        """Rewind to the prefix shared with `ids`. Returns how many of `ids` need no prefill."""
        shared = self.shared(ids)
        if shared == self.committed < len(ids):  # the pending token has no stored KV, so any token may replace it
            self.ids[shared:] = ids[shared : shared + 1]
            shared += 1
        return self.rewind(shared)

    def shared(self, ids: Sequence[int]) -> int:
        """Return how many first tokens the sequence and `ids` share."""
        return shared_length(self.ids, ids)

    @property
    def approximations(self) -> set[Loss]:
        """Losses of the KV cache so far, which make the answer approximate."""
        found: set[Loss] = {use.lost for use in self.cache.usage() if use.lost is not None}
        found |= {loss for one in self.companions if (loss := one.loss(self.committed)) is not None}
        if self.committed and self.cache.dtype != self.lm.dtype and self.cache.dtype.itemsize <= self.lm.dtype.itemsize:
            found.add("rounded")
        return found

    def _next_compression(self) -> float:
        """Return the token count of the next compression point."""
        n, every = self.committed, self.compression_interval
        by_interval = math.inf if every is None else n + every - n % every
        return min(by_interval, *(one.next_point(n, self._n_prompt) for one in self.companions))
