"""Rows over packed slots on a CPU: products of 8-bit numbers for few rows, codes widened in stretches for more.

Keys. A row becomes two signed bytes per number, 128 * high + low, that is 14 bits against the 8 of bfloat16, and
`torch._int_mm` multiplies them by the codes without widening these: 0.39 ms a layer of 16k slots (4 KV heads of 64,
groups of 4, one thread, AVX512-VNNI) where a bfloat16 product takes 0.6 and `_weight_int8pack_mm`, which adds up across
each short row of 64, also 0.6. Sums are of integers, so they do not depend on how many rows come along.
Values. `_weight_int8pack_mm` over codes stored transposed, their scales folded into the probabilities: 0.3 ms where
bfloat16 takes 0.7. It is fast in bfloat16 only, reads 16 slots at a time and knows no tail.
Both lose to bfloat16 products from some rows on: those use units that these do not. Fewer bits than 8 have no product
of their own; their codes are spread, widened and multiplied, some thousand slots at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels.attend.cpu import FEW, LOG2E, flash
from kvcli.kernels.attend_packed import reference
from kvcli.kernels.pack import LANES, Rounded, pack_keys, pack_values, unpack_keys, unpack_values

if TYPE_CHECKING:
    from kvcli.kernels.attend_packed import PackedHead

BYTES = 16  # rows with their group; from more on, codes are widened
STRETCH = 4096  # slots widened at a time: 0.5 MiB at head size 64
DIGIT = 128


def attend_packed(
    q: Tensor,
    heads: Sequence[PackedHead],
    scale: float,
    dtype: torch.dtype,
    softcap: float,
    masks: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    h, n, d = q.shape
    m = h // len(heads) * n
    if m > FEW and softcap > 0:
        return reference.attend_packed(q, heads, scale, dtype, softcap, masks)
    rows = q.reshape(len(heads), m, d)
    run = _many if m > FEW else _few
    found = [run(*each, n, scale, softcap, dtype) for each in zip(rows, heads, masks, strict=True)]
    out, lse = torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
    return out.view(h, n, d), lse.view(h, n)


def _few(
    rows: Tensor, head: PackedHead, mask: Tensor | None, n: int, scale: float, softcap: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """rows [M, D] of one head -> out [M, D], lse [M, 1]; base 2 throughout, as exp2 is three times as fast as exp."""
    if not head.length:
        return rows.new_zeros(rows.shape, dtype=torch.float32), rows.new_full((rows.shape[0], 1), -torch.inf).float()
    if softcap > 0:
        score = _scores(rows.float() * (scale / softcap), head, dtype).tanh_().mul_(softcap * LOG2E)
    else:
        score = _scores(rows.float() * (scale * LOG2E), head, dtype)  # [M, S] float32
    if mask is not None:
        hidden = ~mask
        score.masked_fill_(hidden if mask.shape[0] == 1 else hidden.repeat(rows.shape[0] // n, 1), -torch.inf)
    top = score.amax(-1, keepdim=True)
    if mask is not None:
        top.masked_fill_(top == -torch.inf, 0.0)  # a row that sees nothing: exp2(-inf - -inf) would be NaN
    score.sub_(top).exp2_()
    mass = score.sum(-1, keepdim=True)
    out = _weigh(score, head.values, dtype).div_(mass if mask is None else mass.clamp_min(torch.finfo().tiny))
    return out, mass.log2_().add_(top).div_(LOG2E)


def _many(
    rows: Tensor, head: PackedHead, mask: Tensor | None, n: int, scale: float, softcap: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """More rows: keys and values once in full, then torch's flash kernel, which never holds all scores."""
    like = rows.new_empty(0, dtype=dtype)
    k = torch.cat([unpack_keys(head.keys, like), head.rest]).unsqueeze(0)
    v = unpack_values(head.values, like, head.length).unsqueeze(0)
    q = rows.to(dtype).view(-1, n, rows.shape[1])
    if not head.length:
        return torch.zeros_like(rows, dtype=torch.float32), rows.new_full((rows.shape[0], 1), -torch.inf).float()
    out, lse = flash(q, k, v, scale, None if mask is None else mask.expand(n, -1))
    return out.reshape(rows.shape).float(), lse.reshape(-1, 1)


def _scores(rows: Tensor, head: PackedHead, dtype: torch.dtype) -> Tensor:
    """rows [M, D] float32 -> [M, S] float32."""
    keys, full = head.keys, head.length - head.rest.shape[0]
    if keys.bits == 8 and rows.shape[0] <= BYTES and rows.shape[1] % LANES == 0:
        return _scores_in_bytes(rows, keys)
    score = rows.new_empty(rows.shape[0], head.length)
    group = 1 if keys.zero is None or not full else full // keys.zero.shape[0]
    stretch = max(1, STRETCH // group) * group
    for a in range(0, full, stretch):
        b = min(a + stretch, full)
        if keys.zero is None:
            score[:, a:b] = _widened_scores(rows.to(dtype), keys, a, b)
        else:
            _ranged_scores(rows, keys, a // group, b // group, dtype, score[:, a:b])
    if full < head.length:
        score[:, full:] = rows.to(dtype) @ head.rest.T
    return score


def _scores_in_bytes(rows: Tensor, keys: Rounded) -> Tensor:
    assert keys.scale is not None
    m = rows.shape[0]
    step = rows.abs().amax(1, keepdim=True).div_(127 * DIGIT).clamp_min_(torch.finfo().tiny)  # [M, 1]
    whole = (rows / step).round_()
    high = (whole / DIGIT).round_()
    digits = torch.cat([high, whole.sub_(high, alpha=DIGIT)]).to(torch.int8)  # [2 M, D]
    found = torch._int_mm(digits, keys.codes.T)  # [2 M, S] int32
    score = found[m:].add_(found[:m], alpha=DIGIT).float()
    # in place, one factor at a time: half the time of one call that broadcasts both
    return score.mul_(keys.scale.float()).mul_(step)


def _widened_scores(rows: Tensor, keys: Rounded, a: int, b: int) -> Tensor:
    """rows [M, D] in the store's type times keys a .. b of 16 or 8 bits -> [M, b - a]."""
    if keys.scale is None:
        return rows @ keys.codes[a:b].T
    # codes are exact in every float type, so the scale goes on the score and no key is rounded twice
    return (rows @ keys.codes[a:b].to(rows.dtype).T).float().mul_(keys.scale[a:b].float())


def _ranged_scores(rows: Tensor, keys: Rounded, a: int, b: int, dtype: torch.dtype, into: Tensor) -> None:
    """rows [M, D] float32 times the groups a .. b of keys -> `into` [M, (b - a) * g].

    q (middle + scale * code) = (q * scale) code + q middle: each group has rows of its own, no key is written out.
    """
    group = into.shape[1] // (b - a)
    scale, middle = _middle(keys, a, b)  # [b - a, D]
    codes = _spread(keys.codes[a * group : b * group], keys.bits).to(dtype).view(b - a, group, -1)
    folded = (rows * scale.unsqueeze(1)).to(dtype)  # [b - a, M, D]
    score = torch.bmm(folded, codes.transpose(1, 2))  # [b - a, M, g]
    base = rows @ middle.T  # [M, b - a]
    into.view(rows.shape[0], b - a, group).copy_(score.transpose(0, 1)).add_(base.unsqueeze(2))


def _weigh(mass: Tensor, values: Rounded, dtype: torch.dtype) -> Tensor:
    """mass [M, S] float32, overwritten -> [M, D] float32."""
    if values.bits == 8 and mass.shape[0] <= BYTES:
        return _weigh_in_bytes(mass, values)
    out = mass.new_zeros(())
    for a in range(0, mass.shape[1], STRETCH):
        b = min(a + STRETCH, mass.shape[1])
        part = mass[:, a:b]
        if values.scale is None:
            out = out + part.to(dtype) @ values.codes[a:b]
        elif values.zero is None:
            out = out + part.mul_(values.scale[a:b].float()).to(dtype) @ values.codes[:, a:b].to(dtype).T
        else:
            out = out + _weigh_range(part, values, a, b, dtype)
    return out


def _weigh_range(mass: Tensor, values: Rounded, a: int, b: int, dtype: torch.dtype) -> Tensor:
    """mass [M, b - a] times values a .. b of 4 or 2 bits -> [M, D]; scales go into the mass, middles are added up."""
    scale, middle = _middle(values, a, b)  # [b - a, D / c]
    codes = _spread(values.codes[a:b], values.bits).to(dtype).chunk(scale.shape[1], 1)
    parts = [(mass * s).to(dtype) @ c for s, c in zip(scale.T, codes, strict=True)]
    return torch.stack(parts, 1).float().add_((mass @ middle).unsqueeze(2)).flatten(1)


def _weigh_in_bytes(mass: Tensor, values: Rounded) -> Tensor:
    assert values.scale is not None
    n, room = mass.shape[1], values.codes.shape[1]
    weights = mass.new_empty(mass.shape[0], room, dtype=torch.bfloat16)
    weights[:, n:] = 0
    weights[:, :n] = mass.mul_(values.scale[:n].float())
    ones = weights.new_ones(values.codes.shape[0])
    return torch.ops.aten._weight_int8pack_mm(weights, values.codes, ones).float()


def _middle(r: Rounded, a: int, b: int) -> tuple[Tensor, Tensor]:
    """Scales a .. b, and what the code in the middle of their range stands for; float32.

    From the middle, sums of codes are about as large as what they stand for. From the zero they are larger, and their
    rounding to 16 bits would outlive the difference.
    """
    assert r.scale is not None
    assert r.zero is not None
    scale = r.scale[a:b].float()
    return scale, torch.add(r.zero[a:b].float(), scale, alpha=1 << r.bits - 1)


def _spread(codes: Tensor, bits: int) -> Tensor:
    """[S, m] uint8 -> [S, m * 8 / bits] int8, from the middle: the codes of a byte become bytes of a wider number."""
    if bits == 4:
        wide = codes.to(torch.int16)
        wide = (wide | wide << 4).bitwise_and_(0x0F0F)
    else:
        wide = codes.to(torch.int32)
        wide |= wide << 12
        wide = (wide | wide << 6).bitwise_and_(0x03030303)
    return wide.view(torch.int8).sub_(1 << bits - 1)


@cache
def why_not() -> str:
    """Why this CPU or this torch is not served here; "" if it is. Tries both products, at odd sizes, on first use."""
    if not _has_product():
        return "this torch has no 8-bit products"
    noise = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2048 + 7, 64, generator=noise) for _ in "kv")
    rows = torch.randn(4, 64, generator=noise)
    try:
        return _differs(rows, k, v) or _drags(rows, pack_keys(k, 8, 1))
    except RuntimeError as e:
        return f"torch's int8 products fail here: {str(e).splitlines()[0]}"


def _has_product() -> bool:
    return hasattr(torch.ops.aten, "_weight_int8pack_mm") and hasattr(torch, "_int_mm")


def _differs(rows: Tensor, k: Tensor, v: Tensor) -> str:
    """Whether a product gives something else than its codes say."""
    keys, values = pack_keys(k, 8, 1), pack_values(v, 8, 1)
    score = _scores_in_bytes(rows, keys)
    want = rows @ unpack_keys(keys, rows).T
    if not torch.allclose(score, want, atol=1e-2):
        return "torch's int8 product is wrong on this CPU"
    mass = torch.softmax(want, 1)
    want = mass @ unpack_values(values, rows, mass.shape[1])
    if not torch.allclose(_weigh_in_bytes(mass, values), want, atol=1e-2):
        return "torch's int8 product with packed weights is wrong on this CPU"
    return ""


def _drags(rows: Tensor, keys: Rounded) -> str:
    """Whether the integer product is slower by far than widening: so it is where torch has no kernel for it.

    A factor of 4, so that the answer does not depend on what else the machine does: with a kernel it is 3 times as
    fast, without one 20 times as slow.
    """
    narrow = rows.to(torch.bfloat16)
    ours = _least(lambda: _scores_in_bytes(rows, keys))
    plain = _least(lambda: _widened_scores(narrow, keys, 0, keys.codes.shape[0]))
    return "torch multiplies 8-bit integers slowly on this CPU" if ours > 4 * plain else ""


def _least(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)
