"""Captured passes: forward passes of a fixed shape that a GPU captures once and replays, with one wait of the host in
each.

A captured pass has a fixed number of rows, unused ones included, and reads the KV caches at fixed addresses. The inputs
that change (ids, positions, the rows that each row attends to, the length of the cache) are in buffers on the device. A
replay is one copy to the device, one launch and one copy back. The device compares sampled tokens with draft tokens
itself and stores the accepted rows. If the next pass is known to be the single row that follows, it is launched before
the host has read the results of this one: the sampled token remains on the device.

Every pass is captured alike, whoever requests it: of decoding, of a draft model or a draft head, over a draft tree or a
part of the KV cache, through some of the layers. Prompts are not: their passes are few and long, so that launches take
a small part of their time, and no two chunks need to be equally long.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from kvcli.engine.forward import BatchedPass, SequencePass, run_layers
from kvcli.engine.forward_request import ForwardRequest, ForwardResult, NewKV
from kvcli.engine.hf.cache_shim import CacheShim
from kvcli.engine.hf.layer_gates import StopForward
from kvcli.engine.hf.model_settings import fixed_ropes
from kvcli.engine.readback import Readback, fetch
from kvcli.engine.resources import FRAMES
from kvcli.kernels.attend_captured import attend_captured, storing
from kvcli.kernels.attend_invariant.tables import Tree, uploaded
from kvcli.kernels.gumbel_noise.reference import signed
from kvcli.kv.tiers.device_tables import MOST_ROWS, DeviceCache

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

    # float64, which represents ids exactly: per sequence sampled ids, hook output, and the number of stored rows
    numbers: Tensor
    start: Callable[[], None]
    here: list[Tensor]  # on the host, alternating: one is read while the other is written
    sizes: Sequence[tuple[int, int]]  # by sequence: numbers of sampled ids, and of the hook output
    stores: Sequence[bool]  # by sequence: it commits the accepted rows
    go_on: Callable[[], None] | None = None  # commits the row that was run and makes the sampled token the next row

    def read(self, graphs: CudaGraphs) -> tuple[Tensor, Callable[[], None]]:
        """Sample and start the copy to the host. Return the host buffer and the function that waits for it."""
        self.start()
        self.here.reverse()
        return self.here[0], graphs.fetch(self.numbers, self.here[0])

    def backs(
        self, parts: Sequence[CapturedPart], logits: Sequence[Tensor], here: Tensor
    ) -> tuple[list[Readback], list[int]]:
        """Split the numbers into the results of each sequence, and how many of its rows the device has stored."""
        numbers, backs, counts = here.tolist(), list[Readback](), []
        for part, of, (n_ids, n_hook) in zip(parts, logits, self.sizes, strict=True):
            n, wide = len(part.request.want), n_hook // max(1, len(of))
            backs.append(Readback(part.request, of[:n]))
            backs[-1].fill([*numbers[: min(n_ids, part.request.rows.tree)], *numbers[n_ids : n_ids + n * wide]])
            counts.append(int(numbers[n_ids + n_hook]))
            numbers = numbers[n_ids + n_hook + 1 :]
        return backs, counts


class DeviceSamplers:
    """The captured samplers of one captured pass."""

    def __init__(
        self, graphs: CudaGraphs, rows: Sequence[PassInputs], logits: Sequence[Tensor], stores: Sequence[Storing | None]
    ) -> None:
        """`rows`, `logits`, `stores`: per sequence, rows on the device, their logits, a function that commits rows;
        None = their KV is not stored."""
        self._graphs, self._rows, self._logits, self._stores = graphs, rows, logits, stores
        # index of the first row, and the number of rows to commit: 0 during capture
        self._first, self._one = (torch.zeros(1, dtype=torch.int32, device=logits[0].device) for _ in range(2))
        self._made: dict[tuple[Hashable, ...], DeviceSampling] = {}

    def of(self, requests: Sequence[ForwardRequest]) -> DeviceSampling | None:
        """Return the sampling of these requests; None if it depends on more than the pass."""
        draws = [request.draw for request in requests if request.draw is not None]
        if any(draw.constraint is not None or draw.sampler.penalties or draw.sampler.logit_bias for draw in draws):
            return None
        samplers = [None if each.draw is None else replace(each.draw.sampler, seed=0) for each in requests]
        how = tuple((each, request.logits_hook) for each, request in zip(samplers, requests, strict=True))
        if (drawing := self._made.get(how)) is None:
            self._one.zero_()
            (numbers, sizes, stores), start = captured(self._graphs, partial(self._draw, how))
            self._one.fill_(1)
            here = [self._graphs.host(len(numbers), numbers.dtype) for _ in range(2)]
            self._made[how] = drawing = DeviceSampling(numbers, start, here, sizes, stores)
        if drawing.go_on is None and not any(drawing.stores) and all(map(can_run_ahead, requests)):
            self._one.zero_()
            drawing.go_on = captured(self._graphs, partial(self._feed_back, drawing))[1]
            self._one.fill_(1)
        return drawing

    def _draw(
        self, how: Sequence[tuple[Sampler | None, LogitsHook | None]]
    ) -> tuple[Tensor, list[tuple[int, int]], list[bool]]:
        parts, sizes, stored = [], [], []
        for rows, logits, store, of in zip(self._rows, self._logits, self._stores, how, strict=True):
            (sampler, hook), count, none = of, self._one * 0, self._one[:0].double()
            ids = none if sampler is None else sampler.on_device(logits, rows.wanted_pos.long(), seed=rows.seed)
            found = none if hook is None else hook(logits).double().flatten()
            stored.append(sampler is not None and store is not None and rows.has_draft)
            if store is not None and stored[-1]:
                path, n = rows.accepted_path(ids)
                store(path, count := n * self._one, rows.all_pos)
            parts += [ids.double(), found, count.double()]
            sizes.append((len(ids), len(found)))
        return torch.cat(parts), sizes, stored

    def _feed_back(self, drawing: DeviceSampling) -> None:
        at = 0
        for rows, store, of in zip(self._rows, self._stores, drawing.sizes, strict=True):
            assert store is not None
            store(self._first, self._one, rows.pos)
            token = drawing.numbers[at : at + 1].clamp(min=0)  # if sampling failed, any valid id
            rows.ids.copy_(token.expand_as(rows.ids))
            rows.pos.add_(1)
            at += sum(of) + 1


@dataclass(frozen=True, slots=True)
class PendingPass:
    """A pass that was launched before its request."""

    drawing: DeviceSampling
    here: Tensor
    wait: Callable[[], None]
    rows: Sequence[tuple[int, int, int]]  # per sequence: id, position, seed
    uploads: Sequence[int]  # counts of uploads to the tables at the time of the launch

    def serves(self, requests: Sequence[ForwardRequest], drawing: DeviceSampling | None, now: Sequence[int]) -> bool:
        """True if this is the pass of these requests, and only the device has changed their KV caches since."""
        return drawing is self.drawing and now == self.uploads and [*map(first, requests)] == self.rows


def can_run_ahead(request: ForwardRequest) -> bool:
    """True if the sampled token is the only row of the next pass, and no other output is requested."""
    records = request.record_queries or request.record_hidden_states
    scores = request.draw is None or request.draw.is_scored
    return bool(request.rows.ahead) and not records and not scores and request.logits_hook is None


def first(request: ForwardRequest) -> tuple[int, int, int]:
    """Return id, position and seed of the first row."""
    assert request.draw is not None
    return request.rows.ids[0], request.rows.pos[0], request.draw.sampler.seed


MOST = 24  # most captured passes kept per model
NONE = -1  # fills unused entries of rows and paths

log = logging.getLogger("kvcli.engine")


class CapturedPasses:
    """The captured passes of one model. Other passes launch one operation at a time; `eager` counts them by reason,
    except prompts."""

    def __init__(self, graphs: CudaGraphs, sizes: Sequence[int] = FRAMES) -> None:
        """`sizes`: row counts of captured passes, rising."""
        self.graphs, self._sizes = graphs, sizes
        self._frames: dict[tuple[object, ...], CapturedBatch] = {}  # the most recently used last
        self._over: list[object] = []  # layers of caches that ended or moved
        self.eager: Counter[str] = Counter()
        self.why = ""  # reason why no pass of this model can be captured

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult] | None:
        """Run captured passes over the rows of all requests; None if they cannot be captured."""
        self.release()
        if any(request.is_prompt for request in requests):
            return None
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
        if self.why:
            raise NotCaptured(self.why)
        parts, made = [self._part(request) for request in requests], list[ForwardResult]()
        most = requests[0].lm.max_invariant_rows or math.inf
        while parts:  # one pass, unless padding makes more rows than are batch invariant
            n = max(1, sum(end <= most for end in accumulate(part.shape.rows for part in parts)))
            made += self._frame(parts[:n]).run(parts[:n])
            parts = parts[n:]
        return made

    def _part(self, request: ForwardRequest) -> CapturedPart:
        rows, n, want, view = request.rows, request.rows.n_rows, request.want, DeviceCache()
        if n > self._sizes[-1]:
            raise NotCaptured(f"more than {self._sizes[-1]} rows")
        size, cache = self._size(n), request.cache.device_tables(self._size(n), request.grows)
        if request.view is not None and not cache.why_not:
            view = request.view.device_tables(size, request.grows)
        glances = request.view is not None and rows.tree < n
        if why := cache.why_not or (view.why_not if glances else ""):
            raise NotCaptured(why)
        wanted = None if list(want) == list(range(n)) else self._size(len(want)) if want else 0
        width = 0 if request.hidden is None else request.hidden.shape[1]
        earlier = 0 if cache.tree is None else cache.tree.room
        gives = bool(request.record_queries), request.record_hidden_states
        shape = PassShape(size, 1 if rows.tree_mask is None else size, earlier, wanted, glances, *gives, width)
        return CapturedPart(request, shape, (cache, view))

    def _size(self, n: int) -> int:
        return next(size for size in self._sizes if size >= n)

    def _frame(self, parts: Sequence[CapturedPart]) -> CapturedBatch:
        self.release()  # drop captured passes over the former memory of these caches
        layers = parts[0].request.layers
        ends = None if layers is None else (layers.start, layers.stop)  # empty ranges all compare equal
        key = (ends, *(part.shape for part in parts), *(id(lying) for part in parts for lying in part.lying))
        frame = self._frames.pop(key, None)
        if frame is None:
            while len(self._frames) >= MOST:
                del self._frames[next(iter(self._frames))]
            frame = CapturedBatch(parts, self.graphs, self._over.append)
        self._frames[key] = frame
        return frame


def captured_passes(lm: LM) -> CapturedPasses | None:
    """Return the captured passes of a model; None if they are off or its device does not support them."""
    return lm.remembers.get(CapturedPasses)


class NotCaptured(Exception):
    """Raised with a reason if a pass must launch one operation at a time."""


@dataclass(frozen=True, slots=True)
class PassShape:
    """The fixed sizes of one sequence's rows in a captured pass, and which inputs and results it has."""

    rows: int
    paths: int  # most paths through the rows that rows see
    earlier: int  # capacity for rows of earlier passes that these may see: that of the draft tree
    wanted: int | None  # rows whose logits are computed; None = all
    glances: bool  # lookahead rows read a cache view
    queries: bool  # queries are recorded
    shows: bool  # hidden states are recorded
    width: int  # size of the given hidden states; 0 = the embedded tokens are the input

    def sizes(self) -> list[int]:
        """Return the size of each input of `PassInputs`."""
        n, seen = self.rows, self.earlier + self.rows
        of_rows = [2, n, seen, n, n, n * self.glances, self.paths * seen, 1, 1, self.wanted or 0]
        return [*of_rows, min(seen, MOST_ROWS), 1]

    def starts(self) -> list[int]:
        """Return the start of each input, at multiples of 16 bytes; the last entry is the end."""
        return list(accumulate((-(-n // 4) * 4 for n in self.sizes()), initial=0))


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """One sequence in a captured pass: its request, and what that reads on the device."""

    request: ForwardRequest
    shape: PassShape
    reads: tuple[DeviceCache, DeviceCache]  # KV cache, and the view of lookahead rows, which is kept up to date

    @property
    def first(self) -> int:
        """Place of the first row in the draft tree."""
        return max(0, len(self.reads[0].tree_pos) - self.request.rows.n_rows)

    @property
    def lying(self) -> list[object]:
        """Objects that exist as long as the captured pass is valid."""
        cache, view = self.reads
        return [*cache.tables(), *view.tables(), *([] if cache.tree is None else [cache.tree])]

    def ran(self) -> Callable[[int], None]:
        """Note that the device is about to store rows. The result is to be called with their number; until then the
        lengths on the device are unknown."""
        owners = [of.layers[layer] for of in self.reads for layer in of.owners]
        was = [lying.lengths for lying in owners]
        for lying in owners:
            lying.lengths = []

        def know(n: int) -> None:
            for lying, lengths in zip(owners, was, strict=True):
                lying.lengths = [length + n for length in lengths]

        return know


class PassInputs:
    """The input numbers of one sequence's rows, in a block of int32, on the host or on the device."""

    def __init__(self, block: Tensor, shape: PassShape) -> None:
        """`block`: as many numbers as the last entry of `shape.starts()`."""
        starts, sizes = shape.starts(), shape.sizes()
        seed, self.ids, self.all_pos, self.depth, self.path_of, self.beside, path, *rest = (
            block[a : a + n] for a, n in zip(starts, sizes, strict=False)
        )
        # place of the first row among all, number of rows of the draft tree
        self.first, self.n_tree, want, self.kept, self.count = rest
        self.seed, self.path, self.want = seed.view(torch.int64)[0], path.view(shape.paths, -1), want
        self.pos = self.all_pos[shape.earlier :]  # of the rows; before, those of rows of earlier passes
        self.accepted = block[starts[-3] :]  # covers `kept` and `count`
        self.wants_all, self.has_draft = shape.wanted is None, shape.rows > 1 and not shape.earlier

    def tree(self, path_of: Tensor) -> Tree:
        """Return what the rows see, those with a path."""
        return Tree(self.path, path_of, self.depth, self.all_pos)

    @property
    def wanted_pos(self) -> Tensor:
        return self.pos if self.wants_all else self.pos.index_select(0, self.want)

    def accepted_path(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows whose tokens were accepted, in order, and their number [1]; ids [n] were sampled after the
        first n rows. As `accepted_path` (commit.py), without stop tokens."""
        path, line = self.path[:, 1:], self.path.clamp(min=0).long()
        before = ids[line[:, :-1].clamp(max=len(ids) - 1)]
        is_next = (self.ids[line[:, 1:]] == before) & (path >= 0) & (path < self.n_tree)
        n = is_next.long().cumprod(1).sum(1)  # [P]
        best = n.argmax(0, keepdim=True)
        return line.index_select(0, best)[0].int(), 1 + n.index_select(0, best).int()

    def fill(self, part: CapturedPart) -> None:
        """Fill in a request, on the host. Unused rows repeat the first one and are on no path."""
        rows, n, cache = part.request.rows, part.request.rows.n_rows, part.reads[0]
        self.all_pos.numpy()[: len(cache.tree_pos)] = cache.tree_pos
        for to, given in ((self.ids, rows.ids), (self.pos, rows.pos)):
            numbers = to.numpy()
            numbers[:n], numbers[n:] = given, given[0]
        path, path_of, depth = self.path.numpy(), self.path_of.numpy(), self.depth.numpy()
        path.fill(NONE)
        path_of.fill(NONE)
        sees: Any = cache.sees
        if sees is None and rows.tree_mask is not None:
            mask = rows.tree_mask.numpy()
            seen, ends = mask.nonzero()[1].tolist(), mask.sum(1).cumsum().tolist()
            sees = [seen[a:b] for a, b in pairwise([0, *ends])]
        if sees is None:
            path[0, :n], path_of[:n], depth[:n] = range(n), 0, range(n)
        else:
            path_of[:n], depth[:n] = _paths(sees, path), [len(mine) - 1 for mine in sees]
        if part.shape.glances:
            self.beside.fill_(NONE)
            self.beside.numpy()[rows.tree : n] = path_of[rows.tree : n]
            path_of[rows.tree :] = NONE
        if not self.wants_all:
            self.want.zero_()
            self.want.numpy()[: len(part.request.want)] = part.request.want
        self.first.fill_(part.first)
        self.n_tree.fill_(rows.tree)
        self.seed.fill_(0 if part.request.draw is None else signed(part.request.draw.sampler.seed))


def _paths(sees: Sequence[Sequence[int]], path: Any) -> list[int]:
    """Write paths that begin with what each row sees to `path` [P, N], the longest first. Return that of each row."""
    found, written, through = [0] * len(sees), list[Sequence[int]](), dict[int, int]()
    for row in sorted(range(len(sees)), key=lambda row: -len(sees[row])):
        mine = sees[row]
        at = through.get(mine[-1], len(written)) if mine else 0  # the first path through the last of them
        if at == len(written) or written[at][: len(mine)] != mine:
            at = len(written)
            path[at, : len(mine)] = mine
            written.append(mine)
            through = dict.fromkeys(mine, at) | through
        found[row] = at
    return found


class CapturedForward(SequencePass):
    """A stand-in for ForwardPass during a capture: the rows of one sequence, with all their inputs on the device."""

    def __init__(self, part: CapturedPart, rows: PassInputs, hidden: Tensor | None) -> None:
        """`hidden` [N, E]: as in the request."""
        request, self._part, self._rows = part.request, part, rows
        self.layers = range(request.lm.n_layers) if request.layers is None else request.layers
        self.n_rows, self.hidden, self.shows = len(rows.ids), hidden, part.shape.shows
        self.cache_shim = CacheShim(request.lm.latents)
        self._shapes, self._dtype = request.lm.shapes, request.cache.dtype
        self.fresh: dict[int, NewKV] = {}  # by layer
        self.queries: list[Tensor] = []  # per layer q [H, N, D]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        """Run attention in one layer, as in `ForwardPass` (forward.py)."""
        cast, (cache, view), is_last = k.to(self._dtype), self._part.reads, layer == self.last
        q, k, v = q.to(self._dtype), cast, cast if v is k else v.to(self._dtype)
        if _in_rows(k) != _in_rows(v):  # one address table serves both, so their strides must match
            k, v = (t.contiguous().flatten().view(t.shape) for t in (k, v))  # a single row may have any stride
        if (source := self._shapes[layer].shared_from) is not None:
            layer, k, v = source, self.fresh[source].k, self.fresh[source].v
        else:
            if cache.tree is not None:
                k, v = cache.tree.put(layer, k, v, self._rows.first)
            self.fresh[layer] = NewKV(k, v)
        if self._part.shape.queries:
            self.queries.append(q)
        if is_last:
            raise StopForward
        out = self._read(cache, layer, self._rows.path_of, (q, k, v), params, sink)
        return (
            self._read(view, layer, self._rows.beside, (q, k, v), params, sink, out) if len(self._rows.beside) else out
        )

    def _read(
        self,
        cache: DeviceCache,
        layer: int,
        path_of: Tensor,
        new: tuple[Tensor, Tensor, Tensor],
        params: AttentionParams,
        sink: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of the rows with a path, in place of the others in `out` if given."""
        (q, k, v), rows, lying, below = new, self._rows, cache.layers[layer], cache.below[layer] if cache.below else ()
        scale, softcap = params.scale, params.softcap
        window = None if params.window is None else params.window + cache.wider
        before = [lower.attend(q, rows.pos, scale, softcap=softcap, window=window) for lower in below]
        of = q, lying.table, k, v, rows.tree(path_of), scale, lying.room
        return attend_captured(*of, softcap=softcap, window=window, sink=sink, before=before, out=out)

    def new(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the new keys and values that become slots of a layer."""
        source = self._shapes[layer].shared_from
        fresh = self.fresh[layer if source is None else source]
        return fresh.k, fresh.v


class CapturedBatch:
    """A captured pass over the rows of some sequences. It refers to their KV caches weakly."""

    def __init__(self, parts: Sequence[CapturedPart], graphs: CudaGraphs, over: Callable[[object], None]) -> None:
        """`over` is called when memory that it reads moves or is freed. Raises HostSyncInCapture."""
        lm, shapes = parts[0].request.lm, [part.shape for part in parts]
        self._graphs = graphs = graphs.apart()  # other captured passes run between this one and the commit of its rows
        self._over = [ref(lying, over) for part in parts for lying in part.lying]
        ends = [0, *accumulate(shape.starts()[-1] for shape in shapes)]
        self._here = graphs.host(ends[-1], torch.int32)
        self._there = torch.zeros(ends[-1], dtype=torch.int32, device=lm.device)
        self._of_host, self._rows = (
            [PassInputs(block[a:b], shape) for (a, b), shape in zip(pairwise(ends), shapes, strict=True)]
            for block in (self._here, self._there)
        )
        for rows, part in zip(self._of_host, parts, strict=True):  # `count` is 0: no row is stored during capture
            rows.path_of.fill_(NONE)
            rows.first.fill_(part.first)  # earlier rows of a draft tree stay as they are
        graphs.send(self._here, self._there)
        self._hidden = [
            None if (x := p.request.hidden) is None else x.new_zeros(p.shape.rows, p.shape.width) for p in parts
        ]
        self._under_way: PendingPass | None = None
        self._wait: Callable[[], None] | None = None  # for a pass whose results the host has not waited for
        self._none = torch.empty(0, lm.vocab, dtype=lm.dtype, device=lm.device)  # logits

        def work() -> tuple[Tensor, Tensor | None, list[CapturedForward]]:
            passes = [CapturedForward(*each) for each in zip(parts, self._rows, self._hidden, strict=True)]
            return *self._through(lm, [part.request for part in parts], passes), passes

        with fixed_ropes(lm.model):
            (logits, shown, passes), self._pass = captured(graphs, work)
        self._is_below = not len(logits) and shown is not None  # the layers end below the last one
        every, wanted = [shape.rows for shape in shapes], [len(rows.wanted_pos) for rows in self._rows]
        self._logits = torch.split(logits, wanted) if len(logits) else [self._none] * len(parts)
        self._queries = [p.queries for p in passes]
        # by sequence, [N, E]
        self._shown = None if shown is None else torch.split(shown, every if self._is_below else wanted)
        self._fresh = [p.fresh for p in passes]
        self._alive = list[Tensor]()  # tensors that the captured operations read
        stores = [self._storing(part, made) for part, made in zip(parts, passes, strict=True)]
        self._keep = [  # by sequence: the function that commits accepted rows; None = they are not stored
            None if store is None else captured(graphs, partial(store, rows.kept, rows.count, rows.all_pos))[1]
            for store, rows in zip(stores, self._rows, strict=True)
        ]
        self._drawings = DeviceSamplers(graphs, self._rows, self._logits, stores)

    def _storing(self, part: CapturedPart, made: CapturedForward) -> Storing | None:
        """Return the function that commits rows; None if the host does, or nobody."""
        if part.request.layers is not None or not any(of.owners for of in part.reads):
            return None
        owners = [(of.layers[layer].table, made.new(layer)) for of in part.reads for layer in of.owners]
        tables, fresh = zip(*owners, strict=True)
        store, alive = storing(tables, fresh)
        self._alive += alive
        return store

    @property
    def is_alive(self) -> bool:
        """True if all layers are still at the same addresses."""
        return all(lying() is not None for lying in self._over)

    def run(self, parts: Sequence[CapturedPart]) -> list[ForwardResult]:
        """Run one pass for requests of these sizes. Raises HostSyncInCapture."""
        requests = [part.request for part in parts]
        drawing = self._drawings.of(requests)
        uploads = [of.synced_length for part in parts for each in part.reads for of in each.tables()]
        under_way, self._under_way = self._under_way, None
        if under_way is None or not under_way.serves(requests, drawing, uploads):
            under_way = None
            self._start(parts)
        if drawing is None:  # sampled by operations that are launched one at a time
            each = zip(parts, self._logits, strict=True)
            backs = [Readback(part.request, logits[: len(part.request.want)]) for part, logits in each]
            fetch(backs)
            return self._made(parts, backs, [False] * len(parts), is_overwritten=False)
        known = [part.ran() if stores else None for part, stores in zip(parts, drawing.stores, strict=True)]
        here, wait = drawing.read(self._graphs) if under_way is None else (under_way.here, under_way.wait)
        is_ahead = drawing.go_on is not None and all(map(can_run_ahead, requests))
        if drawing.go_on is not None and is_ahead:
            drawing.go_on()
            for part in parts:
                part.ran()(1)
            self._pass()
            ahead = drawing.read(self._graphs)
        if all(request.draw is None and request.logits_hook is None for request in requests):
            self._wait, here = wait, torch.zeros_like(here)
        else:
            wait()
        backs, counts = drawing.backs(parts, self._logits, here)
        for know, count in zip(known, counts, strict=True):
            if know is not None:
                know(count)
        if is_ahead:
            rows = [(back.ids[0], at + 1, n) for back, (_, at, n) in zip(backs, map(first, requests), strict=True)]
            self._under_way = PendingPass(drawing, *ahead, rows, uploads)
        return self._made(parts, backs, [is_ahead or stores for stores in drawing.stores], is_overwritten=is_ahead)

    def _start(self, parts: Sequence[CapturedPart]) -> None:
        if self._wait is not None:  # the device may not have read the numbers before
            self._wait()
            self._wait = None
        for rows, hidden, part in zip(self._of_host, self._hidden, parts, strict=True):
            rows.fill(part)
            if hidden is not None and part.request.hidden is not None:
                hidden[: part.request.rows.n_rows].copy_(part.request.hidden)
        self._graphs.send(self._here, self._there)
        self._pass()

    def _made(
        self, parts: Sequence[CapturedPart], backs: Sequence[Readback], stored: Sequence[bool], *, is_overwritten: bool
    ) -> list[ForwardResult]:
        made = []
        for i, (part, back) in enumerate(zip(parts, backs, strict=True)):
            request, n, recorded = part.request, part.request.rows.n_rows, part.request.record_queries
            # otherwise the buffer has the logits of the next pass
            logits = self._none if is_overwritten else self._logits[i][: len(request.want)]
            if request.draw is not None and request.draw.is_scored:
                logits = logits.clone()  # its tokens are scored later
            queries = [q[:, : len(recorded)] for q in self._queries[i]] if recorded else []
            if recorded and recorded[-1] >= len(recorded):
                (at,) = uploaded([recorded], self._there.device)
                queries = [q.index_select(1, at) for q in self._queries[i]]
            shown = self._shown[i][: n if self._is_below else len(request.want)] if self._shown is not None else None
            commits = partial(self._commit, i, part, stored[i]) if self._keep[i] is not None else None
            fresh = {} if commits is not None or part.shape.earlier else self._fresh[i]
            new = {layer: NewKV(of.k[:, :n], of.v[:, :n]) for layer, of in fresh.items()}
            shown = shown if self._is_below or part.shape.shows else None
            made.append(ForwardResult(logits, back.drawn, back.hook_output, new, queries, shown, commits))
        return made

    def _commit(self, i: int, part: CapturedPart, is_stored: bool, path: Sequence[int]) -> None:
        """Commit these rows."""
        if not is_stored and (keep := self._keep[i]) is not None:
            here, there = self._of_host[i], self._rows[i]
            here.kept.numpy()[: len(path)], here.count.numpy()[0] = path, len(path)
            self._graphs.send(here.accepted, there.accepted)
            part.ran()(len(path))
            keep()
        pos = part.reads[0].tree_pos or part.request.rows.pos
        for of in part.reads:
            of.grew(len(path), pos[path[0]])

    def _through(
        self, lm: LM, requests: Sequence[ForwardRequest], passes: Sequence[CapturedForward]
    ) -> tuple[Tensor, Tensor | None]:
        """Return as `run_layers`, for rows whose numbers are on the device."""
        ids, pos = (torch.cat(of).long() for of in zip(*((rows.ids, rows.pos) for rows in self._rows), strict=True))
        want, every = None, torch.split(torch.arange(len(ids), device=ids.device), [p.n_rows for p in passes])
        if not all(rows.wants_all for rows in self._rows):
            each = zip(self._rows, every, strict=True)
            want = torch.cat([at if rows.wants_all else at.index_select(0, rows.want) for rows, at in each])
        way = passes[0] if len(passes) == 1 else BatchedPass(passes)
        return run_layers(lm, requests, way, ids, pos, want)


def _in_rows(t: Tensor) -> list[float]:
    """Return the strides of heads and rows of t [K, N, D] in units of rows, because keys and values may differ in
    size."""
    return [stride / t.shape[2] for stride in t.stride()[:2]]
