"""Generation session: prefill and decoding of one sequence. Its state is in state.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcli.engine.forward_request import (
    Coroutine,
    ForwardRequest,
    ForwardResult,
    Passes,
    Rows,
    SamplingContext,
    await_passes,
)
from kvcli.engine.policy.policy import CompressionPoint, Phase
from kvcli.engine.sequence.commit import accepted_path, commit
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.state import KindSpan, SequenceState, edit_points, kinds_of, shared_length
from kvcli.engine.stats import Step

if TYPE_CHECKING:
    from kvcli.engine.sequence.constraint import Constraint


REPLAYED = 64  # most rows of a pass that computes decoded tokens again: as many as stay batch invariant on a GPU


class GenerationSession(SequenceState):
    """A generation session of one sequence: ids in, ids out. Methods that need a model are generators that yield
    forward requests for the engine (engine.py).

    `ids` is the sequence so far. The last token is pending; `committed` tokens have their KV in `cache`: after
    prefill, all but the pending one. This holds between any two steps, so a session can stop, rewind or be saved there.
    """

    def start_answer(
        self, ids: Sequence[int], sampler: Sampler, constraint: Constraint | None = None,
        spans: Sequence[KindSpan] = (), *, is_scored: bool = False, replays: bool = False,
    ) -> int:  # fmt: skip
        """Prepare an answer to `ids`, sampled by `sampler` and restricted by `constraint`, to be generated after
        prefill.

        `spans`: kinds of tokens by position. `is_scored`: the logits of each step are read after it. The sequence is
        rewound to the prefix that it shares with `ids`. Returns how many of them have their KV stored. With `replays`,
        `prefill` computes the others of that prefix as they were computed first: an eviction behind it cannot be
        undone, but whether one happened there may depend on drafts.
        """
        for companion in self.companions:
            companion.before_prompt(self, ids)
        self.sampler, self.constraint, self.answer_at, self.kind_spans = sampler, constraint, len(ids), spans
        self.is_scored = is_scored
        committed, known = self.committed, self.ids[: self.answer_end]
        if len(known) < len(self.ids):
            self.rewind(len(known))
        n = shared_length(known, ids)
        start = n if n == min(committed, len(known) - 1) < len(ids) else n - 1
        self.answer_end, stored = None, self.resume(ids)
        past = [one for one in self.prefills if one[0] < start] if replays else []
        is_known = bool(past) and past[0][0] == 0 and past[-1][1] <= start + 1 and not self.condensed
        self.prefills = [*past, (start, len(ids))] if is_known else [(stored, len(ids))]
        return stored

    def skip_loaded(self) -> int:
        """Leave out of the prefill what was stored since `start_answer`. Returns how many tokens have their KV."""
        self.prefills = [(self.committed, self.answer_at)]
        return self.committed

    def add_input(self, ids: Sequence[int], constraint: Constraint | None = None) -> None:
        """Continue with `ids`, of which those that are new are input as a prompt is, for `compute`. `constraint`: that
        of the answer from there on; None = the present one."""
        n = self.shared(ids)
        self.prefills.append((n if n == self.committed else n - 1, len(ids)))
        if n < len(self.ids):
            self.resume(ids)
        if constraint is not None:
            self.constraint, self.answer_at = constraint, len(ids)

    def step(self, stop: Collection[int] = (), most: float = math.inf) -> Passes[Step]:
        """Run one decoding step: draft, run, verify, commit. It adds at least one and at most `most` tokens, and ends
        at the first token in `stop`."""
        assert self.committed == len(self.ids) - 1 < self.lm.limit, "a token is not prefilled, or the context is full"
        began = self.lm.clock()
        room = int(min(self.next_compression_at - self.committed, most, self.lm.limit - self.committed)) - 1
        draft = yield from await_passes(self.drafter.propose(self.ids, room, self))
        rows = Rows.build(self.ids[-1], len(self.ids) - 1, draft)
        assert max(rows.pos[: rows.tree]) - rows.pos[0] <= room, "a draft is deeper than allowed"
        draw = SamplingContext(self.sampler, self.history, self.constraint, self.ids, self.answer_at, self.is_scored)
        recorder, needs = self.query_recorder, draft.needs
        recorded = range(rows.tree) if needs.queries else recorder.rows_to_record_in_tree(rows.tree)
        result = yield ForwardRequest(
            self.lm, rows, self.cache, self.view, rows.want, draw, self.drafter.logits_hook, recorded,
            grows=self._grows(most), states=self.states, record_hidden_states=needs.states,
        )  # fmt: skip
        path, new = accepted_path(rows, result.drawn, stop)
        self._commit(rows, recorded, result, path)
        self.ids += new
        self.history.add(new)
        finished = partial(
            Step, rows, result.logits, path, new, hook_output=result.hook_output, queries=result.queries,
            hidden=result.hidden, company=result.company,
        )  # fmt: skip
        yield from await_passes(self.drafter.observe(finished(seconds=self.lm.clock() - began)))
        if self.committed == self.next_compression_at:
            yield from self.compress_cache()
        return finished(seconds=self.lm.clock() - began)

    def _grows(self, most: float) -> int:
        """Return how many tokens, at most `most`, fit before the policy's next compression point and context end."""
        end = min(self.committed + most, self.lm.limit)
        return int(end if self.policy is None else min(end, self.next_compression_at)) - self.committed

    def prefill_chunk(self, ids: Sequence[int]) -> Passes[bool]:
        """Prefill the next chunk of `ids`, the whole prompt, which begins with the sequence's ids. False = none left.

        A chunk is a pass over a causal chain in which every row is accepted. In layer-wise prefill it is the next chunk
        of one layer, and tokens are committed when all layers are done. If a pass fails, its tokens are not committed;
        their ids stay until `rewind`. Layer-wise prefill rewinds by itself.
        """
        if new := ids[len(self.ids) :]:
            self.ids += new
            self.history.add(new)
            self.query_recorder.begin(len(self.ids) - 1)
            yield from self.complete()
        at, whole = self.committed, len(self.ids) - 1
        passes = self._prefill_passes(whole)
        if at >= whole:
            yield from await_passes(self.drafter.start(self.ids, self.sampler))
            return False
        yield from passes
        if self.committed > at:
            self.next_compression_at = self.committed  # if it fails, the compression is still due
            yield from self.compress_cache("read" if self.committed == whole else "reading")
        return True

    def prefill(self, ids: Sequence[int]) -> Passes[bool]:
        """Prefill the next chunk of the prompt `ids`, as `prefill_chunk` does, and first what was lost before it."""
        start, _ = self._prefills(len(ids))[-1]
        if self.committed < start:
            yield from self.compute(ids[: start + 1])
        return (yield from self.prefill_chunk(ids))

    def compute(self, ids: Sequence[int]) -> Passes[None]:
        """Compute the missing KV of `ids` as it is computed first: of prompts and added input by prefill, of others by
        decoding, so that compression points are the same."""
        for start, end in self._prefills(len(ids)):
            if len(self.ids) < end:
                yield from self.replay(ids[: start + 1])
                while (yield from self.prefill_chunk(ids[:end])):
                    pass
        if len(self.ids) < len(ids):
            yield from self.replay(ids)
            yield from await_passes(self.drafter.start(self.ids, self.sampler))

    def _prefills(self, end: int) -> list[tuple[int, int]]:
        """Return the prefills up to `end` tokens. If KV from before the first one is lost, it is part of that."""
        if not self.committed:
            self.prefills[0] = 0, self.prefills[0][1]
        return [one for one in self.prefills if one[1] <= end]

    def _prefill_passes(self, end: int) -> Passes[None]:
        for companion in self.companions:
            if (passes := companion.prefill(self, end)) is not None:
                return passes
        return self.read_chunk(end)

    def complete(self) -> Passes[None]:
        """Finish what the next prompt would wait for, such as the revival of deferred tokens."""
        for companion in self.companions:
            yield from await_passes(companion.complete(self))

    def read_chunk(self, most: int) -> Passes[None]:
        """Prefill one chunk that ends at `most` or before. With recurrent states, it also ends where the user may
        rewind to, because a checkpoint is saved there."""
        checkpoints = self.states.checkpoint_positions(edit_points(self.kind_spans))
        end = min(self.committed + self.chunk_rows, most, *checkpoints)
        if self.policy is None:  # a policy leaves fewer slots than tokens are prefilled: capacity then grows as needed
            self.cache.reserve(len(self.ids))
        rows = Rows.chain(self.ids[self.committed : end], self.committed)
        recorded = self.query_recorder.rows_to_record_in_chunk(self.committed, rows.n_rows)
        result = yield ForwardRequest(
            self.lm, rows, self.cache, self.view, record_queries=recorded, is_prompt=True, states=self.states
        )
        # the end of a chunk is a compression point; slots that windows hide go first, to make room for the chunk
        self.next_compression_at = end
        try:
            self.cache.compress((), end, self.lm.sliding)
            self._commit(rows, recorded, result, range(rows.n_rows))
        except BaseException:
            if not self.cache.reaches(self.committed):  # the chunk needs the evicted slots if it is prefilled again
                self.rewind(0)
            raise

    def replay(self, ids: Sequence[int]) -> Passes[None]:
        """Continue the sequence with `ids`, which it had decoded before its KV cache was dropped. Compression points
        are those of decoding steps. The last of `ids` is pending afterwards."""
        while self.committed < len(ids) - 1:
            end = int(min(self.committed + REPLAYED, len(ids) - 1, self.next_compression_at))
            rows = Rows.chain(ids[self.committed : end], self.committed)
            recorded = self.query_recorder.rows_to_record_in_tree(rows.tree)
            result = yield ForwardRequest(
                self.lm, rows, self.cache, self.view, record_queries=recorded, states=self.states
            )
            self._commit(rows, recorded, result, range(rows.n_rows))
            self.history.add(ids[len(self.ids) : end + 1])
            self.ids = list(ids[: end + 1])
            if self.committed == self.next_compression_at:
                yield from self.compress_cache()

    @property
    def progress(self) -> int:
        """Number of prefilled tokens; for layer-wise prefill, the equivalent of the work done."""
        return self.committed + sum(one.progress for one in self.companions)

    def read(self, ids: Sequence[int]) -> Coroutine[int, None]:
        """Prefill `ids` after the sequence. Yields the number of prefilled tokens after each pass."""
        text = [*self.ids, *ids]
        while (yield from self.prefill_chunk(text)):
            yield self.progress

    def stream(
        self, new: int, stop: Collection[int] = (), cancel: Callable[[], bool] = lambda: False
    ) -> Coroutine[Step, None]:
        """Yield decoding steps until `new` tokens were added, one of `stop` was sampled, or `cancel()` is True between
        passes."""
        left = new
        while left > 0 and not cancel():
            step = yield from self.step(stop, left)
            left -= len(step.new)
            yield step
            if step.new[-1] in stop:
                return

    def compress_cache(self, phase: Phase = "answering") -> Passes[None]:
        """Run a compression point: evict, demote or quantize stored slots, as the policy and the tiers require."""
        if phase != "answering":
            self._n_prompt = self.committed
        point = self._compression_point(phase)
        for companion in self.companions:
            yield from await_passes(companion.compress(point))
        self.next_compression_at = self._next_compression()

    def _compression_point(self, phase: Phase) -> CompressionPoint:
        wants, stored = self.policy_record.wants, self.ids[: self.committed]
        needs_kinds = wants.kinds or bool(wants.guard.kinds)
        kinds = kinds_of(stored, self.kinds, self.kind_spans) if needs_kinds else kinds_of([], None, [])
        past = self.lm, self.cache, self.query_recorder, wants.guard
        of_policy = self.stored_kv.is_whole, self.policy_record.state
        end = min(self._n_prompt, self.committed)
        return CompressionPoint(*past, stored, kinds, phase, self._n_prompt, *of_policy, self.ids[-1], end)

    def _commit(self, rows: Rows, recorded_rows: Sequence[int], result: ForwardResult, path: Sequence[int]) -> None:
        """Commit the KV of the accepted rows. The KV of other rows is discarded with the pass."""
        assert len(path) <= self.next_compression_at - self.committed, "a draft crossed a compression point"
        commit(self.cache, rows, result, path)
        self.query_recorder.take(rows, recorded_rows, result.queries, path)
        self.committed += len(path)  # last: after an earlier failure a rewind removes what was stored
