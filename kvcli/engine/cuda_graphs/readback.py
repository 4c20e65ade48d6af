"""What the host learns of a pass: the tokens that were drawn, and numbers that a drafter asked for.

A device that is not the host's is asked once, for all rows of all texts: each question more would empty its queue. On
a CPU, where a draw takes as long for each row as for one, a row is asked for when somebody wants it, since most guesses
are not reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvcli.engine.sequence.sampler import STUCK
from kvcli.engine.threads import one_pool
from kvcli.errors import BadInput, BadModel

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import ForwardRequest


class Readback:
    """Of one text, by the logits [len(want), V] of its feed."""

    def __init__(self, feed: ForwardRequest, logits: Tensor, has_pool: bool = False) -> None:
        """`has_pool`: of the model that made them (threads.py)."""
        # Apple's GPU has no float64, in which noise is made and chances are summed
        self._feed, self._logits = feed, logits.cpu() if logits.device.type == "mps" else logits
        self._has_pool = has_pool
        self.ids: list[int] = []  # of all tree rows as they were drawn, or none yet
        self._hook_output: dict[int, list[float]] = {}  # of wanted rows, so far

    def drawn(self, row: int) -> int:
        """The token behind a tree row.

        Raises BadModel where its logits are no numbers, BadInput where a constraint allows nothing.
        """
        token = self.ids[row] if self.ids else int(self._draw(range(row, row + 1))[0])
        if token == STUCK:
            raise BadInput(
                "the answer cannot go on: its schema or grammar allows no token here",
                code="nothing_allowed",
                lines=[f"after position {self._feed.rows.pos[row]:,}: no token fits, or too many rules could be meant"],
                try_=["a simpler schema or grammar"],
            )
        if token < 0:
            raise BadModel(
                "the model's output is not a number",
                code="bad_logits",
                lines=[f"logits after position {self._feed.rows.pos[row]:,} hold NaN or infinity"],
                try_=["--set load.dtype=fp32", "download the model again: its weights may be damaged"],
            )
        return token

    def hook_output(self, index: int) -> list[float]:
        """The hook output for the logits of want[index]."""
        if index not in self._hook_output:
            tree = self._feed.rows.tree  # behind which who asks for one asks for all
            which = slice(index, index + 1) if index < tree else slice(tree, None)
            self._hook_output.update(enumerate(self._run_hook(which).tolist(), start=which.start))
        return self._hook_output[index]

    def numbers(self) -> Tensor:
        """All of it in one row of float64, which holds ids exactly."""
        parts = [torch.empty(0, dtype=torch.float64, device=self._logits.device)]
        if self._feed.draw is not None:
            parts.append(self._draw(range(self._feed.rows.tree)).double())
        if self._feed.logits_hook is not None:
            parts.append(self._run_hook(slice(None)).double().flatten())
        return torch.cat(parts)

    def fill(self, numbers: list[float]) -> None:
        """The same, on the host."""
        n = self._feed.rows.tree if self._feed.draw is not None else 0
        self.ids, rest = [int(i) for i in numbers[:n]], numbers[n:]
        wide = len(rest) // max(1, len(self._feed.want))
        self._hook_output = {i: rest[i * wide : (i + 1) * wide] for i in range(len(self._feed.want) if wide else 0)}

    def _draw(self, which: range) -> Tensor:
        assert self._feed.draw is not None, "nothing was to be drawn"
        with one_pool(self._has_pool):  # the next step waits for it
            return self._feed.draw.behind(self._feed.rows, which, self._logits)

    def _run_hook(self, which: slice) -> Tensor:
        assert self._feed.logits_hook is not None, "the request has no logits hook"
        with one_pool(self._has_pool):
            return self._feed.logits_hook(self._logits[which])


def fetch(texts: Sequence[Readback]) -> None:
    """Wait for the device, once, for all of them."""
    numbers = [text.numbers() for text in texts]
    rest: list[float] = torch.cat(numbers).tolist()
    for text, of in zip(texts, numbers, strict=True):
        text.fill(rest[: of.shape[0]])
        rest = rest[of.shape[0] :]
