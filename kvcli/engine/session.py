"""A session: one text, its past, and the loop that makes them longer."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from kvcli.engine.behind import Behind
from kvcli.engine.boundary import Boundary
from kvcli.engine.by_layers import ByLayers, meet
from kvcli.engine.commit import commit
from kvcli.engine.drafter import Drafter
from kvcli.engine.feed import Asks, Feed, Made, Work, asked
from kvcli.engine.gate import Pruning
from kvcli.engine.heard import Heard
from kvcli.engine.kinds import Span, kinds_of
from kvcli.engine.policy import Phase, Policy, Wants
from kvcli.engine.rows import Rows
from kvcli.engine.sample import Draw, Sampler, Seen
from kvcli.engine.stats import Step
from kvcli.engine.verify import walk
from kvcli.kv.slots import Lens, Loss, Masks, Store

if TYPE_CHECKING:
    from kvcli.engine.constraint import Constraint
    from kvcli.engine.lm import LM
    from kvcli.settings.schema import Order


class Session:
    """Ids in, ids out; one sequence. Its verbs are work for an engine (engine.py): they yield what they want of it.

    `ids` is the text so far; its last token is pending, the keys and values of all before it are in `kv` once read
    (`committed` of them). Between steps the two always agree, so a session can stop, rewind or be saved at any moment.
    """

    def __init__(
        self,
        lm: LM,
        kv: Store,
        drafter: Drafter,
        sampler: Sampler,
        *,
        view: Lens | None = None,
        policy: Policy | None = None,
        chunk: int = 2048,
        every: int | None = None,
        kinds: Tensor | None = None,
        pruning: Pruning | None = None,
        by_layers: bool = False,
    ) -> None:
        """`chunk` rows a pass while reading; the past may change each `every` committed tokens (None: never).

        `kinds` [V] int8: the kind of each id, for policies that tell tokens apart (kvcli.engine.kinds).
        `pruning`: which rows of a prompt stay behind between layers. `by_layers`: read layer by layer, in parts of
        `chunk` rows, as with `pruning` in any case. Raises BadModel where rows cannot be stopped there, or judged.
        """
        self.lm, self.kv, self.drafter, self.sampler = lm, kv, drafter, sampler
        self.view, self.policy = view, policy
        self.chunk_rows, self.every = chunk, every
        self.ids: list[int] = []
        self.committed = 0
        self.boundary = self._next_boundary()
        self.seen = Seen(lm.vocab, lm.device)
        self.constraint: Constraint | None = None  # of the answer, which begins at `answer_at`
        self.answer_at = 0
        self.kinds = kinds  # by id
        self.spans: Sequence[Span] = ()  # by position
        self._wants = policy.wants(lm) if policy is not None else Wants()
        self.heard = Heard(self._wants.recent, self._wants.probes)
        self.memory = self._wants.memory()  # the policy's, of this text
        self._n_prompt = 0  # tokens stored once the last prompt was read
        self._is_whole = True  # the policy never let go of anything
        self._has_left = False  # a prompt was read of which tokens stayed behind
        self.behind = Behind(lm, pruning)  # those of them that may go on later
        self.order: Order = "layers" if by_layers or pruning is not None else "chunks"  # what of a prompt comes first
        self._under_way: ByLayers | None = None  # a prompt that is being read so
        if self.order == "layers":
            meet(lm, pruning)

    def begin(
        self, ids: Sequence[int], sampler: Sampler, constraint: Constraint | None = None, spans: Sequence[Span] = ()
    ) -> int:
        """An answer to `ids`, drawn by `sampler` and held to `constraint`, is to be written once they are read.

        `spans`: what kinds of text they are. Rewinds to what they share with the text; returns how many of them need no
        reading.
        """
        self.sampler, self.constraint, self.answer_at, self.spans = sampler, constraint, len(ids), spans
        return self.resume(ids)

    def step(self, stop: Collection[int] = (), most: float = math.inf) -> Asks[Step]:
        """One pass: guess, run, accept, commit. New tokens, at least one and at most `most`, end at one of `stop`."""
        assert self.committed == len(self.ids) - 1 < self.lm.limit, "read the text to its end, and stay in the window"
        began = time.perf_counter()
        how = Draw(self.sampler, self.seen, self.constraint, self.ids, self.answer_at)
        due = self.behind.due(self.committed - self._n_prompt)
        if due == 0:
            rows, made, path, new = yield from self.behind.step(self.kv, self.ids, how)
            self.committed += 1
        else:
            room = int(min(self.boundary - self.committed, due, most, self.lm.limit - self.committed)) - 1
            draft = yield from asked(self.drafter.propose(self.ids, room))
            rows = Rows.build(self.ids[-1], len(self.ids) - 1, draft)
            assert max(rows.pos[: rows.tree]) - rows.pos[0] <= room, "a draft is deeper than there is room"
            hear = self.heard.of_tree(rows.tree)
            made = yield Feed(self.lm, rows, self.kv, self.view, rows.want, how, self.drafter.glean, hear)
            path, new = walk(rows, made.drawn, stop)
            self._commit(rows, hear, made, path)
        self.ids += new
        self.seen.add(new)
        done = partial(Step, rows, made.logits, path, new, gleaned=made.gleaned)
        yield from asked(self.drafter.observe(done(seconds=time.perf_counter() - began)))
        if self.committed == self.boundary:
            yield from self.settle()
        return done(seconds=time.perf_counter() - began)

    def chunk(self, ids: Sequence[int]) -> Asks[bool]:
        """Take in the next chunk of `ids`, of which the text is the beginning; False once all of them are read.

        The same pass with a causal chain, every row accepted. Layer by layer it is the next part of a layer, and the
        prompt counts as read when all are through; whatever breaks, or rewinds, has the text end where it did before.
        """
        if new := ids[len(self.ids) :]:
            self.ids += new
            self.seen.add(new)
            if (
                self.policy is None and self.behind.pruning is None
            ):  # with one, memory is what it leaves, not what is read
                self.kv.reserve(len(self.ids))
            self.heard.begin(len(self.ids) - 1)
        whole = len(self.ids) - 1
        if self.committed >= whole:
            yield from asked(self.drafter.start(self.ids, self.sampler))
            return False
        if self.order == "layers":
            yield from self._read_on(whole)
            return True
        end = min(self.committed + self.chunk_rows, whole)
        rows = Rows.chain(self.ids[self.committed : end], self.committed)
        hear = self.heard.of_chunk(self.committed, rows.n_rows)
        made = yield Feed(self.lm, rows, self.kv, self.view, hear=hear, is_prompt=True)
        self.boundary = end  # a chunk's end is a boundary
        self._commit(rows, hear, made, range(rows.n_rows))
        yield from self.settle("read" if end == whole else "reading")
        return True

    def _read_on(self, whole: int) -> Asks[None]:
        """What is left of the prompt, or of it what is judged together where some may stay behind."""
        start = self.committed
        try:
            if (prompt := self._under_way) is None:
                prompt = yield from self.behind.prompt(self.kv, self.ids, start, self.chunk_rows, self.heard)
                self._under_way = prompt
            yield from prompt.go_on()
        except BaseException:
            self.rewind(start + 1)
            raise
        if prompt.is_over:
            n = prompt.rows.n_rows
            self.heard.take(prompt.rows, prompt.hear, prompt.queries, range(n))
            if prompt.pruner is not None:
                self._is_whole, self._has_left = False, True
            self.behind.read()
            self.boundary, self.committed, self._under_way = start + n, start + n, None
            yield from self.settle("read" if self.committed == whole else "reading")

    @property
    def progress(self) -> int:
        """Tokens of the text that are read, or as many as the work done on a prompt amounts to."""
        return self.committed + (self._under_way.n_done if self._under_way is not None else 0)

    def read(self, ids: Sequence[int]) -> Work[int, None]:
        """Take in `ids` behind the text; says after each pass how much of the text is read."""
        text = [*self.ids, *ids]
        while (yield from self.chunk(text)):
            yield self.progress

    def stream(
        self, new: int, stop: Collection[int] = (), cancel: Callable[[], bool] = lambda: False
    ) -> Work[Step, None]:
        """Steps until `new` tokens were added, one of `stop` came, or `cancel()` says so between passes."""
        left = new
        while left > 0 and not cancel():
            step = yield from self.step(stop, left)
            left -= len(step.new)
            yield step
            if step.new[-1] in stop:
                return

    def settle(self, phase: Phase = "answering") -> Asks[None]:
        """A boundary: the past may change now, and only now."""
        if phase != "answering":
            self._n_prompt = self.committed
        masks: Masks = ()
        if self.policy is not None:
            masks = yield from self._at(phase).ask(self.policy)
        was_whole, self._is_whole = self._is_whole, False  # should it fail half way
        end = min(self._n_prompt, self.committed, *self.behind.positions[:1])  # where a row may still stand
        self._is_whole = not self.kv.settle(masks, end) and was_whole
        self.boundary = self._next_boundary()
        if phase == "read" and not self._wants.lasting:
            self.heard.forget()

    def rewind(self, n: int) -> int:
        """Go back to the first n ids; returns how many of them are still stored (all but the pending one, or none)."""
        keep = max(0, min(self.committed, n - 1))
        is_back, is_cut, self._under_way = keep < self.committed, self._under_way is not None, None
        stays = (is_back and (self._forgot or bool(self.heard))) or self.behind.is_torn
        if stays or ((is_back or is_cut) and not self.kv.reaches(keep)):
            keep = 0  # what was evicted, or heard, stays so
        elif is_back and not self._is_whole:  # all is there, though placed by a policy that saw more: it begins anew
            self.memory, self._n_prompt = self._wants.memory(), min(self._n_prompt, keep)
        self.kv.crop(keep)
        self.ids, self.committed = self.ids[: keep + 1 if keep else 0], keep
        if not keep:
            self._is_whole, self._has_left, self._n_prompt = True, False, 0
            self.heard.clear()
            self.behind.clear()
            self.memory = self._wants.memory()
        self.seen.clear()
        self.seen.add(self.ids)
        self.boundary = self._next_boundary()
        return keep

    def take(self, other: Session) -> None:
        """Go on with the text and the past of `other`, which is left empty. Both must store alike.

        Each keeps its own way to view a past: that is the drafter's. The store was made for passes of `other`'s.
        """
        other.rewind(len(other.ids))  # of a prompt that it is reading nothing counts
        self.chunk_rows = min(self.chunk_rows, other.chunk_rows)
        mine, its = self.kv, other.kv
        self.put(its)
        other.put(mine)
        self.heard, other.heard, self.memory, other.memory = other.heard, self.heard, other.memory, self.memory
        self._is_whole, self._has_left, self._n_prompt = other._is_whole, other._has_left, other._n_prompt
        self.behind, other.behind = other.behind, self.behind
        self.ids, self.committed = other.ids, other.committed
        self.rewind(len(self.ids))
        other.rewind(0)

    def adopt(self, ids: Sequence[int], n: int, past: Iterable[tuple[int, Tensor, Tensor, int]]) -> None:
        """Go on as though the first n of `ids`, of which the text is the beginning, had been read here, and no more.

        `past`: layers, keys [K, M, D] and values [K, M, E] of tokens that are not stored yet, and where these begin.
        """
        assert self.committed < n < len(ids), "the last token is pending"
        try:
            self.kv.reserve(n)
            for layer, k, v, start in past:
                self.kv.append(layer, k, v, start)
        except BaseException:
            self.kv.crop(self.committed)
            raise
        self.seen.add(ids[len(self.ids) : n + 1])
        self.ids, self.committed = list(ids[: n + 1]), n
        self.boundary = self._next_boundary()

    def put(self, kv: Store) -> None:
        """Go on with a past that lies in `kv`."""
        self.kv = kv
        if self.view is not None:
            self.view = self.view.over(kv)

    def fork(self) -> Session:
        """A second session with the same text and a past of its own; the weights are shared."""
        return copy.deepcopy(self, {id(shared): shared for shared in (self.lm, self.constraint)})

    def resume(self, ids: Sequence[int]) -> int:
        """Rewind to what `ids` shares with the text; returns how many of `ids` need no reading."""
        shared = next((i for i, (a, b) in enumerate(zip(self.ids, ids, strict=False)) if a != b), None)
        return self.rewind(min(len(self.ids), len(ids)) if shared is None else shared)

    @property
    def lost(self) -> set[Loss]:
        """What rows of an answer miss of the text so far."""
        found: set[Loss] = {use.lost for use in self.kv.usage() if use.lost is not None}
        if self._forgot:
            found.add("forgotten")
        if self.committed and self.kv.dtype != self.lm.dtype and self.kv.dtype.itemsize <= self.lm.dtype.itemsize:
            found.add("rounded")
        return found

    @property
    def _forgot(self) -> bool:
        """Is any of the text stored nowhere?"""
        return self._has_left or (not self._is_whole and self.kv.forgets)

    def _at(self, phase: Phase) -> Boundary:
        """What the policy is shown."""
        wants, stored = self._wants, self.ids[: self.committed]
        is_told = wants.kinds or bool(wants.guard.kinds)
        kinds = kinds_of(stored, self.kinds, self.spans) if is_told else kinds_of([], None, [])
        past = self.lm, self.kv, self.heard, wants.guard
        return Boundary(*past, stored, kinds, phase, self._n_prompt, self._is_whole, self.memory)

    def _commit(self, rows: Rows, hear: Sequence[int], made: Made, path: Sequence[int]) -> None:
        """Store the accepted rows' keys and values; the others vanish with the pass."""
        assert len(path) <= self.boundary - self.committed, "a draft crossed a boundary"
        commit(self.kv, rows, made, path)
        self.heard.take(rows, hear, made.queries, path)
        self.committed += len(path)  # last: what fails before it has not happened

    def _next_boundary(self) -> float:
        return math.inf if self.every is None else (self.committed // self.every + 1) * self.every
