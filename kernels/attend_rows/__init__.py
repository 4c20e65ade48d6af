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

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Stored slots of one layer, in the order in which rows read them; heads may lie anywhere and differ in length."""

    k: Tensor  # [T, D], contiguous: all heads' slots
    v: Tensor  # [T, E]
    pos: Tensor  # [T] or [P] int32 on the CPU: positions, read where a window hides some
    starts: Sequence[int]  # by KV head: its first slot in k and v
    lengths: Sequence[int]  # by KV head: slots from there on
    pos_starts: Sequence[int]  # by KV head: its first position
