"""Sampling in a captured pass: on the device, by operations captured once for each set of sampler settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.cuda_graphs.capture import CopiesInFlight, CudaGraphs, captured
from kvcli.engine.cuda_graphs.pass_inputs import CapturedPart, PassInputs
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.readback import Readback

if TYPE_CHECKING:
    from kvcli.engine.forward_request import LogitsHook
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.kernels.attend_captured import Storing


@dataclass(slots=True)
class DeviceSampling:
    """Captured sampling, and the captured step that makes the sampled token the next input."""

    # float64, which represents ids exactly: per sequence sampled ids, hook output, and the number of stored rows
    numbers: Tensor
    start: Callable[[], None]
    results: Sequence[tuple[Tensor, Tensor]]  # by sequence, as views: ids; hook output [n, m] of rows with logits
    stores: Sequence[bool]  # by sequence: it commits the accepted rows
    go_on: Callable[[], None] | None = None  # commits the row that was run and makes the sampled token the next row
    free: list[Tensor] = field(default_factory=list)  # buffers on the host that no copy writes

    def read(self, graphs: CudaGraphs, copies: CopiesInFlight) -> Callable[[], list[float]]:
        """Sample and start the copy to the host. Return the function that waits for it and returns the numbers."""
        self.start()
        here = self.free.pop() if self.free else graphs.host(len(self.numbers), self.numbers.dtype)
        free, found = self.free, list[float]()

        def finished() -> None:
            found.extend(here.tolist())
            free.append(here)

        finish = copies.add(finished, graphs.fetch(self.numbers, here))
        return lambda: finish() or found

    def backs(
        self, parts: Sequence[CapturedPart], logits: Sequence[Tensor], numbers: list[float]
    ) -> tuple[list[Readback], list[int]]:
        """Split the numbers into the results of each sequence, and how many of its rows the device has stored."""
        backs, counts = list[Readback](), []
        for part, of, (ids, hook) in zip(parts, logits, self.results, strict=True):
            n, n_ids, n_hook, wide = len(part.request.want), len(ids), hook.numel(), hook.shape[1]
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
        self._numbers: dict[Hashable, Tensor] = {}  # by sampler settings, made before the capture

    def of(self, requests: Sequence[ForwardRequest]) -> DeviceSampling | None:
        """Return the sampling of these requests; None if it depends on more than the pass."""
        draws = [request.draw for request in requests if request.draw is not None]
        if any(draw.constraint is not None or draw.sampler.penalties or draw.sampler.logit_bias for draw in draws):
            return None
        samplers = [None if each.draw is None else replace(each.draw.sampler, seed=0) for each in requests]
        how = tuple((each, request.logits_hook) for each, request in zip(samplers, requests, strict=True))
        if (drawing := self._made.get(how)) is None:
            self._one.zero_()
            (numbers, results, stores), start = captured(self._graphs, partial(self._draw, how))
            self._one.fill_(1)
            self._made[how] = drawing = DeviceSampling(numbers, start, results, stores)
        if drawing.go_on is None and not any(drawing.stores) and all(map(can_run_ahead, requests)):
            self._one.zero_()
            drawing.go_on = captured(self._graphs, partial(self._feed_back, drawing))[1]
            self._one.fill_(1)
        return drawing

    def _draw(
        self, how: tuple[tuple[Sampler | None, LogitsHook | None], ...]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], list[bool]]:
        parts, stored = list[Tensor](), list[bool]()
        for rows, logits, store, of in zip(self._rows, self._logits, self._stores, how, strict=True):
            (sampler, hook), count = of, self._one * 0
            ids = count[:0] if sampler is None else sampler.on_device(logits, rows.wanted_pos.long(), seed=rows.seed)
            found = logits[:, :0] if hook is None else hook(logits)
            stored.append(sampler is not None and store is not None and rows.has_draft)
            if store is not None and stored[-1]:
                path, n = rows.accepted_path(ids)
                store(path, count := n * self._one, rows.all_pos)
            parts += [ids, found, count]
        # in no memory of captures, so that what is captured elsewhere may run before they are read
        flat = torch.cat([part.double().flatten() for part in parts], out=self._numbers.get(how))
        self._numbers[how], views = flat, torch.split(flat, [part.numel() for part in parts])
        shaped = [view.view(part.shape) for view, part in zip(views, parts, strict=True)]
        return flat, [*zip(shaped[::3], shaped[1::3], strict=True)], stored

    def _feed_back(self, drawing: DeviceSampling) -> None:
        for rows, store, (ids, _) in zip(self._rows, self._stores, drawing.results, strict=True):
            assert store is not None
            store(self._first, self._one, rows.pos)
            token = ids[:1].clamp(min=0)  # if sampling failed, any valid id
            rows.ids.copy_(token.expand_as(rows.ids))
            rows.pos.add_(1)


@dataclass(frozen=True, slots=True)
class PendingPass:
    """A pass that was launched before its request."""

    drawing: DeviceSampling
    read: Callable[[], list[float]]  # waits for its numbers and returns them
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
