"""A text and its past: what was read of it, how far it can be taken back, and from where else a past may come."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvcli.engine.policy.policy import Policy, PolicyRequirements
from kvcli.engine.policy.query_recorder import QueryRecorder
from kvcli.engine.prefill.aux_cache import AuxCache
from kvcli.engine.prefill.layerwise import LayerwisePrefill, check_model
from kvcli.engine.sequence.sampler import Sampler, SeenTokens
from kvcli.kv.recurrent_state import RecurrentStates
from kvcli.kv.slots import CacheView, KVCache, Loss
from kvcli.kv.snapshot import SnapshotMismatch, SnapshotReader, Snapshottable, State

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import Drafter
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.prompt_pruner import PromptPruning
    from kvcli.engine.prefill.span_reuse import ReusableSpans, ReuseMethod
    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.engine.sequence.token_kinds import KindSpan
    from kvcli.settings.schema import Order


class SequenceState:
    """Ids, of which `committed` are stored in `kv` and the last is pending. What makes it longer is a session's."""

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
        """`chunk` rows a pass while reading; the past may change each `every` committed tokens (None: never).

        `kinds` [V] int8: the kind of each id, for policies that tell tokens apart (kvcli.engine.sequence.token_kinds).
        `pruning`: which rows of a prompt stay behind between layers. `by_layers`: read prompts layer by layer, in parts
        of `chunk` rows, as is done with `pruning` in any case; a policy then judges once all is read. Raises BadModel
        for a model whose rows cannot be stopped between layers, or that `pruning` cannot judge. `reusing`: what of a
        prompt is taken over unread, refused for a model whose keys cannot be turned. `checkpoints`: of states, at most.
        """
        self.lm, self.cache, self.drafter, self.sampler = lm, kv, drafter, sampler
        self.states = RecurrentStates(lm.mixers.like, checkpoints)
        self.view, self.policy, self.pruning, self.reusing = view, policy, pruning, reusing
        self.chunk_rows, self.every = chunk, every
        self.ids: list[int] = []
        self.committed = 0
        self._n_prompt = 0  # tokens stored once the last prompt was read
        self.behind = AuxCache(lm, pruning)  # tokens of prompts that may go on later
        self.boundary = self._next_boundary()
        self.seen = SeenTokens(lm.vocab, "cpu" if lm.device.type == "mps" else lm.device)  # where tokens are drawn
        self.constraint: Constraint | None = None  # of the answer, which begins at `answer_at`
        self.answer_at = 0
        self.kinds = kinds  # by id
        self.spans: Sequence[KindSpan] = ()  # by position
        self._wants = policy.requirements(lm) if policy is not None else PolicyRequirements()
        self.marks = self._wants.marks  # kinds that its policy wants to be looked for
        self.heard = QueryRecorder(self._wants.recent, self._wants.probes)
        self.memory: Snapshottable | None = self._wants.memory()  # the policy's, of this text
        self._is_whole = True  # the policy never let go of anything
        self._has_left = False  # a prompt was read of which tokens stayed behind
        self.order: Order = "layers" if by_layers or pruning is not None else "chunks"  # what of a prompt comes first
        self._under_way: LayerwisePrefill | None = None  # a prompt that is being read so
        if self.order == "layers":
            check_model(lm, pruning)
        if reusing is not None:
            reusing.check_model(lm)
        self.spare: ReusableSpans | None = None  # of other texts, for the prompt that is read
        self.reused = 0  # tokens that it took over
        self._own = math.inf  # so many tokens were read behind what stands before them now
        self.condensed = 0  # tokens that it begins with stand for more, which each head keeps others of
        self.worth: Mapping[int, Tensor] = {}  # by layer [K, condensed]: what these were worth to who chose them

    def rewind(self, n: int) -> int:
        """Go back to the first n ids; returns how many of them are still stored: all but the pending one, or none, or
        as many as a checkpoint of states has."""
        keep = self.states.reaches(max(0, min(self.committed, n - 1)))
        is_back, is_cut = keep < self.committed, self._under_way is not None
        stays = is_back and (self._forgot or bool(self.heard))  # what was evicted, or heard, does
        stays |= self.behind.is_torn or keep < self.condensed
        if stays or ((is_back or is_cut) and not self.cache.reaches(keep)):
            keep = 0
        elif is_back and not self._is_whole:  # all is there, though placed by a policy that saw more: it begins anew
            self.memory = self._wants.memory()
        self.cache.crop(keep)
        self.states.crop(keep)
        self._under_way, self._n_prompt = None, min(self._n_prompt, keep)
        self._own = self._own if keep > self._own else math.inf
        self.ids, self.committed = self.ids[: keep + 1 if keep else 0], keep
        if not keep:
            self._is_whole, self._has_left, self._n_prompt = True, False, 0
            self.condensed, self.worth = 0, {}
            self.heard.clear()
            self.behind.clear()
            self.memory = self._wants.memory()
        self.seen.clear()
        self.seen.add(self.ids)
        self.boundary = self._next_boundary()
        return keep

    def take_over(self, other: SequenceState) -> None:
        """Go on with the text and the past of `other`, which is left empty. Both must store alike.

        Each keeps its own way to view a past: that is the drafter's. The store was made for passes of `other`'s.
        """
        other.rewind(len(other.ids))  # of a prompt that it is reading nothing counts
        self.chunk_rows = min(self.chunk_rows, other.chunk_rows)
        mine, its = self.cache, other.cache
        self.replace_cache(its)
        other.replace_cache(mine)
        self.states, other.states = other.states, self.states
        self.heard, other.heard = other.heard, self.heard
        self.memory, other.memory = other.memory, self.memory
        self._is_whole, self._has_left, self._own = other._is_whole, other._has_left, other._own
        self.behind, other.behind = other.behind, self.behind
        self._n_prompt = other._n_prompt
        self.condensed, self.worth = other.condensed, other.worth
        self.ids, self.committed = other.ids, other.committed
        self.rewind(len(self.ids))
        other.rewind(0)

    def adopt(self, ids: Sequence[int], n: int, past: Iterable[tuple[int, Tensor, Tensor, int]]) -> None:
        """Go on as though the first n of `ids`, of which the text is the beginning, had been read here, and no more.

        `past`: layers, keys [K, M, D] and values [K, M, E] of tokens that are not stored yet, and where these begin.
        """
        assert self.committed < n < len(ids), "the last token is pending"
        self._append(past, n)
        self.seen.add(ids[len(self.ids) : n + 1])
        self.ids = list(ids[: n + 1])
        self.boundary = self._next_boundary()

    def _append(self, past: Iterable[tuple[int, Tensor, Tensor, int]], n: int) -> None:
        """Store what belongs to tokens up to n, or nothing."""
        assert not self.lm.mixers, "keys and values alone are not all that such a model knows of a text"
        try:
            self.cache.reserve(n)
            for layer, k, v, start in past:
                self.cache.append(layer, k, v, start)
        except BaseException:
            self.cache.crop(self.committed)
            raise
        self.committed = n

    def state(self) -> State:
        """All that what comes behind the stored tokens depends on, settings and sampling aside; between passes."""
        told = {"n_prompt": self._n_prompt, "is_whole": self._is_whole, "has_left": self._has_left}
        told |= {"own": int(min(self._own, self.committed))}
        parts = {"heard": self.heard.state(), "behind": self.behind.state(), "kv": self.cache.snapshot()}
        parts |= {"states": self.states.state()}
        ids = torch.tensor(self.ids[: self.committed], dtype=torch.int32)
        memory: State = self.memory.snapshot() if self.memory is not None else {}
        return {**told, **parts, "ids": ids, "memory": memory}

    def restore(self, state: State, pending: int) -> None:
        """Become the session that gave this, with another token pending; how it samples is as it was here.

        Raises SnapshotMismatch for the state of another model, or of other settings. Whatever fails leaves an empty
        text.
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
            raise SnapshotMismatch("its text has another length than there is room for")
        given = SnapshotReader(state, len(ids))
        self.cache.restore(given.part("kv"))
        self.states.restore(given.part("states"))
        self.heard.restore(given.part("heard"), self.lm, self.cache.dtype)
        self.behind.restore(given.part("behind"))
        if self.memory is not None:
            self.memory.restore(given.part("memory"))
        self.ids, self.committed, self._n_prompt = [*ids, pending], len(ids), given.number("n_prompt", len(ids))
        self._is_whole, self._has_left = (bool(given.number(name, 1)) for name in ("is_whole", "has_left"))
        own = given.number("own", len(ids))
        self._own = own if own < len(ids) else math.inf
        self.seen.clear()
        self.seen.add(self.ids)
        self.boundary = self._next_boundary()

    def replace_cache(self, kv: KVCache) -> None:
        """Go on with a past that lies in `kv`."""
        self.cache = kv
        if self.view is not None:
            self.view = self.view.rebind(kv)

    def fork(self) -> Self:
        """A second session with the same text and a past of its own; the weights are shared."""
        return copy.deepcopy(self, {id(self.constraint): self.constraint})

    def resume(self, ids: Sequence[int]) -> int:
        """Rewind to what `ids` shares with the text; returns how many of `ids` need no reading."""
        shared = self._shared(ids)
        if shared == self.committed < len(ids):  # nothing is stored of the pending token: any may be next
            self.ids[shared:] = ids[shared : shared + 1]
            shared += 1
        return self.rewind(shared)

    def _shared(self, ids: Sequence[int]) -> int:
        """With how many tokens of the text `ids` begin."""
        shared = next((i for i, (a, b) in enumerate(zip(self.ids, ids, strict=False)) if a != b), None)
        return min(len(self.ids), len(ids)) if shared is None else shared

    @property
    def approximations(self) -> set[Loss]:
        """What rows of an answer miss of the text so far."""
        found: set[Loss] = {use.lost for use in self.cache.usage() if use.lost is not None}
        if self._forgot or self.condensed:
            found.add("forgotten")
        if self.committed and self.cache.dtype != self.lm.dtype and self.cache.dtype.itemsize <= self.lm.dtype.itemsize:
            found.add("rounded")
        if self._own < self.committed:
            found.add("reused")
        return found

    @property
    def _forgot(self) -> bool:
        """Is any of the text stored nowhere?"""
        return self._has_left or (not self._is_whole and self.cache.forgets)

    def _next_boundary(self) -> float:
        """Those of a policy are counted from the beginning of the text, those of who comes back from the answer's."""
        n = self.committed
        return n + min(_until(n, self.every), _until(n - self._n_prompt, self.behind.compression_interval))


def _until(n: int, every: int | None) -> float:
    """Tokens until there is a multiple of `every`, more than n."""
    return math.inf if every is None else every - n % every
