"""A past as a device finds it by itself, pass after pass, until something in it moves: tables in its own memory.

Lengths and positions are kept there beside the host's. What a recorded pass stores changes both; what is stored in any
other way is told to the device before its next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvcli.kernels.attend_invariant.tables import Table, uploaded

AHEAD = 4  # steps by which a layer grows at least for recorded passes, if so much is to come
MOST_ROWS = 64  # of a recorded pass, for which there is room behind what is stored


def grow_size(length: int, rows: int, more: int, step: int) -> int:
    """Slots for which a layer that holds `length` makes room where it has none for `rows`.

    Each time that it moves passes are recorded again, so it doubles; but never beyond the `more` that may still come.
    """
    return max(rows, min(more + MOST_ROWS, max(AHEAD * step, length)))


def stays(length: int, cap: int, step: int) -> bool:
    """Whether so many slots may stay in a place for `cap`, where passes were recorded, and give no memory back."""
    return 0 < length <= cap <= length + MOST_ROWS + step + max(AHEAD * step, length)


@dataclass(slots=True, eq=False, weakref_slot=True)
class DeviceLayer:
    """One layer's slots, until they lie elsewhere."""

    table: Table
    room: int  # slots, of the longest head
    lengths: list[int]  # by head, as the device has them
    synced_length: int = 0  # how often it had to be told anything that it had not done itself

    @staticmethod
    def of(
        k: Tensor, v: Tensor, pos: Tensor, starts: Sequence[int], pos_starts: Sequence[int], room: int
    ) -> DeviceLayer:
        """k [T, D], v [T, E] and pos [P] on the device."""
        start, pos_start, length = uploaded([starts, pos_starts, [0] * len(starts)], k.device)
        return DeviceLayer(Table(k, v, pos, start, length, pos_start), room, [0] * len(starts))

    def tell(self, lengths: Sequence[int], is_more: bool = False) -> None:
        """How many slots each head has. `is_more`: it is told something else as well."""
        self.synced_length += is_more or self.lengths != lengths
        if self.lengths != lengths:
            self.table.length.copy_(uploaded([lengths], self.table.length.device)[0])
            self.lengths = list(lengths)  # behind it: memory for the copy may have run out


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """A store, of use until it is asked for the next time; or, where it needs the host, why."""

    layers: Sequence[DeviceLayer] = ()  # by layer; one that shares the slots of another has the other's
    owners: Sequence[int] = ()  # layers that store
    grew: Callable[[int, int], None] = lambda n, start: None  # n slots from there on were stored by the device
    why_not: str = ""  # a device cannot find it by itself

    def ran(self, n: int) -> None:
        """The device is about to store n slots."""
        for layer in self.owners:
            lying = self.layers[layer]
            lying.lengths = [length + n for length in lying.lengths]
