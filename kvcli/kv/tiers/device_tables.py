"""Tables in device memory by which captured passes address the slots of a KV cache, valid until slots move.

Lengths and positions are stored on the device and on the host. Slots stored by a captured pass update both; slots
stored in any other way are uploaded to the tables before the next captured pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvcli.kernels.attend_invariant.tables import Table, uploaded
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.tiers.draft_buffers import DraftBuffers

AHEAD = 4  # least steps by which a layer grows for captured passes, if that many slots can follow
MOST_ROWS = 64  # most rows of a captured pass; capacity for them follows the stored slots


def grow_size(length: int, rows: int, more: int, step: int) -> int:
    """Return the capacity in slots that a layer of `length` slots adds when it has none for `rows`.

    The capacity doubles, because each move captures the passes again, but not beyond the `more` slots that can follow.
    """
    return max(rows, min(more + MOST_ROWS, max(AHEAD * step, length)))


def stays(length: int, cap: int, step: int) -> bool:
    """True if `length` slots may stay in a captured buffer of capacity `cap` without freeing memory."""
    return 0 < length <= cap <= length + MOST_ROWS + step + max(AHEAD * step, length)


@dataclass(slots=True, eq=False, weakref_slot=True)
class DeviceLayer:
    """Device tables of the slots of one layer, valid until the slots move."""

    table: Table
    room: int  # capacity of the longest head, in slots
    lengths: list[int]  # by head, as on the device
    synced_length: int = 0  # count of uploads to the tables, for changes not made by a captured pass

    @staticmethod
    def of(
        k: Tensor, v: Tensor, pos: Tensor, starts: Sequence[int], pos_starts: Sequence[int], room: int
    ) -> DeviceLayer:
        """Build the tables of k [T, D], v [T, E] and pos [P] on the device."""
        start, pos_start, length = uploaded([starts, pos_starts, [0] * len(starts)], k.device)
        return DeviceLayer(Table(k, v, pos, start, length, pos_start), room, [0] * len(starts))

    def tell(self, lengths: Sequence[int]) -> None:
        """Upload the number of slots of each head if changed."""
        if self.lengths != lengths:
            self.synced_length += 1
            self.table.length.copy_(uploaded([lengths], self.table.length.device)[0])
            self.lengths = list(lengths)  # after the copy, which may run out of memory


class LowerLayer(Protocol):
    """Device tables of the slots of one layer in a tier below the top, which captured passes only read."""

    @property
    def synced_length(self) -> int:
        """Count of uploads to the tables, after changes of the tier."""

    def attend(
        self, q: Tensor, pos: Sequence[int] | Tensor, scale: float, *, softcap: float, window: int | None
    ) -> PartialAttention:
        """Return partial attention of q [H, N, D] at positions pos [N], in float32. With `pos` int32 on the device, it
        can be captured: shapes depend on the capacity of the tables alone."""


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """Device tables of a KV cache, valid until the next call of `device_tables`; or the reason why there are none."""

    layers: Sequence[DeviceLayer] = ()  # by layer; a layer that reads the slots of another layer has its tables
    owners: Sequence[int] = ()  # layers that store
    # counts n slots that the device stored at positions from `start` on
    grew: Callable[[int, int], None] = lambda n, start: None
    why_not: str = ""  # reason why a captured pass cannot read the cache
    # by layer: its slots in lower tiers, the lowest first; attention to them is merged with that to the top, in this
    # order. () = there is no lower tier
    below: Sequence[Sequence[LowerLayer]] = ()
    tree: DraftBuffers | None = None  # draft tree that the rows of the pass belong to
    tree_pos: Sequence[int] = ()  # positions of its rows, those of the pass last
    # by row of the pass, the rows of the tree that it attends to, in order; None = those that the request says
    sees: Sequence[Sequence[int]] | None = None
    wider: int = 0  # positions by which windows are wider

    def tables(self) -> Iterator[DeviceLayer | LowerLayer]:
        """Yield the tables of all layers; a captured pass is valid as long as these objects exist."""
        yield from self.layers
        for lower in self.below:
            yield from lower
