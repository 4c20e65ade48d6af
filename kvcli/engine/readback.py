"""Reading back results of a forward pass: sampled tokens, and numbers that a drafter requested.

A GPU is read once, for all rows of all sequences, because each further read would empty its queue. On a CPU, sampling
a row takes as long in any batch, so a row is sampled when it is needed; most draft tokens are never reached.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.resources import one_pool
from kvcli.engine.sequence.sampler import STUCK
from kvcli.errors import BadInput, BadModel


class Readback:
    """The results of one sequence, from the logits [len(want), V] of its request."""

    def __init__(self, request: ForwardRequest, logits: Tensor, has_pool: bool = False) -> None:
        """`has_pool`: the native kernels of the model have a thread pool (resources.py)."""
        # Apple's GPU has no float64, in which noise is made and probabilities are summed
        self._request, self._logits = request, logits.cpu() if logits.device.type == "mps" else logits
        self._has_pool = has_pool
        self.ids: list[int] = []  # sampled ids of all tree rows, or empty
        self._hook_output: dict[int, list[float]] = {}  # hook output of wanted rows, as far as computed

    def drawn(self, row: int) -> int:
        """Return the token sampled after a tree row.

        Raises BadModel if its logits are NaN or infinite, BadInput if a constraint allows no token.
        """
        token = self.ids[row] if self.ids else int(self._draw(range(row, row + 1))[0])
        pos = self._request.rows.pos
        if token == STUCK:
            raise BadInput(
                "the answer cannot continue: its schema or grammar allows no token here",
                code="nothing_allowed",
                lines=[f"after position {pos[row]:,}: no token fits, or the grammar is too ambiguous"],
                try_=["a simpler schema or grammar"],
            )
        if token < 0:
            raise BadModel(
                "the model's output is not a number",
                code="bad_logits",
                lines=[f"logits after position {pos[row]:,} hold NaN or infinity"],
                try_=["--set load.dtype=fp32", "download the model again: its weights may be damaged"],
            )
        return token

    def hook_output(self, index: int) -> list[float]:
        """Return the hook output for the logits of want[index]."""
        if index not in self._hook_output:
            tree = self._request.rows.tree  # the drafter needs all lookahead rows or none: they are computed together
            which = slice(index, index + 1) if index < tree else slice(tree, None)
            self._hook_output.update(enumerate(self._run_hook(which).tolist(), start=which.start))
        return self._hook_output[index]

    def numbers(self) -> Tensor:
        """Return all results as one row of float64, which represents ids exactly."""
        parts = [torch.empty(0, dtype=torch.float64, device=self._logits.device)]
        if self._request.draw is not None:
            parts.append(self._draw(range(self._request.rows.tree)).double())
        if self._request.logits_hook is not None:
            parts.append(self._run_hook(slice(None)).double().flatten())
        return torch.cat(parts)

    def fill(self, numbers: list[float]) -> None:
        """Set the results from that row, on the host."""
        n = self._request.rows.tree if self._request.draw is not None else 0
        self.ids, rest = [int(i) for i in numbers[:n]], numbers[n:]
        wide = len(rest) // max(1, len(self._request.want))
        self._hook_output = {i: rest[i * wide : (i + 1) * wide] for i in range(len(self._request.want) if wide else 0)}

    def _draw(self, which: range) -> Tensor:
        assert self._request.draw is not None, "tokens are sampled for a request without a sampler"
        with one_pool(self._has_pool):  # the next step waits for this
            return self._request.draw.behind(self._request.rows, which, self._logits)

    def _run_hook(self, which: slice) -> Tensor:
        assert self._request.logits_hook is not None, "hook output is read of a request without a logits hook"
        with one_pool(self._has_pool):
            return self._request.logits_hook(self._logits[which])


def fetch(readbacks: Sequence[Readback]) -> None:
    """Read the results of all sequences, with one wait for the device."""
    numbers = [readback.numbers() for readback in readbacks]
    rest: list[float] = torch.cat(numbers).tolist()
    for readback, of in zip(readbacks, numbers, strict=True):
        readback.fill(rest[: of.shape[0]])
        rest = rest[of.shape[0] :]
