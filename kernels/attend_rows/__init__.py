"""Attention of a pass's rows over stored slots and each other, as one sequence a row.

What a row reads is a sequence: the stored slots in the order they lie, then its ancestors in this pass from the root
down, then itself. Which of them are stored already makes no difference: the sequence is cut into blocks of 64 and spans
of 4,096 by index, each block updates the state of its span in order (arXiv 2205.14135), spans meet in order at the end.
So the bits of a row depend on its sequence alone, not on who else is in the pass, and a token gives the same alone, in
a draft and in a prompt. A slot that a window hides is a masked slot in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.attend_fresh import attend_fresh
from kvcli.kernels.merge import Part


@dataclass(frozen=True, slots=True)
class Run:
    """Stored slots of one layer, in the order in which rows read them; heads may lie anywhere and differ in length."""

    k: Tensor  # [T, D], contiguous: all heads' slots
    v: Tensor  # [T, E]
    pos: Tensor  # [T] or [P] int32 on the CPU: positions, read where a window hides some
    starts: Sequence[int]  # by KV head: its first slot in k and v
    lengths: Sequence[int]  # by KV head: slots from there on
    pos_starts: Sequence[int]  # by KV head: its first position


@dataclass(frozen=True, slots=True)
class Own:
    """What a pass itself brings to a layer: rows read it behind what is stored."""

    k: Tensor  # [K, N, D]; the rows that ask are the last n of the N
    v: Tensor  # [K, N, E]
    pos: Sequence[int]  # N
    line: Tensor | None  # [n, N] bool on the CPU: a row's ancestors and itself; None = all up to itself, and n = N
    sees: Tensor | None  # the same on the device, less what a window hides
    sink: Tensor | None = None  # [H] learned logits that take mass and give nothing (gpt-oss)
    before: Sequence[Part] = ()  # what the rows saw of older slots

    def parts(self, q: Tensor, scale: float, softcap: float) -> list[Part]:
        """q [H, n, D] over these alone: where what is stored cannot be read in one sequence with them."""
        fresh = attend_fresh(q, self.k, self.v, scale, self.sees, softcap=softcap)
        if self.sink is None:
            return [*self.before, fresh]
        lse = self.sink.to(fresh.lse.dtype).unsqueeze(-1).expand_as(fresh.lse)
        return [*self.before, fresh, Part(torch.zeros_like(fresh.out), lse)]


def serves(q: Tensor, v: Tensor) -> bool:
    """Whether `attend_rows` can take these."""
    return False


def attend_rows(
    q: Tensor, run: Run | None, own: Own | None, pos: Sequence[int], scale: float, *, window: int | None, softcap: float
) -> Part:
    raise NotImplementedError
