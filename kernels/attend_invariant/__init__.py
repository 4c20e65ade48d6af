"""Attention of a pass's rows over stored slots and each other, as one sequence a row.

What a row reads is a sequence: the stored slots in the order they lie, then its ancestors in this pass from the root
down, then itself. Which of them are stored already makes no difference: the sequence is cut into blocks of 64 and spans
of 4,096 by index, each block updates the state of its span in order (arXiv 2205.14135), spans meet in order at the end.
So the bits of a row depend on its sequence alone, not on who else is in the pass, and a token gives the same alone, in
a draft and in a prompt. A slot that a window hides is a masked slot in its place.

Stores call `attend_stored_and_new`: `attend_invariant` gives what a layer wants, `attend_part` a part of it for one
tier; reference.py says what both compute.
`attend_quantized_part` is `attend_part` over slots in few bits, and gives the bits that they would give unpacked.
bf16 and float32 on a CPU, all of one type; weights are rounded to bf16 for bf16 values. `why_not` says what is not
served. Native alone: without it torch's kernels remain, whose rows do know of each other. What a row does not see must
still be finite, but for the spare room behind a head's slots.

bf16 and fp16 on a GPU, by Triton (fused.py), in tiles of 64 and a partition of its own: heads begin with their first
slot there, whatever was given back, and slots that rows choose (`SelectedPages`) are not served. Rows of a prompt are
not held to the bits of one row there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels import triton_support
from kvcli.kernels.attend_invariant.native import call, table_of
from kvcli.kernels.attend_invariant.tables import LARGEST as LARGEST_FUSED
from kvcli.kernels.attend_invariant.tables import fits
from kvcli.kernels.attend_new_tokens import attend_new_tokens
from kvcli.kernels.attend_quantized import PackedHead
from kvcli.kernels.merge_attention import PartialAttention

BLOCK = 64  # slots
LARGEST = 576  # numbers of a key or a value: those of a latent, which is both (DeepSeek, GLM-4.7-Flash)
WIDEST = 1 << 30  # a window that hides holes and nothing else


@dataclass(slots=True)  # not frozen: one is made in each layer of a pass, and freezing takes four times as long
class StoredKV:
    """Stored slots of one layer, in the order in which rows read them; heads may lie anywhere and differ in length."""

    k: Tensor  # [T, D], contiguous: all heads' slots
    v: Tensor  # [T, E]
    pos: Tensor  # [T] or [P] int32 beside k: positions, read where a window hides some
    starts: Sequence[int]  # by KV head: its first slot in k and v
    lengths: Sequence[int]  # by KV head: slots from there on
    pos_starts: Sequence[int]  # by KV head: its first position
    gone: int = 0  # slots before the first, whole blocks that a window hides from all rows: they keep their places


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """Stored slots of one layer in few bits; heads may differ in length. Worth keeping until they change."""

    heads: Sequence[PackedHead]
    pos: Tensor  # as in StoredKV; a hole has position -1 and is hidden where there is a window
    pos_starts: Sequence[int]
    at: array[int] = field(init=False, repr=False, compare=False)  # where the kernel finds them all

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", table_of(self.heads))


@dataclass(frozen=True, slots=True)
class SelectedPages:
    """What each row reads of a run: pages of its own choice, in their order, then all that lies behind the pages."""

    pages: Tensor  # [K, N, P] bool on the CPU, contiguous; page p of a head is its slots from p * page on
    page: int  # slots
    behind: Sequence[int]  # by KV head: the first slot behind its pages
    left: Sequence[int]  # by KV head: slots from there on


@cache  # asked in each layer of a pass
def why_not(dtype: torch.dtype, device: torch.device, d: int, e: int) -> str:
    """Why rows of this type, with keys of `d` numbers and values of `e`, are not served; "" if they are."""
    if device.type == "cuda":
        if why := triton_support.why_not(device, dtype):
            return why
        return "" if fits(d, e) else f"keys of {d} numbers and values of {e}: 16, 32 .. {LARGEST_FUSED} are served"
    if built.native() is None:
        return built.why_not()
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return f"{dtype} on {device.type}: only bf16 and float32 on a CPU"
    if d % 2 or max(d, e) > LARGEST:
        return f"keys of {d} numbers and values of {e}: an even number of at most {LARGEST} is served"
    return ""


@dataclass(slots=True)  # as StoredKV
class NewRows:
    """What a pass itself brings to a layer: rows read it behind what is stored."""

    k: Tensor  # [K, N, D]; the rows that ask are the last n of the N
    v: Tensor  # [K, N, E]
    pos: Sequence[int]  # N
    line: Tensor | None  # [n, N] bool on the CPU: a row's ancestors and itself; None = all up to itself, and n = N
    sees: Tensor | None  # the same on the device, less what a window hides
    sink: Tensor | None = None  # [H] learned logits that take mass and give nothing (gpt-oss)
    before: Sequence[PartialAttention] = ()  # what the rows saw of older slots
    sent: dict[Any, Any] = field(default_factory=dict)  # of a pass: what its layers have on the device (passes.py)

    def parts(self, q: Tensor, scale: float, softcap: float) -> list[PartialAttention]:
        """q [H, n, D] over these alone: where what is stored cannot be read in one sequence with them."""
        fresh = attend_new_tokens(q, self.k, self.v, scale, self.sees, softcap=softcap)
        if self.sink is None:
            return [*self.before, fresh]
        lse = self.sink.to(fresh.lse.dtype).unsqueeze(-1).expand_as(fresh.lse)
        return [*self.before, fresh, PartialAttention(torch.zeros_like(fresh.out), lse)]


def serves(q: Tensor, v: Tensor) -> bool:
    """Whether rows q [H, n, D] over values v [.., E] can be read in one sequence with what their pass brings."""
    return v.dtype == q.dtype and not why_not(q.dtype, q.device, q.shape[2], v.shape[-1])


def serves_chosen(q: Tensor, v: Tensor) -> bool:
    """Whether each of them can read slots of its own choice."""
    return q.device.type == "cpu" and serves(q, v)


def serves_packed(q: Tensor, like: Tensor) -> bool:
    """Whether rows q [H, n, D] can be read over slots in few bits that unpack to values `like` these [.., E]."""
    return serves_chosen(q, like) and q.shape[2] % 16 == like.shape[-1] % 16 == 0


def attend_stored_and_new(
    q: Tensor,
    run: StoredKV | None,
    own: NewRows | None,
    pos: Sequence[int],
    scale: float,
    *,
    window: int | None,
    softcap: float,
    is_prompt: bool = False,
) -> PartialAttention:
    """Rows over a run and what their pass brings, in one part; of one type, as `serves` says."""
    if q.device.type == "cuda":
        from kvcli.kernels.attend_invariant import passes  # Triton is imported where it serves

        return passes.read(q, run, own, pos, scale, window=window, softcap=softcap, is_prompt=is_prompt)
    if own is None:
        assert run is not None, "nothing to read"
        return attend_part(q, run, pos, scale, window=window, softcap=softcap)
    fresh, lse, pos = (own.k, own.v), torch.empty(q.shape[1], q.shape[0]), own.pos
    sees, before, sink = own.line, own.before, own.sink
    out = attend_invariant(
        q, run, fresh, pos, scale, sees=sees, window=window, softcap=softcap, before=before, sink=sink, lse=lse
    )
    return PartialAttention(out.transpose(0, 1), lse.T)


def attend_invariant(
    q: Tensor,
    run: StoredKV | None,
    fresh: tuple[Tensor, Tensor] | None,
    pos: Sequence[int],
    scale: float,
    *,
    sees: Tensor | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    before: Sequence[PartialAttention] = (),
    sink: Tensor | None = None,
    lse: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """What `reference.attend_invariant` gives as `out`, but as [N, H, E], contiguous and in q's type.

    `lse` [N, H] float32 is filled where it is given. `level`: another kind of CPU than the best there is.
    """
    e = (run.v if run is not None else fresh[1]).shape[-1]  # type: ignore[index]
    out = torch.empty(q.shape[1], q.shape[0], e, dtype=q.dtype)
    call(q, run, fresh, pos, scale, sees, window, softcap, before, sink, out, lse, level)
    return out


def attend_part(
    q: Tensor,
    run: StoredKV,
    pos: Sequence[int],
    scale: float,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    chosen: SelectedPages | None = None,
    level: str | None = None,
) -> PartialAttention:
    """Rows over stored slots alone, to be given as `before`; both tensors float32, and views of [N, H, ..]."""
    if q.device.type == "cuda":
        assert chosen is None, "not served there"
        return attend_stored_and_new(q, run, None, pos, scale, window=window, softcap=softcap)
    out = torch.empty(q.shape[1], q.shape[0], run.v.shape[-1])
    lse = torch.empty(q.shape[1], q.shape[0])
    call(q, run, None, pos, scale, None, window, softcap, (), None, out, lse, level, chosen=chosen)
    return PartialAttention(out.transpose(0, 1), lse.T)


def attend_quantized_part(
    q: Tensor,
    run: QuantizedKV,
    pos: Sequence[int],
    scale: float,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    level: str | None = None,
) -> PartialAttention:
    """The same over slots in few bits: D and E multiples of 16, and q of their type unpacked."""
    e = run.heads[0].v_dim
    assert q.shape[2] % 16 == e % 16 == 0, "codes are read sixteen at a time"
    out = torch.empty(q.shape[1], q.shape[0], e)
    lse = torch.empty(q.shape[1], q.shape[0])
    call(q, None, None, pos, scale, None, window, softcap, (), None, out, lse, level, run)
    return PartialAttention(out.transpose(0, 1), lse.T)
