"""Attention of a pass's rows over stored slots and each other, as one sequence a row.

What a row reads is a sequence: the stored slots in the order they lie, then its ancestors in this pass from the root
down, then itself. Which of them are stored already makes no difference: the sequence is cut into blocks of 64 and spans
of 4,096 by index, each block updates the state of its span in order (arXiv 2205.14135), spans meet in order at the end.
So the bits of a row depend on its sequence alone, not on who else is in the pass, and a token gives the same alone, in
a draft and in a prompt. A slot that a window hides is a masked slot in its place.

Stores call `read`: `attend_rows` gives what a layer wants, `attend_part` a part of it for one tier; reference.py says
what both compute.
`attend_packed_part` is `attend_part` over slots in few bits, and gives the bits that they would give unpacked.
bf16 and float32 on a CPU, all of one type; weights are rounded to bf16 for bf16 values. `why_not` says what is not
served. Native alone: without it torch's kernels remain, whose rows do know of each other. What a row does not see must
still be finite, but for the spare room behind a head's slots.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.attend_fresh import attend_fresh
from kvcli.kernels.attend_packed import PackedHead
from kvcli.kernels.merge import Part

BLOCK = 64  # slots
LARGEST = 512  # numbers of a key or a value
WIDEST = 1 << 30  # a window that hides holes and nothing else
# The structures of native/c/attend.c. A call is Python's for some microseconds, so all of it is packed at once.
ATTEND, PART, PACKED = struct.Struct("15P17q2f2i"), struct.Struct("2P5q"), struct.Struct("3P3q3P3qPq")
CHOSEN = struct.Struct("2P2q")


@dataclass(slots=True)  # not frozen: one is made in each layer of a pass, and freezing takes four times as long
class Run:
    """Stored slots of one layer, in the order in which rows read them; heads may lie anywhere and differ in length."""

    k: Tensor  # [T, D], contiguous: all heads' slots
    v: Tensor  # [T, E]
    pos: Tensor  # [T] or [P] int32 on the CPU: positions, read where a window hides some
    starts: Sequence[int]  # by KV head: its first slot in k and v
    lengths: Sequence[int]  # by KV head: slots from there on
    pos_starts: Sequence[int]  # by KV head: its first position
    gone: int = 0  # slots before the first, whole blocks that a window hides from all rows: they keep their places


@dataclass(frozen=True, slots=True)
class PackedRun:
    """Stored slots of one layer in few bits; heads may differ in length."""

    heads: Sequence[PackedHead]
    pos: Tensor  # as in Run; a hole has position -1 and is hidden where there is a window
    pos_starts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What each row reads of a run: pages of its own choice, in their order, then all that lies behind the pages."""

    pages: Tensor  # [K, N, P] bool on the CPU, contiguous; page p of a head is its slots from p * page on
    page: int  # slots
    behind: Sequence[int]  # by KV head: the first slot behind its pages
    left: Sequence[int]  # by KV head: slots from there on


@cache  # asked in each layer of a pass
def why_not(dtype: torch.dtype, device: torch.device, d: int, e: int) -> str:
    """Why rows of this type, with keys of `d` numbers and values of `e`, are not served; "" if they are."""
    if built.native() is None:
        return built.why_not()
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return f"{dtype} on {device.type}: only bf16 and float32 on a CPU"
    if d % 2 or max(d, e) > LARGEST:
        return f"keys of {d} numbers and values of {e}: an even number of at most {LARGEST} is served"
    return ""


@dataclass(slots=True)  # as Run
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


def serves(q: Tensor, v: Tensor) -> bool:
    """Whether rows q [H, n, D] over values v [.., E] can be read in one sequence with what their pass brings."""
    return v.dtype == q.dtype and not why_not(q.dtype, q.device, q.shape[2], v.shape[-1])


def serves_packed(q: Tensor, like: Tensor) -> bool:
    """Whether rows q [H, n, D] can be read over slots in few bits that unpack to numbers `like` these, of size D."""
    return like.dtype == q.dtype and q.shape[2] % 16 == 0 and not why_not(q.dtype, q.device, q.shape[2], q.shape[2])


def read(
    q: Tensor, run: Run | None, own: Own | None, pos: Sequence[int], scale: float, *, window: int | None, softcap: float
) -> Part:
    """Rows over a run and what their pass brings, in one part; of one type, as `serves` says."""
    if own is None:
        assert run is not None, "nothing to read"
        return attend_part(q, run, pos, scale, window=window, softcap=softcap)
    fresh, lse, pos = (own.k, own.v), torch.empty(q.shape[1], q.shape[0]), own.pos
    sees, before, sink = own.line, own.before, own.sink
    out = attend_rows(
        q, run, fresh, pos, scale, sees=sees, window=window, softcap=softcap, before=before, sink=sink, lse=lse
    )
    return Part(out.transpose(0, 1), lse.T)


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
    lse: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """What `reference.attend_rows` gives as `out`, but as [N, H, E], contiguous and in q's type.

    `lse` [N, H] float32 is filled where it is given. `level`: another kind of CPU than the best there is.
    """
    e = (run.v if run is not None else fresh[1]).shape[-1]  # type: ignore[index]
    out = torch.empty(q.shape[1], q.shape[0], e, dtype=q.dtype)
    _call(q, run, fresh, pos, scale, sees, window, softcap, before, sink, out, lse, level)
    return out


def attend_part(
    q: Tensor,
    run: Run,
    pos: Sequence[int],
    scale: float,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    chosen: Chosen | None = None,
    level: str | None = None,
) -> Part:
    """Rows over stored slots alone, to be given as `before`; both tensors float32, and views of [N, H, ..]."""
    out = torch.empty(q.shape[1], q.shape[0], run.v.shape[-1])
    lse = torch.empty(q.shape[1], q.shape[0])
    _call(q, run, None, pos, scale, None, window, softcap, (), None, out, lse, level, chosen=chosen)
    return Part(out.transpose(0, 1), lse.T)


def attend_packed_part(
    q: Tensor,
    run: PackedRun,
    pos: Sequence[int],
    scale: float,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    level: str | None = None,
) -> Part:
    """The same over slots in few bits: keys and values of D numbers, a multiple of 16, and q of their type unpacked."""
    assert q.shape[2] % 16 == 0, "codes are read sixteen at a time"
    out = torch.empty(q.shape[1], q.shape[0], q.shape[2])
    lse = torch.empty(q.shape[1], q.shape[0])
    _call(q, None, None, pos, scale, None, window, softcap, (), None, out, lse, level, run)
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
    packed: PackedRun | None = None,
    chosen: Chosen | None = None,
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
        codes = array("q", b"".join(_packed(head, q.dtype) for head in packed.heads))
        packed_at, kv = codes.buffer_info()[0], len(packed.heads)
        heads = array("q", (*[0] * kv, *[head.length for head in packed.heads], *packed.pos_starts))
    elif run is None:
        heads = array("q", bytes(24 * kv))
    else:
        assert run.k.dtype == run.v.dtype == q.dtype, "rows and slots are of one type"
        k, v, kv = run.k.data_ptr(), run.v.data_ptr(), len(run.starts)
        heads = array("q", (*run.starts, *run.lengths, *run.pos_starts))
    if chosen is not None:
        assert chosen.pages.is_contiguous(), "choices lie in one piece"
        assert chosen.pages.shape[:2] == (kv, n), "a choice of each row"
        behind = array("q", (*chosen.behind, *chosen.left))
        choice = CHOSEN.pack(chosen.pages.data_ptr(), behind.buffer_info()[0], chosen.pages.shape[2], chosen.page)
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
            *(
                slots_at,
                rows_at,
                heads.buffer_info()[0],
                sees_at,
                sink_at,
                parts_at,
                packed_at,
                chosen_at,
                len(before),
                h,
                kv,
                n,
                m,
                d,
            ),
            *(out.shape[2], qh, qn, kh, kn, vh, vn, out.shape[2], h * out.shape[2], window or 0),
            *(0 if run is None else run.gone, scale, softcap),
            *(q.dtype == torch.float32, out.dtype == torch.float32),
        )
    )


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """[.., N, D] with D in one piece, and the other strides."""
    a, b, c = x.stride()
    if c == 1:
        return x, a, b
    x = x.contiguous()
    return x, x.stride(0), x.stride(1)


def _part(out: Tensor, h: int, n: int, lse: Tensor) -> bytes:
    return PART.pack(out.data_ptr(), lse.data_ptr(), h, n, *lse.stride(), out.dtype == torch.float32)


def _packed(head: PackedHead, dtype: torch.dtype) -> bytes:
    k, v = head.keys, head.values
    assert head.rest.dtype == dtype, "rows and slots are of one type"
    assert all(t.is_contiguous() for t in (*k.tensors, *v.tensors, head.rest)), "codes lie in one piece"
    k_group = 0 if k.zero is None else k.codes.shape[0] // max(1, k.zero.shape[0])
    v_group = 0 if v.zero is None else head.rest.shape[1] // v.zero.shape[1]
    k_at, v_at = ([0 if t is None else t.data_ptr() for t in (x.codes, x.scale, x.zero)] for x in (k, v))
    return PACKED.pack(
        *(*k_at, k.bits, k_group, 0, *v_at, v.bits, v_group, v.codes.shape[1]), head.rest.data_ptr(), k.codes.shape[0]
    )
