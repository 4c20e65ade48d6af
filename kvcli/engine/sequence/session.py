"""Generation session: prefill and decoding of one sequence. Its state is in state.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

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
from kvcli.engine.prefill.layerwise import LayerwisePrefill
from kvcli.engine.prefill.span_reuse import ReusableSpans, copy_matching_spans
from kvcli.engine.sequence.commit import accepted_path, commit
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.state import KindSpan, SequenceState, edit_points, kinds_of
from kvcli.engine.stats import Step
from kvcli.kv.slots import Masks

if TYPE_CHECKING:
    from kvcli.engine.sequence.constraint import Constraint


class GenerationSession(SequenceState):
    """A generation session of one sequence: ids in, ids out. Methods that need a model are generators that yield
    forward requests for the engine (engine.py).

    `ids` is the sequence so far. The last token is pending; `committed` tokens have their KV in `cache`: after
    prefill, all but the pending one. This holds between any two steps, so a session can stop, rewind or be saved there.
    """

    def start_answer(
        self, ids: Sequence[int], sampler: Sampler, constraint: Constraint | None = None, spans: Sequence[KindSpan] = ()
    ) -> int:
        """Prepare an answer to `ids`, sampled by `sampler` and restricted by `constraint`, to be generated after
        prefill.

        `spans`: kinds of tokens by position. The sequence is rewound to the prefix that it shares with `ids`. Returns
        how many of `ids` need no prefill.
        """
        self.sampler, self.constraint, self.answer_at, self.kind_spans = sampler, constraint, len(ids), spans
        return self.resume(ids)

    def copy_reusable_spans(self, ids: Sequence[int]) -> None:
        """Copy the KV of spans that occur both in the sequence and in `ids`, the next prompt, which can load it in
        place of prefill. Call it before `start_answer`, which rewinds the sequence."""
        old, self.reusable_spans, self.reused = self.ids[: self.committed], None, 0  # discards earlier copies
        if self.reusing is not None:
            spans = self.reusing.bind(self.lm)
            spans.add(copy_matching_spans(self.lm, self.cache, old, ids[:-1], self._shared(ids), self.reusing.min_span))
            self.reusable_spans = spans

    def step(self, stop: Collection[int] = (), most: float = math.inf) -> Passes[Step]:
        """Run one decoding step: draft, run, verify, commit. It adds at least one and at most `most` tokens, and ends
        at the first token in `stop`."""
        assert self.committed == len(self.ids) - 1 < self.lm.limit, "a token is not prefilled, or the context is full"
        began = time.perf_counter()
        room = int(min(self.next_compression_at - self.committed, most, self.lm.limit - self.committed)) - 1
        draft = yield from await_passes(self.drafter.propose(self.ids, room, self))
        rows = Rows.build(self.ids[-1], len(self.ids) - 1, draft)
        assert max(rows.pos[: rows.tree]) - rows.pos[0] <= room, "a draft is deeper than allowed"
        sampling = SamplingContext(self.sampler, self.seen, self.constraint, self.ids, self.answer_at)
        recorded = self.query_recorder.rows_to_record_in_tree(rows.tree)
        recorded = range(rows.tree) if draft.needs == "queries" else recorded
        result = yield ForwardRequest(
            self.lm, rows, self.cache, self.view, rows.want, sampling, self.drafter.logits_hook, recorded,
            grows=self._grows(most), states=self.states, record_hidden_states=draft.needs == "hidden",
        )  # fmt: skip
        path, new = accepted_path(rows, result.drawn, stop)
        self._commit(rows, recorded, result, path)
        self.ids += new
        self.seen.add(new)
        finished = partial(
            Step, rows, result.logits, path, new, hook_output=result.hook_output, queries=result.queries,
            hidden=result.hidden,
        )  # fmt: skip
        yield from await_passes(self.drafter.observe(finished(seconds=time.perf_counter() - began)))
        if self.committed == self.next_compression_at:
            yield from self.compress_cache()
        return finished(seconds=time.perf_counter() - began)

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
            self.seen.add(new)
            # a policy or a pruner leaves fewer slots than tokens are prefilled: capacity then grows as needed
            if self.policy is None and self.pruning is None:
                self.cache.reserve(len(self.ids))
            self.query_recorder.begin(len(self.ids) - 1)
            yield from self.aux_cache.before_prompt(self.cache, self.ids)
        at, whole = self.committed, len(self.ids) - 1
        if at >= whole:
            self.reusable_spans = None
            yield from await_passes(self.drafter.start(self.ids, self.sampler))
            return False
        ahead = self.reusable_spans.next(at) if self.reusable_spans is not None else None
        if self.reusable_spans is not None and ahead == at:
            yield from self._load_span(self.reusable_spans)
        elif self.order == "layers" and ahead is None:
            yield from self._read_on(self._under_way or (yield from self._layer_by_layer(whole)))
        else:
            yield from self._read_chunk(self._end(whole if ahead is None else ahead))
        if self.committed > at:
            self.next_compression_at = self.committed  # if it fails, the compression is still due
            yield from self.compress_cache("read" if self.committed == whole else "reading")
        return True

    def _load_span(self, spans: ReusableSpans) -> Passes[None]:
        """Load the KV of a reusable span that begins here, in place of a chunk; nothing if its source is gone."""
        at = self.committed
        end, past = yield from spans.load(at, self.chunk_rows, self.cache, self.ids)
        if end > at:
            self._foreign_from = min(self._foreign_from, at)
            self._append(past, end)
            self.reused += end - at

    def _end(self, most: int) -> int:
        """Return the end of the next chunk. With recurrent states, a chunk also ends where the user may rewind to,
        because a checkpoint is saved there."""
        checkpoints = self.states.checkpoint_positions(edit_points(self.kind_spans))
        return min(self.committed + self.chunk_rows, most, *checkpoints)

    def _read_chunk(self, end: int) -> Passes[None]:
        rows = Rows.chain(self.ids[self.committed : end], self.committed)
        recorded = self.query_recorder.rows_to_record_in_chunk(self.committed, rows.n_rows)
        result = yield ForwardRequest(
            self.lm, rows, self.cache, self.view, record_queries=recorded, is_prompt=True, states=self.states
        )
        # the end of a chunk is a compression point; slots that windows hide go first, to make room for the chunk
        self.next_compression_at = end
        try:
            self.cache.compress((), self._first_later_position(end), self.lm.sliding)
            self._commit(rows, recorded, result, range(rows.n_rows))
        except BaseException:
            if not self.cache.reaches(self.committed):  # the chunk needs the evicted slots if it is prefilled again
                self.rewind(0)
            raise

    def _layer_by_layer(self, whole: int) -> Passes[LayerwisePrefill]:
        """Start layer-wise prefill of the rest of the prompt, or of the next group of tokens to be pruned together."""
        start, pruning, pruner = self.committed, self.pruning, None
        n = whole - start if pruning is None else pruning.group_size(whole - start, self.chunk_rows)
        rows = Rows.chain(self.ids[start : start + n], start)
        recorded = self.query_recorder.rows_to_record_in_chunk(start, n)
        if pruning is not None:
            query_rows, guard = sorted({*recorded, *range(max(0, n - pruning.n_scoring_rows), n)}), pruning.guard
            kinds = kinds_of(self.ids[: start + n], self.kinds, self.kind_spans if guard.kinds else ())
            covered = guard.covers(torch.arange(start, start + n), kinds).nonzero().flatten().tolist()
            pruner = yield from await_passes(
                pruning.bind(self.lm, self.cache, rows, {*query_rows, *covered}, self.chunk_rows)
            )
            recorded = recorded if pruner is None else query_rows
        may_revive = self.aux_cache.may_revive
        return LayerwisePrefill(self.lm, self.cache, rows, self.chunk_rows, recorded, pruner, may_revive=may_revive)

    def _read_on(self, prompt: LayerwisePrefill) -> Passes[None]:
        self._under_way = prompt
        try:
            yield from prompt.step()
        except BaseException:
            self.rewind(self.committed + 1)
            raise
        if not prompt.is_over:
            return
        n = prompt.rows.n_rows
        if self.query_recorder.rows_to_record_in_chunk(self.committed, n):
            self.query_recorder.take(prompt.rows, prompt.recorded_rows, prompt.queries, range(n))
        if prompt.pruner is not None:
            self._is_whole, self._has_deferred = False, True
        self.aux_cache.add(prompt.stopped)
        self.committed += n
        self._under_way = None  # last: on an earlier failure the prompt is abandoned

    @property
    def progress(self) -> int:
        """Number of prefilled tokens; for layer-wise prefill, the equivalent of the work done."""
        return self.committed + (self._under_way.n_done if self._under_way is not None else 0)

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
            self.states.mark()
        masks: Masks = ()
        if self.policy is not None:
            masks = yield from self._policy_input(phase).ask(self.policy)
        if phase == "answering":
            yield from self.aux_cache.revive(self.cache, self.ids, self.committed - self._n_prompt)
        was_whole, self._is_whole = self._is_whole, False  # in case it fails midway
        end = self._first_later_position(min(self._n_prompt, self.committed))
        self._is_whole = not self.cache.compress(masks, end) and was_whole
        self.next_compression_at = self._next_compression()
        if phase == "read" and not self._wants.lasting:
            self.query_recorder.forget()

    def _first_later_position(self, end: int) -> int:
        """Return the lowest position of later rows: `end`, or the first deferred token, which may be revived."""
        return min([end, *self.aux_cache.positions[:1]])

    def _policy_input(self, phase: Phase) -> CompressionPoint:
        """Return the input of the policy at this compression point."""
        wants, stored = self._wants, self.ids[: self.committed]
        needs_kinds = wants.kinds or bool(wants.guard.kinds)
        kinds = kinds_of(stored, self.kinds, self.kind_spans) if needs_kinds else kinds_of([], None, [])
        past = self.lm, self.cache, self.query_recorder, wants.guard
        return CompressionPoint(*past, stored, kinds, phase, self._n_prompt, self._is_whole, self.policy_state)

    def _commit(self, rows: Rows, recorded_rows: Sequence[int], result: ForwardResult, path: Sequence[int]) -> None:
        """Commit the KV of the accepted rows. The KV of other rows is discarded with the pass."""
        assert len(path) <= self.next_compression_at - self.committed, "a draft crossed a compression point"
        commit(self.cache, rows, result, path)
        self.query_recorder.take(rows, recorded_rows, result.queries, path)
        self.committed += len(path)  # last: after an earlier failure a rewind removes what was stored
