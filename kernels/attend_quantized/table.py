"""Addresses of a layer's quantized heads, for a kernel that reads all heads in one launch; remade when heads change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.quantize_kv import Rounded

SIZES = (64, 128, 256)  # head sizes; must be powers of two
LEAST = 16  # fewest slots of a tile
ALIGNED = 16  # bytes
NARROWEST = 256  # fewest slots per span
SPANS = 64  # most spans of the longest head; `kvcli fit` plans with their partial results
# most spans of all heads: with more than two per processor of a large GPU, spans would run one after another
PROGRAMS = 256


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


@dataclass(frozen=True, slots=True)
class PackedTable:
    """Heads of a layer, all of one layout."""

    at: Tensor  # [K, 11] int64: addresses of keys, values and positions, then numbers of slots; see `table_of`
    heads: tuple[PackedHead, ...]  # `heads` and `pos` keep the addressed memory alive
    pos: tuple[Tensor | None, ...]
    k_bits: int
    v_bits: int
    group: int  # slots that share the scales of their keys
    width: int  # channels that share the scale of a value
    longest: int  # slots
    has_holes: bool

    @property
    def tile(self) -> int:
        """Slots of one product: the largest power of two that divides a group."""
        most = 32 if self.heads[0].rest.shape[1] > 128 else 64
        return min(most, self.group & -self.group)

    @property
    def span(self) -> int:
        """Slots of one program, a power of two. It depends on the stored slots and on nothing of a pass."""
        spans = 1 << max(1, PROGRAMS // len(self.heads)).bit_length() - 1
        return max(NARROWEST, self.whole // min(SPANS, spans))

    @property
    def whole(self) -> int:
        """Slots of a span that covers all slots; a power of two."""
        return max(NARROWEST, 1 << max(0, self.longest - 1).bit_length())


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
    rows = [_row(head, at) for head, at in zip(heads, pos, strict=True)]
    at = torch.tensor(rows, dtype=torch.int64)
    device, first = heads[0].rest.device, heads[0]
    if device.type == "cuda":
        at = at.pin_memory().to(device, non_blocking=True)
    return PackedTable(
        at,
        tuple(heads),
        tuple(pos),
        first.keys.bits,
        first.values.bits,
        _group(heads),
        _width(first.values),
        max(head.length for head in heads),
        has_holes,
    )


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
