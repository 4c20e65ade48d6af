"""One captured pass: its operations as they are captured and replayed, and the results of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from kvcli.engine.cuda_graphs.capture import CopiesInFlight, CudaGraphs, captured
from kvcli.engine.cuda_graphs.device_sampling import DeviceSamplers, DeviceSampling, PendingPass, can_run_ahead, first
from kvcli.engine.cuda_graphs.pass_inputs import NONE, CapturedPart, PassInputs
from kvcli.engine.forward import BatchedPass, SequencePass, run_layers, states_of
from kvcli.engine.forward_request import ForwardRequest, ForwardResult, NewKV
from kvcli.engine.hf.cache_shim import CacheShim
from kvcli.engine.hf.layer_gates import StopForward
from kvcli.engine.hf.model_settings import fixed_ropes
from kvcli.engine.hf.recurrent_layers import SequenceSlice
from kvcli.engine.readback import Readback, fetch
from kvcli.kernels.attend_captured import attend_captured, storing
from kvcli.kernels.attend_invariant.tables import uploaded
from kvcli.kv.recurrent_state import RecurrentStates, StateUpdate

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.kernels.attend_captured import Storing
    from kvcli.kv.slots import AttentionParams
    from kvcli.kv.tiers.device_tables import DeviceCache


class CapturedPass:
    """A captured pass over the rows of some sequences. It refers to their KV caches weakly."""

    def __init__(
        self, parts: Sequence[CapturedPart], graphs: CudaGraphs, copies: CopiesInFlight, over: Callable[[object], None]
    ) -> None:
        """`copies`: those of all passes of the model; `over` is called when memory that it reads moves or is freed.
        Raises HostSyncInCapture."""
        lm, shapes = parts[0].request.lm, [part.shape for part in parts]
        self._graphs = graphs = graphs.apart()  # other captured passes run between this one and the commit of its rows
        self._over = [ref(lying, over) for part in parts for lying in part.lying]
        ends = [0, *accumulate(shape.starts()[-1] for shape in shapes)]
        self._copies, self._ends, self._shapes = copies, ends, shapes
        self._free: list[tuple[Tensor, list[PassInputs]]] = []  # blocks of inputs on the host that no copy reads
        self._there = torch.zeros(ends[-1], dtype=torch.int32, device=lm.device)
        self._rows = self._inputs(self._there)
        here, inputs = self._block()
        for rows, part in zip(inputs, parts, strict=True):  # `count` is 0: no row is stored during capture
            rows.path_of.fill_(NONE)
            rows.first.fill_(part.first)  # earlier rows of a draft tree stay as they are
        graphs.send(here, self._there)
        self._hidden = [
            None if (x := p.request.hidden) is None else x.new_zeros(p.shape.rows, p.shape.width) for p in parts
        ]
        self._under_way: PendingPass | None = None
        self._none = torch.empty(0, lm.vocab, dtype=lm.dtype, device=lm.device)  # logits

        def work() -> tuple[Tensor, Tensor | None, list[CapturedForward]]:
            starts = accumulate((shape.rows for shape in shapes), initial=0)
            each = zip(parts, self._rows, self._hidden, starts, strict=False)
            passes = [CapturedForward(*one) for one in each]
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

    def _inputs(self, block: Tensor) -> list[PassInputs]:
        """Return the inputs of each sequence in a block."""
        each = zip(pairwise(self._ends), self._shapes, strict=True)
        return [PassInputs(block[a:b], shape) for (a, b), shape in each]

    def _block(self) -> tuple[Tensor, list[PassInputs]]:
        """Return a block on the host, and its inputs of each sequence, for a copy to the device that begins now."""
        if not self._free:
            here = self._graphs.host(self._ends[-1], torch.int32)
            self._free.append((here, self._inputs(here)))
        self._copies.add(partial(self._free.append, block := self._free.pop()))
        return block

    def _storing(self, part: CapturedPart, made: CapturedForward) -> Storing | None:
        """Return the function that commits rows; None if the host does, or nobody."""
        if part.request.layers is not None or not any(of.owners for of in part.reads):
            return None
        owners = [(of.layers[layer].table, made.new(layer)) for of in part.reads for layer in of.owners]
        tables, fresh = zip(*owners, strict=True)
        store, alive = storing(tables, fresh)
        self._alive += alive
        if (states := made.states) is None:
            return store

        def store_all(path: Tensor, count: Tensor, pos: Tensor) -> None:
            store(path, count, pos)
            states.advance_(count)

        return store_all

    @property
    def is_alive(self) -> bool:
        """True if all layers are still at the same addresses."""
        return all(lying() is not None for lying in self._over)

    def run(self, parts: Sequence[CapturedPart]) -> list[ForwardResult]:
        """Run one pass for requests of these sizes. Raises HostSyncInCapture."""
        requests = [part.request for part in parts]
        drawing = self._drawings.of(requests)
        uploads = [n for part in parts for n in part.uploads()]
        under_way, self._under_way = self._under_way, None
        if under_way is None or not under_way.serves(requests, drawing, uploads):
            under_way = None
            self._start(parts)
        if drawing is None:  # sampled by operations that are launched one at a time
            each = zip(parts, self._logits, strict=True)
            apart = [Readback(part.request, logits[: len(part.request.want)]) for part, logits in each]
            fetch(apart)
            self._copies.finished()
            return self._made(parts, lambda: apart, None, is_overwritten=False)
        known = [part.ran() if stores else None for part, stores in zip(parts, drawing.stores, strict=True)]
        read = drawing.read(self._graphs, self._copies) if under_way is None else under_way.read
        results = cache(lambda: drawing.backs(parts, self._logits, read()))
        go_on = drawing.go_on if all(map(can_run_ahead, requests)) else None
        if go_on is not None:
            go_on()
            for part in parts:
                part.ran()(1)
            self._pass()
            ahead, backs = drawing.read(self._graphs, self._copies), results()[0]
            rows = [(back.ids[0], at + 1, n) for back, (_, at, n) in zip(backs, map(first, requests), strict=True)]
            self._under_way = PendingPass(drawing, ahead, rows, uploads)
        elif any(request.draw is not None for request in requests):  # else the host waits when it reads a result
            for know, count in zip(known, results()[1], strict=True):
                if know is not None:
                    know(count)
        return self._made(parts, lambda: results()[0], drawing, is_overwritten=go_on is not None)

    def _start(self, parts: Sequence[CapturedPart]) -> None:
        here, inputs = self._block()
        for rows, hidden, part in zip(inputs, self._hidden, parts, strict=True):
            rows.fill(part)
            if hidden is not None and part.request.hidden is not None:
                hidden[: part.request.rows.n_rows].copy_(part.request.hidden)
        self._graphs.send(here, self._there)
        for there, part in zip(self._rows, parts, strict=True):
            if choices := part.request.rows.choices:
                end = part.request.rows.n_rows
                there.ids[end - len(choices) : end] = torch.stack(
                    [of.choices[i, rank] for of, i, rank in choices if of.choices is not None]
                )
        self._pass()

    def _made(
        self,
        parts: Sequence[CapturedPart],
        backs: Callable[[], Sequence[Readback]],
        drawing: DeviceSampling | None,
        *,
        is_overwritten: bool,
    ) -> list[ForwardResult]:
        made = []
        for i, part in enumerate(parts):
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
            is_stored = is_overwritten or (drawing is not None and drawing.stores[i])
            commits = partial(self._commit, i, part, is_stored) if self._keep[i] is not None else None
            fresh = {} if commits is not None or part.shape.earlier else self._fresh[i]
            new = {layer: NewKV(of.k[:, :n], of.v[:, :n]) for layer, of in fresh.items()}
            shown = states_of(part.shape.shows, self._layers, shown) if self._is_below or part.shape.shows else None
            drawn = partial(lambda i, row: backs()[i].drawn(row), i)
            output = partial(lambda i, index: backs()[i].hook_output(index), i)
            choices = None if drawing is None or not request.is_preparing else drawing.results[i][1].clone()
            made.append(ForwardResult(logits, drawn, output, new, queries, shown, commits, choices=choices))
        return made

    def _commit(self, i: int, part: CapturedPart, is_stored: bool, path: Sequence[int]) -> None:
        """Commit these rows."""
        if not is_stored and (keep := self._keep[i]) is not None:
            here, there = self._block()[1][i], self._rows[i]
            here.kept.numpy()[: len(path)], here.count.numpy()[0] = path, len(path)
            self._graphs.send(here.accepted, there.accepted)
            part.ran()(len(path))
            keep()
        pos = part.reads[0].tree_pos or part.request.rows.pos
        for of in part.reads:
            of.grew(len(path), pos[path[0]])
        if part.states is not None and part.request.states is not None:
            part.request.states.grew(len(path))

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
        if lm.recurrent_layers:
            way.cache_shim = lm.recurrent_layers.cache_shim([p.states for p in passes if p.states], way.cache_shim)
        self._layers = way.shows  # whose inputs are recorded
        return run_layers(lm, requests, way, ids, pos, want)


class CapturedForward(SequencePass):
    """Stand-in for `ForwardPass` (forward.py) during a capture: rows of one sequence, with inputs on the device."""

    def __init__(self, part: CapturedPart, rows: PassInputs, hidden: Tensor | None, start: int = 0) -> None:
        """`hidden` [N, E]: as in the request. `start`: number of rows of other sequences before these."""
        request, self._part, self._rows = part.request, part, rows
        self.layers = range(request.lm.n_layers) if request.layers is None else request.layers
        self.n_rows, self.hidden, self.shows, self.hidden_states = len(rows.ids), hidden, part.shape.shows, {}
        self.cache_shim = CacheShim(request.lm.latents)
        self._shapes, self._dtype = request.lm.shapes, request.cache.dtype
        self.fresh: dict[int, NewKV] = {}  # by layer
        self.queries: list[Tensor] = []  # per layer q [H, N, D]
        self.states: SequenceSlice | None = None  # rows of a model with recurrent layers
        if part.states is not None:
            update = StateUpdate(part.states.states, self.n_rows, are_written=False)
            at = slice(start, start + self.n_rows)
            self.states = SequenceSlice(RecurrentStates(), update, at, tape={}, is_captured=True)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        """Run attention in one layer, as in `ForwardPass` (forward.py)."""
        cast, (cache, view), is_last = k.to(self._dtype), self._part.reads, layer == self.last
        q, k, v = q.to(self._dtype), cast, cast if v is k else v.to(self._dtype)
        # one address table serves both, so their strides must match in units of rows, which may differ in size
        if any(a * v.shape[2] != b * k.shape[2] for a, b in zip(k.stride()[:2], v.stride()[:2], strict=True)):
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
