"""Sampling in a captured pass: on the device, by operations captured once for each set of sampler settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.cuda_graphs.capture import captured
from kvcli.engine.cuda_graphs.readback import Readback

if TYPE_CHECKING:
    from kvcli.engine.cuda_graphs.capture import Graphs
    from kvcli.engine.cuda_graphs.captured_pass import PassInputs
    from kvcli.engine.forward_request import ForwardRequest, LogitsHook
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.kernels.attend_captured import Storing


@dataclass(slots=True)
class DeviceSampling:
    """Captured sampling, and the captured step that makes the sampled token the next input."""

    numbers: Tensor  # float64, which represents ids exactly: per sequence the sampled ids, then the hook output
    start: Callable[[], None]
    here: list[Tensor]  # on the host, alternating: one is read while the other is written
    wide: Sequence[int]  # by sequence: numbers of hook output per row
    go_on: Callable[[], None] | None = None  # commits the row that was run and makes the sampled token the next row

    def read(self, graphs: Graphs) -> tuple[Tensor, Callable[[], None]]:
        """Sample and start the copy to the host. Return the host buffer and the function that waits for it."""
        self.start()
        self.here.reverse()
        return self.here[0], graphs.fetch(self.numbers, self.here[0])

    def backs(
        self, feeds: Sequence[ForwardRequest], sizes: Sequence[int], logits: Sequence[Tensor], here: Tensor
    ) -> list[Readback]:
        """Split the numbers into the results of each sequence, whose rows in the captured pass are `sizes`."""
        numbers: list[float] = here.tolist()
        backs = []
        for feed, size, of, wide in zip(feeds, sizes, logits, self.wide, strict=True):
            n, back = feed.rows.n_rows, Readback(feed, of)
            back.fill([*numbers[:n], *numbers[size : size + n * wide]])
            numbers = numbers[size * (1 + wide) :]
            backs.append(back)
        return backs


class DeviceSamplers:
    """The captured samplers of one captured pass."""

    def __init__(
        self, graphs: Graphs, rows: Sequence[PassInputs], logits: Sequence[Tensor], stores: Sequence[Storing]
    ) -> None:
        """`rows`, `logits`, `stores`: per sequence, rows on the device, their logits, a function that commits rows."""
        self._graphs, self._rows, self._logits, self._stores = graphs, rows, logits, stores
        # index of the first row, and the number of rows to commit: 0 during capture
        self._first, self._one = (torch.zeros(1, dtype=torch.int32, device=logits[0].device) for _ in range(2))
        self._made: dict[tuple[Hashable, ...], DeviceSampling] = {}

    def of(self, feeds: Sequence[ForwardRequest]) -> DeviceSampling | None:
        """Return the sampling of these requests; None if it depends on more than the pass."""
        draws = [feed.draw for feed in feeds if feed.draw is not None]
        if any(draw.constraint is not None or draw.sampler.needs_text for draw in draws):
            return None
        how = tuple((replace(draw.sampler, seed=0), feed.logits_hook) for draw, feed in zip(draws, feeds, strict=True))
        if (drawing := self._made.get(how)) is None:
            (numbers, wide), start = captured(self._graphs, partial(self._draw, how))
            here = [self._graphs.host(len(numbers), numbers.dtype) for _ in range(2)]
            self._made[how] = drawing = DeviceSampling(numbers, start, here, wide)
        if drawing.go_on is None and all(map(can_run_ahead, feeds)):
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
    told: Sequence[int]  # lengths at the time of the launch

    def serves(self, feeds: Sequence[ForwardRequest], drawing: DeviceSampling | None, told: Sequence[int]) -> bool:
        """True if this is the pass of these requests, and only the device has changed their KV caches since."""
        return drawing is self.drawing and [first(feed) for feed in feeds] == self.rows and told == self.told


def can_run_ahead(feed: ForwardRequest) -> bool:
    """True if the sampled token is the only row of the next pass, and no other output is requested."""
    return (
        bool(feed.rows.ahead) and not feed.record_queries and not feed.record_hidden_states and feed.logits_hook is None
    )


def first(feed: ForwardRequest) -> tuple[int, int, int]:
    """Return id, position and seed of the first row."""
    assert feed.draw is not None
    return feed.rows.ids[0], feed.rows.pos[0], feed.draw.sampler.seed
