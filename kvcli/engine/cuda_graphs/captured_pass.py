"""Captured passes: forward passes of a fixed shape that a GPU captures once and replays, with one wait of the host in
each.

A captured pass has a fixed number of rows, unused ones included, and reads the KV caches at fixed addresses. The inputs
that change (ids, positions, the tree, the length of the cache) are in buffers on the device. A replay is one copy to
the device, one launch and one copy back. If the next pass is known to be the single row that follows, it is launched
before the host has read the results of this one: the sampled token remains on the device.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from kvcli.engine.forward import BatchedPass, SequencePass
from kvcli.engine.forward_request import ForwardRequest, ForwardResult, NewKV
from kvcli.engine.hf.cache_shim import CacheShim, call
from kvcli.engine.hf.model_settings import fixed_ropes
from kvcli.engine.readback import Readback, fetch
from kvcli.engine.resources import FRAMES
from kvcli.kernels.attend_captured import attend_captured, storing
from kvcli.kernels.attend_invariant.tables import Tree
from kvcli.kernels.gumbel_noise.reference import signed
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    from kvcli.engine.forward_request import LogitsHook
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.kernels.attend_captured import Storing
    from kvcli.kv.slots import AttentionParams

# Capture and replay of operations on a GPU: CUDA graphs. This is the only file that knows their rules.
#
# Captured operations may not allocate, wait, or read anything on the host. They read and write the same addresses in
# each replay. Python code runs during capture only.


T = TypeVar("T")


class HostSyncInCapture(Exception):
    """Raised with a reason if a model synchronizes with the host during capture."""


class CudaGraphs:
    """CUDA graphs of one device. All captures of one object share a memory pool."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream | None = None) -> None:
        """`side`: the stream to capture on. cuBLAS keeps a workspace per stream, so there is only one."""
        self._device = device
        self._side: torch.cuda.Stream = side or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def apart(self) -> CudaGraphs:
        """Return an object for the same device with a separate memory pool.

        A later capture may reuse intermediate memory of an earlier one in the same pool, so that replaying the earlier
        one overwrites the later one's results. Captures that are replayed in any order need separate pools.
        """
        return CudaGraphs(self._device, self._side)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture `work`. Return its result, which remains at the same address, and the function that replays it. Only
        a replay counts: `work` runs before as a warm-up, on a side stream, where Triton compiles and cuBLAS allocates
        its workspace.

        Raises RuntimeError if `work` synchronizes with the host.
        """
        side, now = self._side, torch.cuda.current_stream(self._device)
        side.wait_stream(now)
        with torch.cuda.stream(side):
            work()
        now.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads of this process continue
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            made = work()
        self._pool = self._pool or graph.pool()
        return made, graph.replay

    def host(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed host memory that the device can access directly."""
        return torch.zeros(n, dtype=dtype, pin_memory=True)

    def send(self, here: Tensor, there: Tensor) -> None:
        """Copy to the device; `here` may be overwritten after the next wait for the device."""
        there.copy_(here, non_blocking=True)

    def fetch(self, there: Tensor, here: Tensor) -> Callable[[], None]:
        """Copy to the host and return the function that waits for the copy. By then all earlier copies have finished
        too."""
        here.copy_(there, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


def captured(graphs: CudaGraphs, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """Capture `work` with `record`; raises HostSyncInCapture if it synchronizes with the host."""
    try:
        with torch.inference_mode():
            return graphs.record(work)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise HostSyncInCapture(str(error).partition("\n")[0]) from error


# Sampling in a captured pass: on the device, by operations captured once for each set of sampler settings.


@dataclass(slots=True)
class DeviceSampling:
    """Captured sampling, and the captured step that makes the sampled token the next input."""

    numbers: Tensor  # float64, which represents ids exactly: per sequence the sampled ids, then the hook output
    start: Callable[[], None]
    here: list[Tensor]  # on the host, alternating: one is read while the other is written
    wide: Sequence[int]  # by sequence: numbers of hook output per row
    go_on: Callable[[], None] | None = None  # commits the row that was run and makes the sampled token the next row

    def read(self, graphs: CudaGraphs) -> tuple[Tensor, Callable[[], None]]:
        """Sample and start the copy to the host. Return the host buffer and the function that waits for it."""
        self.start()
        self.here.reverse()
        return self.here[0], graphs.fetch(self.numbers, self.here[0])

    def backs(
        self, requests: Sequence[ForwardRequest], sizes: Sequence[int], logits: Sequence[Tensor], here: Tensor
    ) -> list[Readback]:
        """Split the numbers into the results of each sequence, whose rows in the captured pass are `sizes`."""
        numbers: list[float] = here.tolist()
        backs = []
        for request, size, of, wide in zip(requests, sizes, logits, self.wide, strict=True):
            n, back = request.rows.n_rows, Readback(request, of)
            back.fill([*numbers[:n], *numbers[size : size + n * wide]])
            numbers = numbers[size * (1 + wide) :]
            backs.append(back)
        return backs


class DeviceSamplers:
    """The captured samplers of one captured pass."""

    def __init__(
        self, graphs: CudaGraphs, rows: Sequence[PassInputs], logits: Sequence[Tensor], stores: Sequence[Storing]
    ) -> None:
        """`rows`, `logits`, `stores`: per sequence, rows on the device, their logits, a function that commits rows."""
        self._graphs, self._rows, self._logits, self._stores = graphs, rows, logits, stores
        # index of the first row, and the number of rows to commit: 0 during capture
        self._first, self._one = (torch.zeros(1, dtype=torch.int32, device=logits[0].device) for _ in range(2))
        self._made: dict[tuple[Hashable, ...], DeviceSampling] = {}

    def of(self, requests: Sequence[ForwardRequest]) -> DeviceSampling | None:
        """Return the sampling of these requests; None if it depends on more than the pass."""
        draws = [request.draw for request in requests if request.draw is not None]
        if any(draw.constraint is not None or draw.sampler.penalties or draw.sampler.logit_bias for draw in draws):
            return None
        samplers = [replace(draw.sampler, seed=0) for draw in draws]
        how = tuple((each, request.logits_hook) for each, request in zip(samplers, requests, strict=True))
        if (drawing := self._made.get(how)) is None:
            (numbers, wide), start = captured(self._graphs, partial(self._draw, how))
            here = [self._graphs.host(len(numbers), numbers.dtype) for _ in range(2)]
            self._made[how] = drawing = DeviceSampling(numbers, start, here, wide)
        if drawing.go_on is None and all(map(can_run_ahead, requests)):
            self._one.zero_()
            drawing.go_on = captured(self._graphs, partial(self._feed_back, drawing.numbers))[1]
            self._one.fill_(1)
        return drawing

    def _draw(self, how: Sequence[tuple[Sampler, LogitsHook | None]]) -> tuple[Tensor, list[int]]:
        """Return the sampled ids and hook outputs, and per sequence the numbers of hook output per row."""
        parts, wide = [], []
        for rows, logits, (sampler, logits_hook) in zip(self._rows, self._logits, how, strict=True):
            parts.append(sampler.on_device(logits, rows.pos.long(), seed=rows.seed).double())
            wide.append(0)
            if logits_hook is not None:
                parts.append(logits_hook(logits).double().flatten())
                wide[-1] = len(parts[-1]) // len(logits)
        return torch.cat(parts), wide

    def _feed_back(self, numbers: Tensor) -> None:
        at = 0
        for rows, store in zip(self._rows, self._stores, strict=True):
            store(self._first, self._one, rows.pos)
            rows.ids.copy_(numbers[at : at + 1].clamp(min=0).expand_as(rows.ids))  # if sampling failed, any valid id
            rows.pos.add_(1)
            at += len(rows.ids)


@dataclass(frozen=True, slots=True)
class PendingPass:
    """A pass that was launched before its request."""

    drawing: DeviceSampling
    here: Tensor
    wait: Callable[[], None]
    rows: Sequence[tuple[int, int, int]]  # per sequence: id, position, seed
    lengths: Sequence[int]  # lengths at the time of the launch

    def serves(self, requests: Sequence[ForwardRequest], drawing: DeviceSampling | None, now: Sequence[int]) -> bool:
        """True if this is the pass of these requests, and only the device has changed their KV caches since."""
        rows = [first(request) for request in requests]
        return drawing is self.drawing and rows == self.rows and now == self.lengths


def can_run_ahead(request: ForwardRequest) -> bool:
    """True if the sampled token is the only row of the next pass, and no other output is requested."""
    records = request.record_queries or request.record_hidden_states
    scores = request.draw is not None and request.draw.is_scored
    return bool(request.rows.ahead) and not records and not scores and request.logits_hook is None


def first(request: ForwardRequest) -> tuple[int, int, int]:
    """Return id, position and seed of the first row."""
    assert request.draw is not None
    return request.rows.ids[0], request.rows.pos[0], request.draw.sampler.seed


MOST = 12  # most captured passes kept per model
NONE = -1  # fills unused entries of rows and paths

log = logging.getLogger("kvcli.engine")


class CapturedPasses:
    """The captured passes of one model. Other passes launch one operation at a time; `eager` counts them by reason."""

    def __init__(self, graphs: CudaGraphs, sizes: Sequence[int] = FRAMES) -> None:
        """`sizes`: row counts of captured passes, rising."""
        self.graphs, self._sizes = graphs, sizes
        self._frames: dict[tuple[object, ...], CapturedBatch] = {}  # the most recently used last
        self._over: list[object] = []  # layers of caches that ended or moved
        self.eager: Counter[str] = Counter()
        self.why = ""  # reason why no pass of this model can be captured

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult] | None:
        """Run one captured pass over the rows of all requests; None if it cannot be captured."""
        self.release()
        if any(request.is_prompt or request.layers is not None or request.only_kv for request in requests):
            return None  # prefill and partial passes are not captured
        try:
            return self._run(requests)
        except torch.OutOfMemoryError:
            why = "no memory to capture them"
        except NotCaptured as no:
            why = str(no)
        except HostSyncInCapture as no:
            lm = requests[0].lm
            self.why = why = f"{lm.info.family} passes cannot be captured: {no}"
            lm.info = replace(lm.info, notes=(*lm.info.notes, f"CUDA graphs are off: {why}"))
        if not self.eager[why]:
            log.info("CUDA graphs are off: %s", why)
        self.eager[why] += 1
        return None

    def release(self) -> None:
        """Drop captured passes over KV caches that no longer exist, and free their memory.

        This cannot be done when such a cache is freed, because another capture may be running, during which no memory
        may be freed.
        """
        if self._over:
            self._over.clear()
            self._frames = {key: frame for key, frame in self._frames.items() if frame.is_alive}

    def _run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        if why := self.why or next(filter(None, map(self._why_not, requests)), ""):
            raise NotCaptured(why)
        sizes, most = [self._size(request) for request in requests], requests[0].lm.max_invariant_rows
        if most is not None and sum(rows for rows, _ in sizes) > most:
            raise NotCaptured(f"padding makes more than {most} rows, the limit of batch invariance")
        caches = [r.cache.device_tables(rows, r.grows) for r, (rows, _) in zip(requests, sizes, strict=True)]
        if why := next(filter(None, (past.why_not for past in caches)), ""):
            raise NotCaptured(why)
        if any(lower for past in caches for lower in past.below):
            raise NotCaptured("lower tiers are read by single operations")
        return self._frame(requests, sizes, caches).run(requests, caches)

    def _why_not(self, request: ForwardRequest) -> str:
        rows, recorded = request.rows, request.record_queries
        if rows.tree < rows.n_rows:
            return "the pass has lookahead rows (spec.method)"
        if rows.n_rows > self._sizes[-1]:
            return f"more than {self._sizes[-1]} rows"
        if len(rows.parent) < rows.n_rows or list(request.want) != list(range(rows.n_rows)) or request.draw is None:
            return "not a decoding step"
        return "" if list(recorded) == list(range(len(recorded))) else "queries of some draft tokens are recorded"

    def _size(self, request: ForwardRequest) -> tuple[int, int]:
        """Return the numbers of rows and paths."""
        rows = next(size for size in self._sizes if size >= request.rows.n_rows)
        return rows, 1 if request.rows.tree_mask is None else rows

    def _frame(
        self, requests: Sequence[ForwardRequest], sizes: Sequence[tuple[int, int]], caches: Sequence[DeviceCache]
    ) -> CapturedBatch:
        self.release()  # drop captured passes over the former memory of these caches
        outputs = ((bool(request.record_queries), request.record_hidden_states) for request in requests)
        key = (*sizes, *outputs, *(id(lying) for its in caches for lying in its.layers))
        frame = self._frames.pop(key, None)
        if frame is None:
            while len(self._frames) >= MOST:
                del self._frames[next(iter(self._frames))]
            frame = CapturedBatch(requests[0].lm, self.graphs, sizes, requests, caches, self._over.append)
        self._frames[key] = frame
        return frame


def captured_passes(lm: LM) -> CapturedPasses | None:
    """Return the captured passes of a model; None if they are off or its device does not support them."""
    return lm.remembers.get(CapturedPasses)


class NotCaptured(Exception):
    """Raised with a reason if a pass must launch one operation at a time."""


class PassInputs:
    """The input numbers of one sequence's rows, in a block of int32, on the host or on the device."""

    def __init__(self, block: Tensor, rows: int, paths: int) -> None:
        """`block`: as many numbers as the last entry of `_starts(rows, paths)`."""
        seed, self.ids, self.pos, self.depth, self.path_of, path, self.kept, self.count = (
            block[a : a + n] for a, n in zip(_starts(rows, paths), _lengths(rows, paths), strict=False)
        )
        self.seed, self.path = seed.view(torch.int64)[0], path.view(paths, rows)
        self.accepted = block[_starts(rows, paths)[-3] :]  # covers `kept` and `count`

    @property
    def tree(self) -> Tree:
        return Tree(self.path, self.path_of, self.depth, self.pos)

    def fill(self, request: ForwardRequest) -> None:
        """Fill in a request, on the host. Unused rows repeat the first one and are on no path."""
        rows, n = request.rows, request.rows.n_rows
        for to, given in ((self.ids, rows.ids), (self.pos, rows.pos)):
            numbers = to.numpy()
            numbers[:n], numbers[n:] = given, given[0]
        lines: list[list[int]] = []
        for row, parent in enumerate(rows.parent):
            lines.append([*(lines[parent] if parent >= 0 else ()), row])
        inner, path = set(rows.parent), self.path.numpy()
        path.fill(NONE)
        self.path_of.fill_(NONE)
        self.depth.zero_()
        for i, line in enumerate(line for row, line in enumerate(lines) if row not in inner):
            path[i, : len(line)] = line
            self.path_of.numpy()[line], self.depth.numpy()[line] = i, range(len(line))
        assert request.draw is not None
        self.seed.fill_(signed(request.draw.sampler.seed))


def _lengths(rows: int, paths: int) -> list[int]:
    return [2, rows, rows, rows, rows, paths * rows, rows, 1]


def _starts(rows: int, paths: int) -> list[int]:
    """Return the start of each input, at multiples of 16 bytes; the last entry is the end."""
    return list(accumulate((-(-n // 4) * 4 for n in _lengths(rows, paths)), initial=0))


class CapturedForward(SequencePass):
    """A stand-in for ForwardPass during a capture: the rows of one sequence, with all their inputs on the device."""

    def __init__(self, request: ForwardRequest, rows: PassInputs, cache: DeviceCache) -> None:
        self.layers, self.n_rows = range(request.lm.n_layers), len(rows.ids)
        self.cache_shim = CacheShim(request.lm.latents)
        self._shapes, self._dtype, self._needs = request.lm.shapes, request.cache.dtype, bool(request.record_queries)
        self.shows = request.record_hidden_states
        self._tree, self._cache = rows.tree, cache
        self.fresh: dict[int, NewKV] = {}  # by layer
        self.queries: list[Tensor] = []  # per layer q [H, N, D]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        """Run attention in one layer, as in `ForwardPass` (forward.py)."""
        cast = k.to(self._dtype)
        q, k, v = q.to(self._dtype), cast, cast if v is k else v.to(self._dtype)
        if _in_rows(k) != _in_rows(v):  # one address table serves both, so their strides must match
            k, v = (t.contiguous().flatten().view(t.shape) for t in (k, v))  # a single row may have any stride
        if (source := self._shapes[layer].shared_from) is not None:
            k, v = self.fresh[source].k, self.fresh[source].v
        else:
            self.fresh[layer] = NewKV(k, v)
        if self._needs:
            self.queries.append(q)
        lying, bent, window = self._cache.layers[layer], params.softcap, params.window
        of = q, lying.table, k, v, self._tree, params.scale
        return attend_captured(*of, capacity=lying.room, softcap=bent, window=window, sink=sink)


class CapturedBatch:
    """A captured pass over the rows of some sequences. It refers to their KV caches weakly."""

    def __init__(
        self,
        lm: LM,
        graphs: CudaGraphs,
        sizes: Sequence[tuple[int, int]],
        requests: Sequence[ForwardRequest],
        caches: Sequence[DeviceCache],
        over: Callable[[object], None],
    ) -> None:
        """`sizes`: rows and paths of each sequence. `over` is called when a layer's memory moves. Raises
        HostSyncInCapture."""
        self._graphs = graphs = graphs.apart()  # other captured passes run between this one and the commit of its rows
        self._over = [ref(lying, over) for its in caches for lying in its.layers]
        ends = [0, *accumulate(_starts(*size)[-1] for size in sizes)]
        self._here = graphs.host(ends[-1], torch.int32)
        self._there = torch.zeros(ends[-1], dtype=torch.int32, device=lm.device)
        self._of_host, self._rows = (
            [PassInputs(block[a:b], *size) for (a, b), size in zip(pairwise(ends), sizes, strict=True)]
            for block in (self._here, self._there)
        )
        for rows in self._of_host:  # `count` is 0, so no row is stored during capture
            rows.path_of.fill_(NONE)
        graphs.send(self._here, self._there)
        self._under_way: PendingPass | None = None
        self._none = torch.empty(0, lm.vocab, dtype=lm.dtype, device=lm.device)  # logits

        def work() -> tuple[Tensor, Tensor | None, list[CapturedForward]]:
            passes = [CapturedForward(*each) for each in zip(requests, self._rows, caches, strict=True)]
            return *self._through(lm, passes), passes

        with fixed_ropes(lm.model):
            (logits, shown, passes), self._pass = captured(graphs, work)
        each = [rows for rows, _ in sizes]
        self._logits, self._queries = torch.split(logits, each), [p.queries for p in passes]
        self._shown = None if shown is None else torch.split(shown, each)  # by sequence, [N, E]
        stores, self._alive = [], list[Tensor]()  # tensors that the captured operations read
        for past, made in zip(caches, passes, strict=True):
            fresh = [(made.fresh[layer].k, made.fresh[layer].v) for layer in past.owners]
            store, alive = storing([past.layers[layer].table for layer in past.owners], fresh)
            stores.append(store)
            self._alive += alive
        self._keep = [  # by sequence: the function that commits accepted rows
            captured(graphs, partial(store, rows.kept, rows.count, rows.pos))[1]
            for store, rows in zip(stores, self._rows, strict=True)
        ]
        self._drawings = DeviceSamplers(graphs, self._rows, self._logits, stores)

    @property
    def is_alive(self) -> bool:
        """True if all layers are still at the same addresses."""
        return all(lying() is not None for lying in self._over)

    def run(self, requests: Sequence[ForwardRequest], caches: Sequence[DeviceCache]) -> list[ForwardResult]:
        """Run one pass for requests of these sizes. Raises HostSyncInCapture."""
        drawing, lengths = self._drawings.of(requests), [lying.synced_length for its in caches for lying in its.layers]
        under_way, self._under_way = self._under_way, None
        if under_way is None or not under_way.serves(requests, drawing, lengths):
            under_way = None
            for rows, request in zip(self._of_host, requests, strict=True):
                rows.fill(request)
            self._graphs.send(self._here, self._there)
            self._pass()
        if drawing is None:
            return self._drawn_apart(requests, caches)
        here, wait = drawing.read(self._graphs) if under_way is None else (under_way.here, under_way.wait)
        if drawing.go_on is None or not all(map(can_run_ahead, requests)):
            wait()
            return self._made(requests, caches, self._backs(requests, drawing, here))
        drawing.go_on()
        for its in caches:
            its.ran(1)
        self._pass()
        ahead = drawing.read(self._graphs)
        wait()
        backs = self._backs(requests, drawing, here)
        next_rows = [(back.ids[0], at + 1, n) for back, (_, at, n) in zip(backs, map(first, requests), strict=True)]
        self._under_way = PendingPass(drawing, *ahead, next_rows, lengths)
        return self._made(requests, caches, backs, is_stored=True)

    def _drawn_apart(self, requests: Sequence[ForwardRequest], caches: Sequence[DeviceCache]) -> list[ForwardResult]:
        """Sample with operations that are launched one at a time."""
        each = zip(requests, self._logits, strict=True)
        backs = [Readback(request, logits[: request.rows.n_rows]) for request, logits in each]
        fetch(backs)
        return self._made(requests, caches, backs)

    def _backs(self, requests: Sequence[ForwardRequest], drawing: DeviceSampling, here: Tensor) -> list[Readback]:
        return drawing.backs(requests, [len(rows.ids) for rows in self._rows], self._logits, here)

    def _made(
        self,
        requests: Sequence[ForwardRequest],
        caches: Sequence[DeviceCache],
        backs: Sequence[Readback],
        is_stored: bool = False,
    ) -> list[ForwardResult]:
        made = []
        for i, (request, back) in enumerate(zip(requests, backs, strict=True)):
            # otherwise the buffer has the logits of the next pass
            logits = self._none if is_stored else self._logits[i][: request.rows.n_rows]
            if request.draw is not None and request.draw.is_scored:
                logits = logits.clone()  # its tokens are scored later
            queries = [q[:, : len(request.record_queries)] for q in self._queries[i]] if request.record_queries else []
            commit_rows = partial(self._commit, i, request, caches[i], is_stored)
            hidden = self._shown[i] if request.record_hidden_states and self._shown is not None else None
            shown = None if hidden is None else hidden[: request.rows.n_rows]
            made.append(ForwardResult(logits, back.drawn, back.hook_output, {}, queries, shown, commit_rows))
        return made

    def _commit(
        self, i: int, request: ForwardRequest, cache: DeviceCache, is_stored: bool, path: Sequence[int]
    ) -> None:
        """Commit these rows."""
        if not is_stored:
            here, there = self._of_host[i], self._rows[i]
            here.kept.numpy()[: len(path)], here.count.numpy()[0] = path, len(path)
            self._graphs.send(here.accepted, there.accepted)
            cache.ran(len(path))
            self._keep[i]()
        cache.grew(len(path), request.rows.pos[path[0]])

    def _through(self, lm: LM, passes: Sequence[CapturedForward]) -> tuple[Tensor, Tensor | None]:
        """Return the logits [N, V] of all rows, and the input of the output layer if requested."""
        ids, pos = (torch.cat(of).long() for of in zip(*((rows.ids, rows.pos) for rows in self._rows), strict=True))
        way = passes[0] if len(passes) == 1 else BatchedPass(passes)
        if lm.direct_forward is not None:
            return lm.direct_forward(ids, pos, None, way), way.hidden_states
        return call(lm.model, ids, pos, device=lm.device, its_pass=way), way.hidden_states


def _in_rows(t: Tensor) -> list[float]:
    """Return the strides of heads and rows of t [K, N, D] in units of rows, because keys and values may differ in
    size."""
    return [stride / t.shape[2] for stride in t.stride()[:2]]
