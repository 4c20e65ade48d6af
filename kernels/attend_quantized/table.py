"""Addresses of a layer's quantized heads, for a kernel that reads all heads in one launch.

The addresses are in a tensor on the device, so a captured pass reads heads that changed or moved since it was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.quantize_kv import Rounded

SIZES = (64, 128, 256)  # head sizes; must be powers of two
LEAST = 16  # fewest slots of a tile
ALIGNED = 16  # bytes
ROOM = 1024  # fewest slots that a table has room for


@dataclass(frozen=True, slots=True)
class PackedHead:
    """Slots of one KV head."""

    keys: Rounded  # keys of the first slots
    rest: Tensor  # [r, D] keys of the last slots, in full precision
    values: Rounded  # values of all slots, and of spare capacity in some layouts
    length: int  # slots

    @property
    def v_dim(self) -> int:
        """Size of a value."""
        codes, bits = self.values.codes, self.values.bits
        return codes.shape[0] if bits == 8 else codes.shape[1] if bits == 16 else codes.shape[1] * 8 // bits


@dataclass(slots=True, eq=False, weakref_slot=True)
class PackedTable:
    """Heads of a layer, all of one layout."""

    at: Tensor  # [K, 11] int64: addresses of keys, values and positions, then numbers of slots; see `table_of`
    heads: Sequence[PackedHead]  # `heads` and `pos` keep the addressed memory alive
    pos: Sequence[Tensor | None]
    k_bits: int
    v_bits: int
    group: int  # slots that share the scales of their keys
    width: int  # channels that share the scale of a value
    size: int  # numbers of a key
    dtype: torch.dtype  # of unquantized numbers
    room: int  # slots: no head may become longer
    has_holes: bool
    synced_length: int = 0  # number of changes after which the addresses were uploaded again

    @property
    def tile(self) -> int:
        """Slots of one product: the largest power of two that divides a group."""
        return min(32 if self.size > 128 else 64, self.group & -self.group)

    def update(self, heads: Sequence[PackedHead], pos: Sequence[Tensor | None], *, has_holes: bool) -> bool:
        """Upload the addresses of changed heads, which captured passes then read. Returns False, changing nothing, if
        they need another table: for more room, or because of holes."""
        longest = max(head.length for head in heads)
        if longest > self.room or has_holes != self.has_holes or _group(heads) != self.group:
            return False
        self.at.copy_(_rows(heads, pos, self.at.device), non_blocking=True)
        self.heads, self.pos = heads, pos
        self.synced_length += 1
        return True


def why_not(heads: Sequence[PackedHead], masks: Sequence[Tensor | None] = ()) -> str:
    """Return why the kernel does not support these heads; "" if it does."""
    size, group = heads[0].rest.shape[1], _group(heads)
    if size not in SIZES or heads[0].v_dim != size:
        return f"keys of {size} and values of {heads[0].v_dim} numbers: {', '.join(map(str, SIZES))} of both are served"
    if (group & -group) < LEAST:
        return f"groups of {group} slots: multiples of {LEAST} are served"
    width = _width(heads[0].values)
    if width & (width - 1):
        return f"groups of {width} channels: powers of two are served"
    if any(head.keys.bits == 8 and head.rest.shape[0] for head in heads):
        return "keys in 8 bits and others behind them in full"
    if any(r.fine is not None for head in heads for r in (head.keys, head.values)):
        return "codes in halves: the plain one alone adds them up"
    if any(mask is not None and mask.shape[0] > 1 for mask in masks):
        return "masks of single rows: holes and a window are served"
    whole = all(t.is_contiguous() for head in heads for t in (*head.keys.tensors, *head.values.tensors, head.rest))
    if not whole or any(address % ALIGNED for head in heads for address in _addresses(head)):
        return "numbers that begin in the midst of others"
    return ""


def table_of(heads: Sequence[PackedHead], pos: Sequence[Tensor | None], *, has_holes: bool) -> PackedTable:
    """Build the table of heads that `why_not` accepts. pos [S] int32 per head, -1 = hole; read for holes or windows."""
    first, longest = heads[0], max(head.length for head in heads)
    return PackedTable(
        _rows(heads, pos, first.rest.device).to(first.rest.device, non_blocking=True), heads, pos, first.keys.bits,
        first.values.bits, _group(heads), _width(first.values), first.rest.shape[1], first.rest.dtype,
        max(ROOM, 1 << max(0, longest - 1).bit_length()), has_holes,
    )  # fmt: skip


def _rows(heads: Sequence[PackedHead], pos: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return the rows of heads on the host, in memory that the device can access directly."""
    rows = torch.tensor([_row(head, at) for head, at in zip(heads, pos, strict=True)], dtype=torch.int64)
    return rows.pin_memory() if device.type == "cuda" else rows


def _row(head: PackedHead, pos: Tensor | None) -> list[int]:
    """Return addresses of codes, scales, zeros, unquantized keys, positions; then quantized keys, slots, value room."""
    packed = 0 if head.keys.bits == 16 else head.keys.codes.shape[0]
    room = head.values.codes.shape[1] if head.values.bits == 8 else head.length
    return [*_addresses(head), 0 if pos is None else pos.data_ptr(), packed, head.length, room]


def _addresses(head: PackedHead) -> list[int]:
    keys = head.keys
    rest = keys.codes if keys.bits == 16 else head.rest  # keys in 16 bits are all unquantized
    tensors = [t for r in (keys, head.values) for t in (r.codes, r.scale, r.zero)]
    return [0 if t is None else t.data_ptr() for t in (*tensors, rest)]


def _group(heads: Sequence[PackedHead]) -> int:
    """Return the slots that share scales, from the first head with groups; 64 if no head has any."""
    shared = [head.keys for head in heads if head.keys.zero is not None and head.keys.zero.shape[0]]
    return shared[0].codes.shape[0] // len(shared[0].zero) if shared and shared[0].zero is not None else 64


def _width(values: Rounded) -> int:
    """Return the channels that share a scale; 1 if values have no zero."""
    return values.codes.shape[1] * 8 // values.bits // values.zero.shape[1] if values.zero is not None else 1
