"""The engine, which runs the forward requests of all sequences."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Generic

import torch

from kvcli.engine.cuda_graphs.captured_passes import captured_passes
from kvcli.engine.drafting.pass_timer import Company, PassTimer
from kvcli.engine.forward import BatchedPass, ForwardPass, run_layers, state_shim, states_of
from kvcli.engine.forward_request import Coroutine, E, ForwardRequest, ForwardResult, Passes, T
from kvcli.engine.prefill.prompt_pieces import PromptPieces
from kvcli.engine.readback import Readback, fetch
from kvcli.engine.resources import check_stream, one_pool, use_device
from kvcli.engine.step_time import StepTime
from kvcli.kv.offload.transfer import bus_of
from kvcli.kv.out_of_memory import as_cache_full

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM


def run(requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
    """Run all requests in as few forward passes as possible. The results are in the order of the requests.

    A pass serves one model and range of layers; decoding rows beyond `max_invariant_rows` take a further pass.
    """
    results: dict[int, ForwardResult] = {}
    for group in group_requests(requests):
        lm, grouped = requests[group[0]].lm, [requests[i] for i in group]
        # operations on a prompt are large enough for torch's threads
        with one_pool(lm.has_pool and not any(request.is_prompt for request in grouped)):
            results |= zip(group, _run(lm, grouped), strict=True)
    return [results[i] for i in range(len(requests))]


def group_requests(requests: Sequence[ForwardRequest]) -> list[list[int]]:
    """Group the requests that can share a forward pass: the same model and layers, and few enough rows to stay batch
    invariant."""
    alike: dict[tuple[object, ...], list[list[int]]] = {}
    for i, request in enumerate(requests):
        most = request.lm.max_invariant_rows
        # empty ranges all compare equal
        layers = None if request.layers is None else (request.layers.start, request.layers.stop)
        key = id(request.lm), layers, request.only_kv, most is not None and request.is_prompt
        passes = alike.setdefault(key, [[]])
        rows = sum(requests[other].rows.n_rows for other in passes[-1])
        if most is not None and rows and not request.is_prompt and rows + request.rows.n_rows > most:
            passes.append([])
        passes[-1].append(i)
    return [group for passes in alike.values() for group in passes]


def _run(lm: LM, requests: Sequence[ForwardRequest]) -> Iterator[ForwardResult]:
    use_device(lm.device)
    check_stream(lm)
    lm.enable_hidden_states({layer for request in requests for layer in request.record_hidden_states})
    if requests[0].layers is not None and lm.direct_forward is None:
        lm.check_layer_gates()
    if (captured := captured_passes(lm)) is not None and (replayed := captured.run(requests)) is not None:
        yield from replayed
        return
    passes = [ForwardPass(request) for request in requests]
    way = BatchedPass(passes) if len(passes) > 1 else passes[0]
    if lm.recurrent_layers:
        way.cache_shim = state_shim(requests, way.cache_shim)
    wanted, n_rows = [len(request.want) for request in requests], [request.rows.n_rows for request in requests]
    starts = accumulate(n_rows, initial=0)
    want: list[int] | None = [at + row for at, each in zip(starts, requests, strict=False) for row in each.want]
    if want == list(range(sum(n_rows))):
        want = None  # every row is wanted: no selection
    ids, pos = [*requests[0].rows.ids], requests[0].rows.pos
    if len(requests) > 1:
        ids, pos = (
            [*chain.from_iterable(of)] for of in zip(*((r.rows.ids, r.rows.pos) for r in requests), strict=True)
        )
    logits, hidden = run_layers(lm, requests, way, ids, pos, want)
    each = torch.split(logits, wanted) if len(requests) > 1 else [logits]
    gave = [None] * len(requests) if hidden is None else torch.split(hidden, wanted if sum(wanted) else n_rows)
    backs = [Readback(request, rows, lm.has_pool) for request, rows in zip(requests, each, strict=True)]
    if lm.is_on_accelerator:
        fetch(backs)
    for i, (p, rows, back, left) in enumerate(zip(passes, each, backs, gave, strict=True)):
        of = p.fresh, p.queries, states_of(p.shows, way.shows, left)
        yield ForwardResult(rows, back.drawn, back.hook_output, *of, fold=way.cache_shim.advance_state(i))


def release(lm: LM) -> None:
    """Free the device memory of an ended sequence: captured passes over its KV cache and pinned memory."""
    if (captured := captured_passes(lm)) is not None:
        captured.release()
    bus_of(lm.device).release()


def iterate_events(work: Coroutine[E, T]) -> Generator[E, None, T]:
    """Run the coroutine of one sequence, pass by pass. Yield its events and return its result.

    An error in a pass is thrown into the coroutine at the request that caused it. Closing this generator closes the
    coroutine.
    """
    try:
        output = next(work)
        while True:
            if not isinstance(output, ForwardRequest):
                yield output
                output = next(work)
                continue
            try:
                (result,) = run([output])
            except BaseException as error:
                output = work.throw(error)
            else:
                output = work.send(result)
    except StopIteration as end:
        found: T = end.value
        return found
    finally:
        work.close()


def run_to_end(work: Coroutine[object, T] | Passes[T]) -> T:
    """Run a coroutine to its end, drop its events and return its result."""
    saying = iterate_events(work)
    while True:
        try:
            next(saying)
        except StopIteration as end:
            found: T = end.value
            return found


class EngineTask(Generic[E, T]):
    """A task of the engine: the coroutine of one sequence, its pending request and its result."""

    def __init__(self, work: Coroutine[E, T], outbox: Callable[[E], object]) -> None:
        self._work, self._outbox = work, outbox
        self.request: ForwardRequest | None = None  # pending request; None = the task is over
        self.part: ForwardRequest | None = None  # what the coming pass runs of it
        self._pieces: PromptPieces | None = None  # those of the pending request, if it is cut
        self.error: BaseException | None = None  # error that ended the task
        self._found: T | None = None
        self._go_on(lambda: next(work))

    def cut(self, most: int) -> int:
        """Set `part` to the next rows of the pending request, at most `most` if it can be cut. Returns how many."""
        assert self.request is not None, "the task is over"
        left = self.request.rows.n_rows - (self._pieces.n_done if self._pieces is not None else 0)
        n = min(left, most) if PromptPieces.can_cut(self.request) else left
        if self._pieces is None and n < left:
            self._pieces = PromptPieces(self.request)
        self.part = self.request if self._pieces is None else self._pieces.piece(n)
        return n

    @property
    def is_over(self) -> bool:
        return self.request is None

    def result(self) -> T:
        """Return the result of a finished task. Raises the error that ended it, CancelledError if it was cancelled."""
        assert self.is_over, "the result is read before the task has ended"
        if self.error is not None:
            raise self.error
        return self._found  # type: ignore[return-value]

    def cancel(self) -> None:
        """Cancel the task between two passes. KV that it has committed is kept."""
        if not self.is_over:
            self._work.close()
            self.request = self.part = self._pieces = None
            self.error = CancelledError()

    def send(self, result: ForwardResult) -> None:
        """Take the result of `part`. If it completes that of the pending request, send it to the coroutine."""
        if self.is_over:  # another task has cancelled it
            return
        whole = result if self._pieces is None else self._pieces.add(result)
        if whole is not None:
            self._go_on(lambda: self._work.send(whole))

    def throw(self, error: Exception) -> None:
        """Throw an error into the coroutine: its pending request failed in a pass that ran no other request."""
        self._go_on(lambda: self._work.throw(error))

    def _go_on(self, step: Callable[[], ForwardRequest | E]) -> None:
        """Advance to the next request. Events on the way are handed to the outbox."""
        self._pieces = None
        try:
            output = step()
            while not isinstance(output, ForwardRequest):
                self._outbox(output)
                output = next(self._work)
            self.request = self.part = output
        except StopIteration as end:
            self.request = self.part = None
            self._found = end.value
        except Exception as error:  # raised by this sequence or its outbox; other tasks continue
            self._work.close()
            self.request = self.part = None
            self.error = error


class Engine:
    """An engine for several sequences. Each engine step runs rows of many sequences together, as `run` groups them.

    A step runs draft passes first, then takes the decoding sequences, then prompt chunks up to a number of rows. While
    any sequence decodes, chunks are cut so that the step takes at most `longest` seconds, and after a step with prompt
    rows comes one without. A chunk is not cut where that could change the bits of its rows, as on a GPU: the step then
    takes one chunk, and others only if there is time. The weights are read once per pass, however many sequences share
    it.
    """

    def __init__(self, rows: int = 2048, longest: float = 0.25, clock: Callable[[], float] = time.perf_counter) -> None:
        """`rows`: most prompt rows in a step. A chunk of more rows runs as the only chunk of its step. `longest`:
        seconds that a token of a decoding sequence waits for prompt rows, as far as chunks can be cut. `clock`: the
        time in seconds."""
        self._rows, self._clock, self._time = rows, clock, StepTime(longest)
        self._n_waiting = 0  # tasks at the front of the list that were not in the last step
        self._prompts: list[tuple[ForwardRequest, int]] = []  # prompt requests of the last step, and their rows in it
        # by model and number of sequences, times of their decoding passes
        self._timers: dict[tuple[LM, int], PassTimer] = {}
        self._tasks: list[EngineTask[Any, Any]] = []

    def add(self, work: Coroutine[E, T], outbox: Callable[[E], object] = lambda output: None) -> EngineTask[E, T]:
        """Add the coroutine of a sequence. `outbox` is called with its events, in the thread that runs the steps."""
        task = EngineTask(work, outbox)
        self._tasks.insert(self._n_waiting, task)  # before the tasks of the last step
        self._n_waiting += 1
        return task

    def step(self) -> bool:
        """Run one engine step. False if no sequence is left."""
        self._tasks = [task for task in self._tasks if not task.is_over]
        began = self._clock()
        self._run_ahead(began)
        used = self._clock() - began
        if turn := self._turn(used):
            self._tasks.sort(key=turn.__contains__)  # tasks that were left out are first next time
            self._n_waiting = len(self._tasks) - len(turn)
            self._pass(turn)
            if len(turn) > len(self._prompts):
                self._time.learn(self._clock() - began - used, self._prompts)
        return bool(turn)

    def _run_ahead(self, began: float) -> None:
        """Run requests that only prepare a decoding step, such as those of draft models, while the step has time. So
        all sequences decode in one pass, and none waits for a pass over its model between two draft tokens of
        another."""
        while ahead := [task for task in self._tasks if task.request is not None and task.request.is_preparing]:
            if self._time.left(self._clock() - began) <= 0:
                return
            self._pass(ahead)

    def _turn(self, used: float = 0.0) -> list[EngineTask[Any, Any]]:
        waiting = [(task, task.request) for task in self._tasks if task.request is not None]
        found = [task for task, request in waiting if not request.is_prompt]
        is_alone, waits = not found, bool(found and self._prompts)
        self._prompts, left = [], 1.0  # share of the step that is left
        for task, request in () if waits else waiting:
            share = max(1 / self._rows, 0.0 if is_alone else self._time.share(request, used))
            if request.is_prompt and (fits := max(0, int(left / share + 1e-6))):
                n = task.cut(request.rows.n_rows if is_alone else fits)
                if n <= fits or not self._prompts:
                    self._prompts.append((request, n))
                    found.append(task)
                    left -= n * share
        return found

    def _pass(self, tasks: list[EngineTask[Any, Any]]) -> None:
        """Run the requests of these tasks. If that fails, run fewer at once, so that only the tasks that cause it get
        the error: each half by itself if memory is short, because fewer rows need less, else each task alone."""
        tasks = [task for task in tasks if not task.is_over]  # an outbox may have cancelled one
        parts = [task.part for task in tasks if task.part is not None]
        try:
            began = self._clock()
            results = run(parts)
        except Exception as error:
            if len(tasks) == 1:
                tasks[0].throw(error)
                return
            n = 1 if as_cache_full(error) is None else -(-len(tasks) // 2)
            for first in range(0, len(tasks), n):
                self._pass(tasks[first : first + n])
        else:
            writing = Counter(part.lm for part in parts if part.draw is not None)
            if 1 < len(parts) == writing[parts[0].lm] and not self._prompts:  # all decode with one model
                more = sum(part.rows.n_rows for part in parts) - len(parts)
                self._timer(parts[0].lm, len(parts)).add(more, self._clock() - began)
            for task, part, of in zip(tasks, parts, results, strict=True):
                n = writing[part.lm] if part.draw is not None else 0
                if n > 1 or (n and self._prompts):
                    of = replace(of, company=Company(n, self._timer(part.lm, n) if n > 1 else None))
                task.send(of)

    def _timer(self, lm: LM, n: int) -> PassTimer:
        return self._timers.setdefault((lm, n), PassTimer(n))


def generate_together(*works: Coroutine[E, T]) -> list[EngineTask[E, T]]:
    """Run several coroutines in one engine until all have ended. Return their tasks, in the order of `works`."""
    many = Engine()
    tasks = [many.add(work) for work in works]
    while many.step():
        pass
    return tasks
