"""Generation session: prefill and decoding of one sequence (state.py)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvcli.engine.forward_request import Coroutine, ForwardRequest, ForwardResult, Rows, Steps, await_passes
from kvcli.engine.policy.compression_point import CompressionPoint
from kvcli.engine.policy.policy import Phase
from kvcli.engine.prefill.layerwise import LayerwisePrefill
from kvcli.engine.prefill.span_reuse import ReusableSpans, copy_matching_spans
from kvcli.engine.sequence.commit import accepted_path, commit
from kvcli.engine.sequence.sampler import Sampler, SamplingContext
from kvcli.engine.sequence.state import KindSpan, SequenceState, edit_points, kinds_of
from kvcli.engine.stats import Step
from kvcli.kv.slots import Masks

if TYPE_CHECKING:
    from kvcli.engine.sequence.constraint import Constraint


class GenerationSession(SequenceState):
    """A generation session of one sequence: ids in, ids out. Its methods are generators that yield forward requests for
    the engine (engine.py).

    `ids` is the sequence so far. The last token is pending; after prefill the KV of all others is in `cache`
    (`committed` of them). This holds between any two steps, so a session can stop, rewind or be saved there.
    """

    def start_answer(
        self, ids: Sequence[int], sampler: Sampler, constraint: Constraint | None = None, spans: Sequence[KindSpan] = ()
    ) -> int:
        """Prepare an answer to `ids`, sampled by `sampler` and restricted by `constraint`, to be generated after
        prefill.

        `spans`: kinds of tokens by position. The sequence is rewound to the prefix that it shares with `ids`. Returns
        how many of `ids` need no prefill.
        """
        self.sampler, self.constraint, self.answer_at, self.spans = sampler, constraint, len(ids), spans
        return self.resume(ids)

    def save(self, ids: Sequence[int]) -> None:
        """Copy the KV of spans that `ids`, the next prompt, shares with the sequence, before `start_answer` rewinds
        it."""
        had, self.reusable_spans, self.reused = self.ids[: self.committed], None, 0  # discards earlier copies
        if self.reusing is not None:
            spare = self.reusing.bind(self.lm)
            spare.add(copy_matching_spans(self.lm, self.cache, had, ids[:-1], self._shared(ids), self.reusing.min_span))
            self.reusable_spans = spare

    def step(self, stop: Collection[int] = (), most: float = math.inf) -> Steps[Step]:
        """Run one decoding step: draft, run, verify, commit. It adds one to `most` tokens and ends at the first of
        `stop`."""
        assert self.committed == len(self.ids) - 1 < self.lm.limit, "the text is prefilled, and within the context"
        began = time.perf_counter()
        room = int(min(self.compression_point - self.committed, most, self.lm.limit - self.committed)) - 1
        draft = yield from await_passes(self.drafter.propose(self.ids, room, self))
        rows = Rows.build(self.ids[-1], len(self.ids) - 1, draft)
        assert max(rows.pos[: rows.tree]) - rows.pos[0] <= room, "a draft is deeper than allowed"
        how = SamplingContext(self.sampler, self.seen, self.constraint, self.ids, self.answer_at)
        hear = range(rows.tree) if draft.needs == "queries" else self.query_recorder.rows_to_record_in_tree(rows.tree)
        made = yield ForwardRequest(
            self.lm, rows, self.cache, self.view, rows.want, how, self.drafter.logits_hook, hear,
            grows=self._grows(most), states=self.states, record_hidden_states=draft.needs == "hidden",
        )  # fmt: skip
        path, new = accepted_path(rows, made.drawn, stop)
        self._commit(rows, hear, made, path)
        self.ids += new
        self.seen.add(new)
        done = partial(
            Step, rows, made.logits, path, new, hook_output=made.hook_output, queries=made.queries, hidden=made.hidden
        )
        yield from await_passes(self.drafter.observe(done(seconds=time.perf_counter() - began)))
        if self.committed == self.compression_point:
            yield from self.compress_cache()
        return done(seconds=time.perf_counter() - began)

    def _grows(self, most: float) -> int:
        """Return the tokens, of at most `most`, that are committed before the next point where the cache may shrink."""
        end = min(self.committed + most, self.lm.limit)
        return int(end if self.policy is None else min(end, self.compression_point)) - self.committed

    def prefill_chunk(self, ids: Sequence[int]) -> Steps[bool]:
        """Prefill the next chunk of `ids`, which begin with the sequence. False once all of them are prefilled.

        A chunk is a pass over a causal chain in which every row is accepted. In layer-wise prefill it is the next chunk
        of one layer, and tokens are committed when all layers are done. After an error or a rewind the sequence ends
        where it did before.
        """
        if new := ids[len(self.ids) :]:
            self.ids += new
            self.seen.add(new)
            # with one, memory depends on the tokens that remain, not on those prefilled
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
            yield from self._take_over(self.reusable_spans)
        elif self.order == "layers" and ahead is None:
            yield from self._read_on(self._under_way or (yield from self._layer_by_layer(whole)))
        else:
            yield from self._read_chunk(self._end(whole if ahead is None else ahead))
        if self.committed > at:
            self.compression_point = self.committed  # a compression that fails is repeated
            yield from self.compress_cache("read" if self.committed == whole else "reading")
        return True

    def _take_over(self, spans: ReusableSpans) -> Steps[None]:
        """Load a reusable span that begins here, in place of a chunk. No effect if the span is no longer available."""
        at = self.committed
        end, past = yield from spans.load(at, self.chunk_rows, self.cache, self.ids)
        if end > at:
            self._own = min(self._own, at)
            self._append(past, end)
            self.reused += end - at

    def _end(self, most: int) -> int:
        """Return the end of the next chunk. With recurrent states, a chunk also ends where the user may rewind to,
        because a checkpoint is saved there."""
        return min(self.committed + self.chunk_rows, most, *self.states.checkpoint_positions(edit_points(self.spans)))

    def _read_chunk(self, end: int) -> Steps[None]:
        rows = Rows.chain(self.ids[self.committed : end], self.committed)
        hear = self.query_recorder.rows_to_record_in_chunk(self.committed, rows.n_rows)
        made = yield ForwardRequest(
            self.lm, rows, self.cache, self.view, record_queries=hear, is_prompt=True, states=self.states
        )
        # the end of a chunk is a compression point: slots outside the sliding windows make room for it
        self.compression_point = end
        try:
            self.cache.compress((), self._seen_from(end), self.lm.sliding)
            self._commit(rows, hear, made, range(rows.n_rows))
        except BaseException:
            if not self.cache.reaches(self.committed):  # the chunk needs the evicted slots if it is prefilled again
                self.rewind(0)
            raise

    def _layer_by_layer(self, whole: int) -> Steps[LayerwisePrefill]:
        """Start layer-wise prefill of the rest of the prompt, or of the next group of tokens to be pruned together."""
        start, pruning, pruner = self.committed, self.pruning, None
        n = whole - start if pruning is None else pruning.group_size(whole - start, self.chunk_rows)
        rows = Rows.chain(self.ids[start : start + n], start)
        hear = self.query_recorder.rows_to_record_in_chunk(start, n)
        if pruning is not None:
            asks, guard = sorted({*hear, *range(max(0, n - pruning.n_scoring_rows), n)}), pruning.guard
            kinds = kinds_of(self.ids[: start + n], self.kinds, self.spans if guard.kinds else ())
            covered = guard.covers(torch.arange(start, start + n), kinds).nonzero().flatten().tolist()
            pruner = yield from await_passes(
                pruning.bind(self.lm, self.cache, rows, {*asks, *covered}, self.chunk_rows)
            )
            hear = hear if pruner is None else asks
        comes_back = self.aux_cache.comes_back
        return LayerwisePrefill(self.lm, self.cache, rows, self.chunk_rows, hear, pruner, comes_back=comes_back)

    def _read_on(self, prompt: LayerwisePrefill) -> Steps[None]:
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
            self.query_recorder.take(prompt.rows, prompt.hear, prompt.queries, range(n))
        if prompt.pruner is not None:
            self._is_whole, self._has_left = False, True
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

    def compress_cache(self, phase: Phase = "answering") -> Steps[None]:
        """Run a compression point: evict, demote or quantize stored slots. Commits only append."""
        if phase != "answering":
            self._n_prompt = self.committed
            self.states.mark()
        masks: Masks = ()
        if self.policy is not None:
            masks = yield from self._at(phase).ask(self.policy)
        if phase == "answering":
            yield from self.aux_cache.revive(self.cache, self.ids, self.committed - self._n_prompt)
        was_whole, self._is_whole = self._is_whole, False  # in case it fails midway
        self._is_whole = (
            not self.cache.compress(masks, self._seen_from(min(self._n_prompt, self.committed))) and was_whole
        )
        self.compression_point = self._next_compression_point()
        if phase == "read" and not self._wants.lasting:
            self.query_recorder.forget()

    def _seen_from(self, end: int) -> int:
        """Return the first position of later rows: `end`, or that of the first deferred token if it is lower."""
        return min([end, *self.aux_cache.positions[:1]])

    def _at(self, phase: Phase) -> CompressionPoint:
        """Return the compression point that the policy gets."""
        wants, stored = self._wants, self.ids[: self.committed]
        is_told = wants.kinds or bool(wants.guard.kinds)
        kinds = kinds_of(stored, self.kinds, self.spans) if is_told else kinds_of([], None, [])
        past = self.lm, self.cache, self.query_recorder, wants.guard
        return CompressionPoint(*past, stored, kinds, phase, self._n_prompt, self._is_whole, self.memory)

    def _commit(self, rows: Rows, recorded_rows: Sequence[int], made: ForwardResult, path: Sequence[int]) -> None:
        """Commit the KV of the accepted rows. The KV of other rows is discarded with the pass."""
        assert len(path) <= self.compression_point - self.committed, "a draft crossed a compression point"
        commit(self.cache, rows, made, path)
        self.query_recorder.take(rows, recorded_rows, made.queries, path)
        self.committed += len(path)  # last: an earlier failure commits nothing
