"""Captured passes: forward passes of a fixed shape that a GPU captures once and replays, with at most one wait of the
host in each.

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
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from kvcli.engine.cuda_graphs.capture import CopiesInFlight, CudaGraphs, HostSyncInCapture
from kvcli.engine.cuda_graphs.captured_pass import CapturedPass
from kvcli.engine.cuda_graphs.pass_inputs import CapturedPart, PassShape
from kvcli.engine.forward import check_chain
from kvcli.engine.forward_request import ForwardRequest, ForwardResult
from kvcli.engine.resources import FRAMES
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

MOST = 24  # most captured passes kept per model

log = logging.getLogger("kvcli.engine")


class CapturedPasses:
    """The captured passes of one model. Other passes launch one operation at a time; `eager` counts them by reason,
    except prompts."""

    def __init__(self, graphs: CudaGraphs, sizes: Sequence[int] = FRAMES) -> None:
        """`sizes`: row counts of captured passes, rising."""
        self.graphs, self._sizes = graphs, sizes
        self._passes: dict[tuple[object, ...], CapturedPass] = {}  # the most recently used last
        self._copies = CopiesInFlight()
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
            self._passes = {key: kept for key, kept in self._passes.items() if kept.is_alive}

    def _run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        if self.why:
            raise NotCaptured(self.why)
        parts, made = [self._part(request) for request in requests], list[ForwardResult]()
        most = requests[0].lm.max_invariant_rows or math.inf
        while parts:  # one pass, unless padding makes more rows than are batch invariant
            n = max(1, sum(end <= most for end in accumulate(part.shape.rows for part in parts)))
            made += self._pass(parts[:n]).run(parts[:n])
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
        recurrent, states = request.lm.recurrent_layers, None
        if recurrent and cache.tree is not None:
            raise NotCaptured("drafted rows follow recurrent states of an earlier pass")
        if why := cache.why_not or (view.why_not if glances else "") or recurrent.why_not_captured:
            raise NotCaptured(why)
        if recurrent:
            states = check_chain(request).on_device()
        wanted = None if list(want) == list(range(n)) else self._size(len(want)) if want else 0
        width = 0 if request.hidden is None else request.hidden.shape[1]
        earlier = 0 if cache.tree is None else cache.tree.room
        gives = bool(request.record_queries), request.record_hidden_states
        paths = 1 if rows.tree_mask is None else size
        shape = PassShape(size, paths, earlier, wanted, glances, *gives, width, states is not None)
        return CapturedPart(request, shape, (cache, view), states)

    def _size(self, n: int) -> int:
        return next(size for size in self._sizes if size >= n)

    def _pass(self, parts: Sequence[CapturedPart]) -> CapturedPass:
        self.release()  # drop captured passes over the former memory of these caches
        layers = parts[0].request.layers
        ends = None if layers is None else (layers.start, layers.stop)  # empty ranges all compare equal
        key = (ends, *(part.shape for part in parts), *(id(lying) for part in parts for lying in part.lying))
        if (found := self._passes.pop(key, None)) is None:
            while len(self._passes) >= MOST:
                del self._passes[next(iter(self._passes))]
            found = CapturedPass(parts, self.graphs, self._copies, self._over.append)
        self._passes[key] = found
        return found


def captured_passes(lm: LM) -> CapturedPasses | None:
    """Return the captured passes of a model; None if they are off or its device does not support them."""
    return lm.remembers.get(CapturedPasses)


class NotCaptured(Exception):
    """Raised with a reason if a pass must launch one operation at a time."""
