"""Inputs of batch-invariant attention: stored slots, quantized slots, pages selected by each row, and new rows."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.attend_new_tokens import attend_new_tokens
from kvcli.kernels.attend_quantized.table import PackedHead
from kvcli.kernels.merge_attention import PartialAttention

PACKED = struct.Struct("4P3q4P3qPq")  # a structure of native/c/attend.c


# not frozen, because one is created in each layer of a pass, and freezing takes four times as long
@dataclass(slots=True)
class StoredKV:
    """Stored slots of one layer, in the order in which rows read them; heads may start anywhere, at any length."""

    k: Tensor  # [T, D], contiguous: all heads' slots
    v: Tensor  # [T, E]
    pos: Tensor  # [T] or [P] int32 beside k: positions, read if there is a window
    starts: Sequence[int]  # by KV head: index of its first slot in k and v
    lengths: Sequence[int]  # by KV head: its number of slots
    pos_starts: Sequence[int]  # by KV head: index of its first position
    # evicted slots before the first: whole blocks hidden from all rows by the window, still counted in indices
    gone: int = 0


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """Quantized slots of one layer; heads may differ in length. Keep the object until its slots change."""

    heads: Sequence[PackedHead]
    pos: Tensor  # as in StoredKV; a hole (evicted slot) has position -1 and is hidden if there is a window
    pos_starts: Sequence[int]
    at: array[int] = field(init=False, repr=False, compare=False)  # table of the addresses for the kernel

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", table_of(self.heads))


@dataclass(frozen=True, slots=True)
class SelectedPages:
    """Stored slots that each row reads: pages selected by the row, in order, then all slots after the pages."""

    # [K, N, P] bool on the CPU, contiguous, or [K, 1, P] for all rows; page p of a head begins at its slot p * page
    pages: Tensor
    page: int  # slots per page
    behind: Sequence[int]  # by KV head: the first slot after its pages
    left: Sequence[int]  # by KV head: number of slots from there on


@dataclass(slots=True)  # not frozen, as StoredKV
class NewRows:
    """New KV of a pass in a layer: rows read it after the stored slots."""

    k: Tensor  # [K, N, D]; the query rows are the last n of the N
    v: Tensor  # [K, N, E]
    pos: Sequence[int]  # N
    tree_mask: Tensor | None  # [n, N] bool on the CPU: a row's ancestors and itself; None = all up to itself (n = N)
    mask: Tensor | None  # the same on the device, without rows outside a window
    sink: Tensor | None = None  # [H] learned attention sink logits, which add mass and no value (gpt-oss)
    before: Sequence[PartialAttention] = ()  # partial attention over older slots
    # tables of the pass on the device, shared by its layers (passes.py)
    sent: dict[Any, Any] = field(default_factory=dict)

    def parts(self, q: Tensor, scale: float, softcap: float) -> list[PartialAttention]:
        """Compute attention of q [H, n, D] over the new KV alone, if stored slots cannot be in one sequence with it."""
        fresh = attend_new_tokens(q, self.k, self.v, scale, self.mask, softcap=softcap)
        if self.sink is None:
            return [*self.before, fresh]
        lse = self.sink.to(fresh.lse.dtype).unsqueeze(-1).expand_as(fresh.lse)
        return [*self.before, fresh, PartialAttention(torch.zeros_like(fresh.out), lse)]


def table_of(heads: Sequence[PackedHead]) -> array[int]:
    """Return addresses and sizes of packed heads, which must outlive the table."""
    return array("q", b"".join(map(_packed, heads)))


def _packed(head: PackedHead) -> bytes:
    k, v = head.keys, head.values
    assert all(t.is_contiguous() for t in (*k.tensors, *v.tensors, head.rest)), "codes are contiguous"
    k_group = 0 if k.zero is None else k.codes.shape[0] // max(1, k.zero.shape[0])
    v_group = 0 if v.zero is None else head.v_dim // v.zero.shape[1]
    k_at, v_at = ([0 if t is None else t.data_ptr() for t in (x.codes, x.scale, x.zero, x.fine)] for x in (k, v))
    return PACKED.pack(
        *(*k_at, k.bits, k_group, 0, *v_at, v.bits, v_group, v.codes.shape[1]), head.rest.data_ptr(), k.codes.shape[0]
    )
