"""A past as a device finds it by itself, pass after pass, until something in it moves: tables in its own memory.

Lengths and positions are kept there beside the host's. What a recorded pass stores changes both; what is stored in any
other way is told to the device before its next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels.attend_fixed import Table

AHEAD = 4  # steps that a layer grows by for recorded passes: each time that it moves they are recorded again


@dataclass(slots=True, eq=False, weakref_slot=True)
class Lying:
    """One layer's slots, until they lie elsewhere."""

    table: Table
    room: int  # slots, of the longest head
    lengths: list[int]  # by head, as the device has them
    known: int = 0  # slots whose positions it has, where it keeps a copy of them
    told: int = 0  # how often it had to be told anything that it had not done itself

    @staticmethod
    def of(k: Tensor, v: Tensor, starts: Sequence[int], pos: Tensor, pos_starts: Sequence[int], room: int) -> Lying:
        """k [T, D], v [T, E] and pos [P] on the device; nothing of them is known to be filled."""
        start, pos_start, length = (torch.zeros(len(starts), dtype=torch.int32, device=k.device) for _ in range(3))
        send(start, starts)
        send(pos_start, pos_starts)
        return Lying(Table(k, v, pos, start, length, pos_start), room, [0] * len(starts))

    def tell(self, lengths: Sequence[int]) -> None:
        """How many slots each head has."""
        if self.lengths != lengths:
            self.lengths = list(lengths)
            self.told += 1
            send(self.table.length, self.lengths)

    def place(self, at: np.ndarray) -> None:
        """Positions [S] of all slots, of which it may know some."""
        if self.known < len(at):
            send(self.table.pos[self.known : len(at)], at[self.known :])
            self.known = len(at)
            self.told += 1


@dataclass(frozen=True, slots=True)
class Fixed:
    """A store, of use until it is asked for the next time."""

    layers: Sequence[Lying]  # by layer; one that shares the slots of another has the other's
    owners: Sequence[int]  # layers that store
    grew: Callable[[int, int], None]  # so many slots more, at positions from there on, were stored by the device

    def ran(self, n: int) -> None:
        """The device is about to store n slots."""
        for layer in self.owners:
            lying = self.layers[layer]
            lying.lengths = [length + n for length in lying.lengths]


def send(to: Tensor, numbers: Sequence[int] | np.ndarray) -> None:
    """Numbers of the host to a device, which nobody waits for."""
    there = torch.from_numpy(np.array(numbers, dtype=np.int32))
    to.copy_(there.pin_memory() if to.is_cuda else there, non_blocking=True)
