"""Call native/c/attend.c with its arguments packed as C structures."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.attend_invariant.inputs import QuantizedKV, SelectedPages, StoredKV
from kvcli.kernels.merge_attention import PartialAttention

# The structures of native/c/attend.c. Python takes microseconds per call, so each structure is packed at once.
ATTEND, PART = struct.Struct("15P17q2f2i"), struct.Struct("2P5q")
CHOSEN = struct.Struct("2P3q")


def call(
    q: Tensor,
    run: StoredKV | None,
    fresh: tuple[Tensor, Tensor] | None,
    pos: Sequence[int],
    scale: float,
    sees: Tensor | None,
    window: int | None,
    softcap: float,
    before: Sequence[PartialAttention],
    sink: Tensor | None,
    out: Tensor,  # [N, H, E]
    lse: Tensor | None,  # [N, H]
    level: str | None,
    packed: QuantizedKV | None = None,
    chosen: SelectedPages | None = None,
) -> None:
    functions = built.native(level)
    assert functions is not None
    assert scale > 0, "the largest product is the largest score"
    q, qh, qn = _rows(q)
    h, n, d = q.shape
    k = v = fk = fv = slots_at = rows_at = sees_at = sink_at = parts_at = packed_at = chosen_at = 0
    kh = kn = vh = vn = kv = 0
    m = n
    if fresh is not None:
        (k_rows, kh, kn), (v_rows, vh, vn) = _rows(fresh[0]), _rows(fresh[1])
        assert k_rows.dtype == v_rows.dtype == q.dtype, "rows are of one type"
        fk, fv, kv = k_rows.data_ptr(), v_rows.data_ptr(), k_rows.shape[0]
        m = k_rows.shape[1]
    if packed is not None:
        assert all(head.rest.dtype == q.dtype for head in packed.heads), "rows and slots are of one type"
        packed_at, kv = packed.at.buffer_info()[0], len(packed.heads)
        heads = array("q", (*[0] * kv, *[head.length for head in packed.heads], *packed.pos_starts))
    elif run is None:
        heads = array("q", bytes(24 * kv))
    else:
        assert run.k.dtype == run.v.dtype == q.dtype, "rows and slots are of one type"
        k, v, kv = run.k.data_ptr(), run.v.data_ptr(), len(run.starts)
        heads = array("q", (*run.starts, *run.lengths, *run.pos_starts))
    if chosen is not None:
        assert chosen.pages.is_contiguous(), "choices are contiguous"
        assert chosen.pages.shape[:2] in ((kv, n), (kv, 1)), "a choice of each row, or one of all"
        behind = array("q", (*chosen.behind, *chosen.left))
        choice = CHOSEN.pack(chosen.pages.data_ptr(), behind.buffer_info()[0], *chosen.pages.shape[1:], chosen.page)
        choices = array("q", choice)
        chosen_at = choices.buffer_info()[0]
    if window is not None:
        assert len(pos) == m, "a position of each row"
        positions = array("i", pos)
        rows_at, stored = positions.buffer_info()[0], packed or run
        assert stored is None or stored.pos.dtype == torch.int32, "positions are int32"
        slots_at = 0 if stored is None else stored.pos.data_ptr()
    if sees is not None and m > 1:
        assert sees.shape == (n, m), "who sees whom"
        sees = sees.contiguous()
        sees_at = sees.data_ptr()
    if sink is not None:
        sink = sink.float().contiguous()
        sink_at = sink.data_ptr()
    if before:
        outs = [_rows(p.out if p.out.dtype == torch.bfloat16 else p.out.float()) for p in before]
        lses = [p.lse.float() for p in before]
        parts = array("q", b"".join(_part(*out, lse) for out, lse in zip(outs, lses, strict=True)))
        parts_at = parts.buffer_info()[0]
    functions.attend(
        ATTEND.pack(
            *(q.data_ptr(), k, v, fk, fv, out.data_ptr(), 0 if lse is None else lse.data_ptr()),
            *(slots_at, rows_at, heads.buffer_info()[0], sees_at, sink_at, parts_at, packed_at, chosen_at),
            *(len(before), h, kv, n, m, d),
            *(out.shape[2], qh, qn, kh, kn, vh, vn, out.shape[2], h * out.shape[2], window or 0),
            *(0 if run is None else run.gone, scale, softcap),
            *(q.dtype == torch.float32, out.dtype == torch.float32),
        )
    )


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """Return [.., N, D] with D contiguous, and the other strides."""
    a, b, c = x.stride()
    if c == 1:
        return x, a, b
    x = x.contiguous()
    return x, x.stride(0), x.stride(1)


def _part(out: Tensor, h: int, n: int, lse: Tensor) -> bytes:
    return PART.pack(out.data_ptr(), lse.data_ptr(), h, n, *lse.stride(), out.dtype == torch.float32)
