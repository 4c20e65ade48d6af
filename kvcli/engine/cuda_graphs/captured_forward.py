"""The forward pass of one sequence's rows as it is captured, with all its inputs on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvcli.engine.forward import SequencePass
from kvcli.engine.forward_request import NewKV
from kvcli.engine.hf.cache_shim import CacheShim
from kvcli.engine.hf.layer_gates import StopForward
from kvcli.kernels.attend_captured import attend_captured

if TYPE_CHECKING:
    from kvcli.engine.cuda_graphs.pass_inputs import CapturedPart, PassInputs
    from kvcli.kv.slots import AttentionParams
    from kvcli.kv.tiers.device_tables import DeviceCache


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


def _in_rows(t: Tensor) -> list[float]:
    """Return the strides of heads and rows of t [K, N, D] in units of rows, because keys and values may differ in
    size."""
    return [stride / t.shape[2] for stride in t.stride()[:2]]
