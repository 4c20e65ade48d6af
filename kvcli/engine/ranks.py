"""Ranks: the processes that share one model by tensor parallelism, as torchrun starts them.

Every rank runs the same program over the same tokens, with its part of the weights and heads. The logits are the same
on all ranks. Anything else that a decision depends on differs: time, free memory, attention of a rank's own heads. It
is exchanged here, so that all ranks decide alike. `check` finds out if they did not, before their passes mix or wait
for each other for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from kvcli.errors import BadModel

T = TypeVar("T")
Scored = tuple[Tensor, Tensor]  # scores and positions of one layer's slots, [K, S] each


def n_ranks() -> int:
    """Return the number of processes that this one computes with; 1 without torchrun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join_ranks(local: int) -> int:
    """Join the processes that torchrun started and return how many there are. `local`: the number of this process's
    GPU."""
    if has_gpu := torch.cuda.is_available():
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    return n_ranks()


def from_first(value: T) -> T:
    """Return the value of rank 0. All ranks call it at the same point."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


class Ranks:
    """The processes of one model. Alone, without torchrun, nothing is exchanged."""

    def __init__(self) -> None:
        self.n = n_ranks()
        self.index = dist.get_rank() if self.n > 1 else 0
        # on the CPU: the numbers are the host's, and a GPU must not be waited for
        self._group = dist.new_group(backend="gloo") if self.n > 1 else None

    def exchange(self, what: str, number: float = 0.0) -> list[float]:
        """Return the number of each rank. Raises BadModel on all ranks if they do not exchange the same thing."""
        if self.n == 1:
            return [number]
        own = torch.tensor([crc32(what.encode()), number], dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self.n)]
        dist.all_gather(every, own, group=self._group)
        if any(one[0] != own[0] for one in every):
            raise BadModel(
                f"the {self.n} processes that share the model computed different things",
                code="ranks_differ",
                lines=[f"rank {self.index} was at: {what[:80]}", "a setting makes them decide by what each has alone"],
                try_=["-P exact", "one process, without torchrun"],
            )
        return [float(one[1]) for one in every]

    def clock(self) -> float:
        """Return the seconds of rank 0's clock, because drafters decide by the time that passes take."""
        return self.exchange("clock", time.perf_counter())[0]

    def check(self, module: object, args: object, given: dict[str, Any]) -> None:
        """Verify that all ranks run the same tokens at the same positions. A hook that runs before each pass."""
        asked = (given[key] for key in ("input_ids", "position_ids", "logits_to_keep") if key in given)
        self.exchange(f"pass {[each.tolist() for each in asked]}")

    def reduce(self, of: Tensor, over: str = "mean") -> Tensor:
        """Return the "mean" or "max" over ranks of a tensor of one shape, with the same bits on every rank."""
        return of if self.n == 1 else (torch.amax if over == "max" else torch.mean)(torch.stack(self._gather(of)), 0)

    def across_heads(self, share: Callable[..., Any], scored: Iterable[Scored], each: int, most: int) -> list[Tensor]:
        """Return the slots that this rank's heads keep, [K, S] by layer, when `share` divides the budget of all heads.

        Ranks hold consecutive KV heads. Those of others may store more slots: empty ones, with position -1, are added.
        """
        layers = list(scored)
        sizes = [max(map(int, self.exchange("slots", pos.shape[1]))) for _, pos in layers]
        whole = []
        for (score, pos), size in zip(layers, sizes, strict=True):
            more = (0, size - pos.shape[1])
            rows = (pad(score, more, value=-torch.inf), pad(pos, more, value=-1))
            whole.append((torch.cat(self._gather(rows[0])), torch.cat(self._gather(rows[1]))))
        kept = list(share(whole, each, most))
        return [mask.chunk(self.n)[self.index][:, : pos.shape[1]] for mask, (_, pos) in zip(kept, layers, strict=True)]

    def _gather(self, of: Tensor) -> list[Tensor]:
        """Return this tensor of each rank."""
        self.exchange(f"tensor {tuple(of.shape)} {of.dtype}")
        own = of.cpu().contiguous()
        every = [torch.empty_like(own) for _ in range(self.n)]
        dist.all_gather(every, own, group=self._group)
        return [one.to(of.device) for one in every]
