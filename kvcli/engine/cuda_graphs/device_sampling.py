"""How a frame's texts draw their tokens: on the device, by operations that are recorded once for each way to draw."""

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
    """What the host reads of a pass, and how the device goes on by itself."""

    numbers: Tensor  # float64, which holds ids exactly: of each text the drawn ids, then what is hook_output
    start: Callable[[], None]
    here: list[Tensor]  # on the host, in turn: one is read while the other is written
    wide: Sequence[int]  # by text: numbers of hook output for a row
    go_on: Callable[[], None] | None = None  # stores the row that was run, and makes what was drawn the next one

    def read(self, graphs: Graphs) -> tuple[Tensor, Callable[[], None]]:
        """What is drawn on its way to the host, and how to wait for it."""
        self.start()
        self.here.reverse()
        return self.here[0], graphs.fetch(self.numbers, self.here[0])

    def backs(
        self, feeds: Sequence[ForwardRequest], sizes: Sequence[int], logits: Sequence[Tensor], here: Tensor
    ) -> list[Readback]:
        """What the host reads of each text, whose rows in the frame are so many, from the numbers of all."""
        numbers: list[float] = here.tolist()
        backs = []
        for feed, size, of, wide in zip(feeds, sizes, logits, self.wide, strict=True):
            n, back = feed.rows.n_rows, Readback(feed, of)
            back.fill([*numbers[:n], *numbers[size : size + n * wide]])
            numbers = numbers[size * (1 + wide) :]
            backs.append(back)
        return backs


class DeviceSamplers:
    """Of one frame."""

    def __init__(
        self, graphs: Graphs, rows: Sequence[PassInputs], logits: Sequence[Tensor], stores: Sequence[Storing]
    ) -> None:
        """By text: its rows on the device, their logits, and what makes rows of it slots."""
        self._graphs, self._rows, self._logits, self._stores = graphs, rows, logits, stores
        # the first row and its number, which is none while that is recorded
        self._first, self._one = (torch.zeros(1, dtype=torch.int32, device=logits[0].device) for _ in range(2))
        self._made: dict[tuple[Hashable, ...], DeviceSampling] = {}

    def of(self, feeds: Sequence[ForwardRequest]) -> DeviceSampling | None:
        """How their tokens are drawn; None where more than the pass decides."""
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
        """The numbers of a drawing, and how many of hook output each row of a text."""
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
            rows.ids.copy_(numbers[at : at + 1].clamp(min=0).expand_as(rows.ids))  # where nothing could be drawn: any
            rows.pos.add_(1)
            at += len(rows.ids)


@dataclass(frozen=True, slots=True)
class PendingPass:
    """A pass that nobody has asked for yet."""

    drawing: DeviceSampling
    here: Tensor
    wait: Callable[[], None]
    rows: Sequence[tuple[int, int, int]]  # of each text: id, position, seed
    told: Sequence[int]  # as it was when this began

    def serves(self, feeds: Sequence[ForwardRequest], drawing: DeviceSampling | None, told: Sequence[int]) -> bool:
        """Whether it is the pass of these feeds, over pasts of which nobody but the device has changed anything."""
        return drawing is self.drawing and [first(feed) for feed in feeds] == self.rows and told == self.told


def can_run_ahead(feed: ForwardRequest) -> bool:
    """Whether the row that it draws is the next pass, of which nothing else is wanted."""
    return (
        bool(feed.rows.ahead) and not feed.record_queries and not feed.record_hidden_states and feed.logits_hook is None
    )


def first(feed: ForwardRequest) -> tuple[int, int, int]:
    """Of its first row: id, position, seed."""
    assert feed.draw is not None
    return feed.rows.ids[0], feed.rows.pos[0], feed.draw.sampler.seed
