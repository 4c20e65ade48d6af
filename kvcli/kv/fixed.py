"""A past as a device finds it by itself, pass after pass, until something in it moves: tables in its own memory.

Lengths and positions are kept there beside the host's. What a recorded pass stores changes both; what is stored in any
other way is told to the device before its next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvcli.kernels.attend_rows.tables import Table, uploaded

AHEAD = 4  # steps that a layer grows by for recorded passes: each time that it moves they are recorded again


@dataclass(slots=True, eq=False, weakref_slot=True)
class Lying:
    """One layer's slots, until they lie elsewhere."""

    table: Table
    room: int  # slots, of the longest head
    lengths: list[int]  # by head, as the device has them
    told: int = 0  # how often it had to be told anything that it had not done itself

    @staticmethod
    def of(k: Tensor, v: Tensor, pos: Tensor, starts: Sequence[int], pos_starts: Sequence[int], room: int) -> Lying:
        """k [T, D], v [T, E] and pos [P] on the device."""
        start, pos_start, length = uploaded([starts, pos_starts, [0] * len(starts)], k.device)
        return Lying(Table(k, v, pos, start, length, pos_start), room, [0] * len(starts))

    def tell(self, lengths: Sequence[int], is_more: bool = False) -> None:
        """How many slots each head has. `is_more`: it is told something else as well."""
        self.told += is_more or self.lengths != lengths
        if self.lengths != lengths:
            self.table.length.copy_(uploaded([lengths], self.table.length.device)[0])
            self.lengths = list(lengths)  # behind it: memory for the copy may have run out


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
