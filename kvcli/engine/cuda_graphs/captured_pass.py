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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from kvcli.engine.cuda_graphs.capture import HostSyncInCapture, captured
from kvcli.engine.cuda_graphs.device_sampling import DeviceSamplers, PendingPass, can_run_ahead, first
from kvcli.engine.cuda_graphs.readback import Readback, fetch
from kvcli.engine.engine import call
from kvcli.engine.forward import BatchedPass
from kvcli.engine.forward_memory import FRAMES
from kvcli.engine.forward_request import ForwardRequest, ForwardResult, NewKV
from kvcli.engine.hf.cache_shim import CacheShim
from kvcli.engine.hf.model_settings import fixed_ropes
from kvcli.kernels.attend_captured import attend_captured, storing
from kvcli.kernels.attend_invariant.tables import Tree
from kvcli.kernels.gumbel_noise.reference import signed
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    from kvcli.engine.cuda_graphs.capture import Graphs
    from kvcli.engine.cuda_graphs.device_sampling import DeviceSampling
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import AttentionParams

MOST = 12  # most captured passes kept per model
NONE = -1  # fills unused entries of rows and paths

log = logging.getLogger("kvcli.engine")


class CapturedPasses:
    """The captured passes of one model. Other passes launch one operation at a time; `eager` counts them by reason."""

    def __init__(self, graphs: Graphs, sizes: Sequence[int] = FRAMES) -> None:
        """`sizes`: row counts of captured passes, rising."""
        self.graphs, self._sizes = graphs, sizes
        self._frames: dict[tuple[object, ...], CapturedBatch] = {}  # the most recently used last
        self._over: list[object] = []  # layers of caches that ended or moved
        self.eager: Counter[str] = Counter()
        self.why = ""  # reason why no pass of this model can be captured

    def run(self, feeds: Sequence[ForwardRequest]) -> list[ForwardResult] | None:
        """Run one captured pass over the rows of all requests; None if it cannot be captured."""
        self.release()
        if any(feed.is_prompt or feed.layers is not None or feed.only_kv for feed in feeds):
            return None  # prefill and partial passes are not captured
        try:
            return self._run(feeds)
        except torch.OutOfMemoryError:
            why = "no memory to capture them"
        except NotCaptured as no:
            why = str(no)
        except HostSyncInCapture as no:
            lm = feeds[0].lm
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

    def _run(self, feeds: Sequence[ForwardRequest]) -> list[ForwardResult]:
        if why := self.why or next(filter(None, map(self._why_not, feeds)), ""):
            raise NotCaptured(why)
        sizes, most = [self._size(feed) for feed in feeds], feeds[0].lm.max_invariant_rows
        if most is not None and sum(rows for rows, _ in sizes) > most:
            raise NotCaptured(f"padding makes more than {most} rows, the limit of batch invariance")
        caches = [feed.cache.fixed(rows, feed.grows) for feed, (rows, _) in zip(feeds, sizes, strict=True)]
        if why := next(filter(None, (past.why_not for past in caches)), ""):
            raise NotCaptured(why)
        return self._frame(feeds, sizes, caches).run(feeds, caches)

    def _why_not(self, feed: ForwardRequest) -> str:
        rows, hear = feed.rows, feed.record_queries
        if rows.tree < rows.n_rows:
            return "the pass has lookahead rows (spec.method)"
        if rows.n_rows > self._sizes[-1]:
            return f"more than {self._sizes[-1]} rows"
        if len(rows.parent) < rows.n_rows or list(feed.want) != list(range(rows.n_rows)) or feed.draw is None:
            return "not a decoding step"
        return "" if list(hear) == list(range(len(hear))) else "queries of some draft tokens are recorded"

    def _size(self, feed: ForwardRequest) -> tuple[int, int]:
        """Return the numbers of rows and paths."""
        rows = next(size for size in self._sizes if size >= feed.rows.n_rows)
        return rows, 1 if feed.rows.sees is None else rows

    def _frame(
        self, feeds: Sequence[ForwardRequest], sizes: Sequence[tuple[int, int]], caches: Sequence[DeviceCache]
    ) -> CapturedBatch:
        self.release()  # drop captured passes over the former memory of these caches
        told = ((bool(feed.record_queries), feed.record_hidden_states) for feed in feeds)
        key = (*sizes, *told, *(id(lying) for its in caches for lying in its.layers))
        frame = self._frames.pop(key, None)
        if frame is None:
            while len(self._frames) >= MOST:
                del self._frames[next(iter(self._frames))]
            frame = CapturedBatch(feeds[0].lm, self.graphs, sizes, feeds, caches, self._over.append)
        self._frames[key] = frame
        return frame


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

    def fill(self, feed: ForwardRequest) -> None:
        """Fill in a request, on the host. Unused rows repeat the first one and are on no path."""
        rows, n = feed.rows, feed.rows.n_rows
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
        assert feed.draw is not None
        self.seed.fill_(signed(feed.draw.sampler.seed))


def _lengths(rows: int, paths: int) -> list[int]:
    return [2, rows, rows, rows, rows, paths * rows, rows, 1]


def _starts(rows: int, paths: int) -> list[int]:
    """Return the start of each input, at multiples of 16 bytes; the last entry is the end."""
    return list(accumulate((-(-n // 4) * 4 for n in _lengths(rows, paths)), initial=0))


class CapturedForward:
    """A stand-in for ForwardPass during a capture: the rows of one sequence, with all their inputs on the device."""

    last, hidden = -1, None
    hidden_states: Tensor | None = None

    def __init__(self, feed: ForwardRequest, rows: PassInputs, cache: DeviceCache) -> None:
        self.layers, self.n_rows = range(feed.lm.n_layers), len(rows.ids)
        self.trial = CacheShim(feed.lm.latents)
        self._shapes, self._dtype, self._needs = feed.lm.shapes, feed.cache.dtype, bool(feed.record_queries)
        self.shows = feed.record_hidden_states
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
        graphs: Graphs,
        sizes: Sequence[tuple[int, int]],
        feeds: Sequence[ForwardRequest],
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
            passes = [
                CapturedForward(feed, rows, its) for feed, rows, its in zip(feeds, self._rows, caches, strict=True)
            ]
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

    def run(self, feeds: Sequence[ForwardRequest], caches: Sequence[DeviceCache]) -> list[ForwardResult]:
        """Run one pass for requests of these sizes. Raises HostSyncInCapture."""
        drawing, told = self._drawings.of(feeds), [lying.synced_length for its in caches for lying in its.layers]
        under_way, self._under_way = self._under_way, None
        if under_way is None or not under_way.serves(feeds, drawing, told):
            under_way = None
            for rows, feed in zip(self._of_host, feeds, strict=True):
                rows.fill(feed)
            self._graphs.send(self._here, self._there)
            self._pass()
        if drawing is None:
            return self._drawn_apart(feeds, caches)
        here, wait = drawing.read(self._graphs) if under_way is None else (under_way.here, under_way.wait)
        if drawing.go_on is None or not all(map(can_run_ahead, feeds)):
            wait()
            return self._made(feeds, caches, self._backs(feeds, drawing, here))
        drawing.go_on()
        for its in caches:
            its.ran(1)
        self._pass()
        ahead = drawing.read(self._graphs)
        wait()
        backs = self._backs(feeds, drawing, here)
        next_rows = [(back.ids[0], at + 1, seed) for back, (_, at, seed) in zip(backs, map(first, feeds), strict=True)]
        self._under_way = PendingPass(drawing, *ahead, next_rows, told)
        return self._made(feeds, caches, backs, is_stored=True)

    def _drawn_apart(self, feeds: Sequence[ForwardRequest], caches: Sequence[DeviceCache]) -> list[ForwardResult]:
        """Sample with operations that are launched one at a time."""
        each = zip(feeds, self._logits, strict=True)
        backs = [Readback(feed, logits[: feed.rows.n_rows]) for feed, logits in each]
        fetch(backs)
        return self._made(feeds, caches, backs)

    def _backs(self, feeds: Sequence[ForwardRequest], drawing: DeviceSampling, here: Tensor) -> list[Readback]:
        return drawing.backs(feeds, [len(rows.ids) for rows in self._rows], self._logits, here)

    def _made(
        self,
        feeds: Sequence[ForwardRequest],
        caches: Sequence[DeviceCache],
        backs: Sequence[Readback],
        is_stored: bool = False,
    ) -> list[ForwardResult]:
        made = []
        for i, (feed, back) in enumerate(zip(feeds, backs, strict=True)):
            # otherwise the buffer has the logits of the next pass
            logits = self._none if is_stored else self._logits[i][: feed.rows.n_rows]
            queries = [q[:, : len(feed.record_queries)] for q in self._queries[i]] if feed.record_queries else []
            keep = partial(self._kept, i, feed, caches[i], is_stored)
            shown = (
                self._shown[i][: feed.rows.n_rows] if feed.record_hidden_states and self._shown is not None else None
            )
            made.append(ForwardResult(logits, back.drawn, back.hook_output, {}, queries, shown, keep))
        return made

    def _kept(self, i: int, feed: ForwardRequest, cache: DeviceCache, is_stored: bool, path: Sequence[int]) -> None:
        """Commit these rows."""
        if not is_stored:
            here, there = self._of_host[i], self._rows[i]
            here.kept.numpy()[: len(path)], here.count.numpy()[0] = path, len(path)
            self._graphs.send(here.accepted, there.accepted)
            cache.ran(len(path))
            self._keep[i]()
        cache.grew(len(path), feed.rows.pos[path[0]])

    def _through(self, lm: LM, passes: Sequence[CapturedForward]) -> tuple[Tensor, Tensor | None]:
        """Return the logits [N, V] of all rows, and the input of the output layer if requested."""
        ids, pos = (torch.cat(of).long() for of in zip(*((rows.ids, rows.pos) for rows in self._rows), strict=True))
        way = passes[0] if len(passes) == 1 else BatchedPass(passes)
        return call(lm.model, ids, pos, device=lm.device, its_pass=way, trial=way.trial), way.hidden_states


def _in_rows(t: Tensor) -> list[float]:
    """Return the strides of heads and rows of t [K, N, D] in units of rows, because keys and values may differ in
    size."""
    return [stride / t.shape[2] for stride in t.stride()[:2]]
