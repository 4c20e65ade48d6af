"""Batch-invariant attention of a pass's rows over stored slots and each other.

Each row attends to one sequence: the stored slots in their order, then its ancestors in this pass from the root down,
then itself. The result does not depend on how many of them are stored already. The sequence is cut by index into blocks
of 64 and spans of 4,096. Each block updates the state of its span in order (arXiv 2205.14135); spans are merged in
order at the end. The bits of a row therefore depend on its sequence alone, not on other rows in the pass: a token gives
the same bits alone, in a draft and in a prompt. A slot outside a window is masked, and keeps its index.

KV caches call `attend_stored_and_new`. `attend_invariant` returns a layer's attention output, `attend_part` the partial
attention over one tier; reference.py specifies both.
`attend_quantized_part` is `attend_part` over quantized slots, with the bits that the dequantized slots would give.
Supported are bf16 and float32 on a CPU, all of one dtype; weights are rounded to bf16 for bf16 values. `why_not`
returns why other cases are not. The CPU needs native kernels, because torch's are batch variant. Hidden slots must
still be finite, apart from the spare capacity after a head's slots.

On a GPU bf16 and fp16 are supported by Triton (fused.py), in tiles of 64 and another partition. Heads there begin with
their first stored slot, even if slots before were evicted, and `SelectedPages` are not supported. Prefill rows are not
batch invariant there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels import triton_support
from kvcli.kernels.attend_invariant.inputs import NewRows, QuantizedKV, SelectedPages, StoredKV
from kvcli.kernels.attend_invariant.native import call
from kvcli.kernels.attend_invariant.tables import LARGEST as LARGEST_FUSED
from kvcli.kernels.attend_invariant.tables import fits
from kvcli.kernels.merge_attention import PartialAttention

BLOCK = 64  # slots
LARGEST = 576  # most numbers of a key or value: those of an MLA latent, which is both (DeepSeek, GLM-4.7-Flash)
WIDEST = 1 << 30  # a window that hides only holes (evicted slots)


@cache  # called in each layer of a pass
def why_not(dtype: torch.dtype, device: torch.device, d: int, e: int) -> str:
    """Return why rows of this dtype with keys of size `d` and values of size `e` are not supported; "" if they are."""
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


def serves(q: Tensor, v: Tensor) -> bool:
    """True if rows q [H, n, D] over values v [.., E] can read stored slots and new KV as one sequence."""
    return v.dtype == q.dtype and not why_not(q.dtype, q.device, q.shape[2], v.shape[-1])


def serves_chosen(q: Tensor, v: Tensor) -> bool:
    """True if each row can read its own selected pages."""
    return q.device.type == "cpu" and serves(q, v)


def serves_packed(q: Tensor, like: Tensor) -> bool:
    """True if rows q [H, n, D] can read quantized slots that dequantize to values `like` these [.., E]."""
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
    """Compute attention of rows over stored slots and new KV, as one partial attention; of one dtype as in `serves`."""
    if q.device.type == "cuda":
        from kvcli.kernels.attend_invariant import passes  # imports Triton, so only where it is supported

        return passes.read(q, run, own, pos, scale, window=window, softcap=softcap, is_prompt=is_prompt)
    if own is None:
        assert run is not None, "nothing to read"
        return attend_part(q, run, pos, scale, window=window, softcap=softcap)
    fresh, lse, pos = (own.k, own.v), torch.empty(q.shape[1], q.shape[0]), own.pos
    sees, before, sink = own.tree_mask, own.before, own.sink
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
    """Compute the `out` of `reference.attend_invariant`, but as [N, H, E], contiguous and in q's dtype.

    `lse` [N, H] float32 is filled if given. `level`: a lesser kind of CPU than the best available.
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
    """Compute partial attention over stored slots alone, for `before`; both tensors float32, as views of [N, H, ..]."""
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
    """Compute partial attention over quantized slots: D and E multiples of 16, q in the dtype of dequantized slots."""
    e = run.heads[0].v_dim
    assert q.shape[2] % 16 == e % 16 == 0, "codes are read sixteen at a time"
    out = torch.empty(q.shape[1], q.shape[0], e)
    lse = torch.empty(q.shape[1], q.shape[0])
    call(q, None, None, pos, scale, None, window, softcap, (), None, out, lse, level, run)
    return PartialAttention(out.transpose(0, 1), lse.T)


__all__ = ["NewRows", "QuantizedKV", "SelectedPages", "StoredKV"]  # imported for others, beside what is defined here
