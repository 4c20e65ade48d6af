"""Attention of a pass's rows over stored slots and each other, as one sequence a row.

What a row reads is a sequence: the stored slots in the order they lie, then its ancestors in this pass from the root
down, then itself. Which of them are stored already makes no difference: the sequence is cut into blocks of 64 and spans
of 4,096 by index, each block updates the state of its span in order (arXiv 2205.14135), spans meet in order at the end.
So the bits of a row depend on its sequence alone, not on who else is in the pass, and a token gives the same alone, in
a draft and in a prompt. A slot that a window hides is a masked slot in its place.

`attend_rows` gives what a layer wants, `attend_part` a part of it for one tier; reference.py says what both compute.
bf16 and float32 on a CPU, all of one type; weights are rounded to bf16 for bf16 values. `why_not` says what is not
served. Native alone: without it torch's kernels remain, whose rows do know of each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.attend_fresh import attend_fresh
from kvcli.kernels.merge import Part

LARGEST = 512  # numbers of a key or a value


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


def serves(q: Tensor, v: Tensor, own: Own | None) -> bool:
    """Whether rows q [H, n, D] over values v [.., E] and what their pass brings can be read in one sequence."""
    is_whole = own is None or own.k.shape[1] == q.shape[1]  # scouts, who read a tree's rows too, have no such kernel
    return is_whole and v.dtype == q.dtype and not why_not(q.dtype, q.device, q.shape[2], v.shape[-1])


def read(
    q: Tensor, run: Run | None, own: Own | None, pos: Sequence[int], scale: float, *, window: int | None, softcap: float
) -> Part:
    """Rows over a run and what their pass brings, in one part; of one type, as `serves` says."""
    if own is None:
        assert run is not None, "nothing to read"
        return attend_part(q, run, pos, scale, window=window, softcap=softcap)
    h, n, _ = q.shape
    out, lse = torch.empty(n, h, own.v.shape[2], dtype=q.dtype), torch.empty(n, h)
    fresh = (own.k, own.v)
    _call(q, run, fresh, pos, scale, own.line, window, softcap, own.before, own.sink, out, lse, None)
    return Part(out.transpose(0, 1), lse.T)


class _Part(ctypes.Structure):
    """As in native/c/attend.c."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out_h", "out_n", "lse_h", "lse_n", "is_wide")),
    ]


class _Attend(ctypes.Structure):
    """As in native/c/attend.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "fk", "fv", "out", "lse", "pos", "row_pos", "heads")),
        *((name, ctypes.c_void_p) for name in ("sees", "sink", "before")),
        *((name, ctypes.c_int64) for name in ("n_before", "H", "K", "N", "D", "E", "qh", "qn", "kh", "kn", "vh", "vn")),
        *((name, ctypes.c_int64) for name in ("out_h", "out_n", "window")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        *((name, ctypes.c_int32) for name in ("is_wide", "is_wide_out")),
    ]


def why_not(dtype: torch.dtype, device: torch.device, d: int, e: int) -> str:
    """Why rows of this type, with keys of `d` numbers and values of `e`, are not served; "" if they are."""
    if built.native() is None:
        return built.why_not()
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return f"{dtype} on {device.type}: only bf16 and float32 on a CPU"
    if d % 2 or max(d, e) > LARGEST:
        return f"keys of {d} numbers and values of {e}: an even number of at most {LARGEST} is served"
    return ""


def attend_rows(
    q: Tensor,
    run: Run | None,
    fresh: tuple[Tensor, Tensor] | None,
    pos: Sequence[int],
    scale: float,
    *,
    sees: Tensor | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    before: Sequence[Part] = (),
    sink: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """What `reference.attend_rows` gives as `out`, but as [N, H, E], contiguous and in q's type.

    `level`: another kind of CPU than the best there is.
    """
    e = (run.v if run is not None else fresh[1]).shape[-1]  # type: ignore[index]
    out = torch.empty(q.shape[1], q.shape[0], e, dtype=q.dtype)
    _call(q, run, fresh, pos, scale, sees, window, softcap, before, sink, out, None, level)
    return out


def attend_part(
    q: Tensor,
    run: Run,
    pos: Sequence[int],
    scale: float,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    level: str | None = None,
) -> Part:
    """Rows over stored slots alone, to be given as `before`; both tensors float32, and views of [N, H, ..]."""
    out = torch.empty(q.shape[1], q.shape[0], run.v.shape[-1])
    lse = torch.empty(q.shape[1], q.shape[0])
    _call(q, run, None, pos, scale, None, window, softcap, (), None, out, lse, level)
    return Part(out.transpose(0, 1), lse.T)


def _call(
    q: Tensor,
    run: Run | None,
    fresh: tuple[Tensor, Tensor] | None,
    pos: Sequence[int],
    scale: float,
    sees: Tensor | None,
    window: int | None,
    softcap: float,
    before: Sequence[Part],
    sink: Tensor | None,
    out: Tensor,  # [N, H, E]
    lse: Tensor | None,  # [N, H]
    level: str | None,
) -> None:
    functions = built.native(level)
    assert functions is not None
    q = _rows_whole(q)
    h, n, d = q.shape
    a = _Attend(H=h, N=n, D=d, E=out.shape[2], scale=scale, cap=softcap)
    a.is_wide, a.is_wide_out = q.dtype == torch.float32, out.dtype == torch.float32
    a.q, a.qh, a.qn, a.out, a.out_h, a.out_n = (
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        out.data_ptr(),
        out.shape[2],
        out.stride(0),
    )
    if lse is not None:
        a.lse = lse.data_ptr()
    if run is not None:
        assert run.k.dtype == run.v.dtype == q.dtype, "rows and slots are of one type"
        a.K, a.k, a.v = len(run.starts), run.k.data_ptr(), run.v.data_ptr()
        heads = (ctypes.c_int64 * (3 * a.K))(*run.starts, *run.lengths, *run.pos_starts)
    if fresh is not None:
        k, v = _rows_whole(fresh[0]), _rows_whole(fresh[1])
        assert k.dtype == v.dtype == q.dtype, "rows are of one type"
        a.fk, a.kh, a.kn, a.fv, a.vh, a.vn = (
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
        )
        if run is None:
            a.K = k.shape[0]
            heads = (ctypes.c_int64 * (3 * a.K))()
    a.heads = ctypes.addressof(heads)
    if window is not None:
        row_pos = (ctypes.c_int32 * n)(*pos)
        a.window, a.row_pos, a.pos = window, ctypes.addressof(row_pos), None if run is None else run.pos.data_ptr()
    if sees is not None and n > 1:
        sees = sees.contiguous()
        a.sees = sees.data_ptr()
    if sink is not None:
        sink = sink.float().contiguous()
        a.sink = sink.data_ptr()
    if before:
        outs = [_rows_whole(p.out if p.out.dtype == torch.bfloat16 else p.out.float()) for p in before]
        lses = [p.lse.float() for p in before]
        parts = (_Part * len(before))()
        for part, o, e in zip(parts, outs, lses, strict=True):
            part.out, part.out_h, part.out_n, part.is_wide = o.data_ptr(), *o.stride()[:2], o.dtype == torch.float32
            part.lse, part.lse_h, part.lse_n = e.data_ptr(), *e.stride()
        a.before, a.n_before = ctypes.addressof(parts), len(before)
    functions.attend(ctypes.addressof(a))


def _rows_whole(x: Tensor) -> Tensor:
    """The last dimension in one piece; the others may lie anywhere."""
    return x if x.stride(2) == 1 else x.contiguous()
