"""Attention of rows over quantized slots on a CPU: 8-bit products for few rows, dequantized codes for more.

Keys. A row becomes two signed bytes per number, 128 * high + low, which is 14 bits against the 8 of bfloat16.
`torch._int_mm` multiplies them by the codes directly: 0.39 ms for a layer of 16k slots (4 KV heads of 64, groups of 4,
one thread, AVX512-VNNI). A bfloat16 product takes 0.6 ms, and so does `_weight_int8pack_mm`, which adds up across each
short row of 64. Sums are of integers, so they do not depend on the number of rows.
Values. `_weight_int8pack_mm` over codes stored transposed, their scales multiplied into the probabilities: 0.3 ms where
bfloat16 takes 0.7. It is fast in bfloat16 only, and reads 16 slots at a time without handling a remainder.
Both are slower than bfloat16 products for many rows, which use matrix units. There are no products for fewer bits than
8; their codes are unpacked, converted and multiplied. A head's slots are processed all at once: in parts of 2048 to
8192 slots the products take half as long again, and no other step gets faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.attend.cpu import FEW, LOG2E, flash
from kvcli.kernels.attend_quantized import reference
from kvcli.kernels.attend_quantized.table import PackedHead
from kvcli.kernels.quantize_kv import LANES, Rounded, unpack_keys, unpack_values

BYTES = 16  # rows times query heads per KV head; with more, codes are dequantized
DIGIT = 128


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one KV head, scaled, in the formats that the products need."""

    wide: Tensor  # [M, D] float32
    narrow: Tensor  # [M, D] in the dtype of the KV cache
    digits: Tensor  # [2 M, D] int8, high ones first; wide = step * (128 * high + low)
    step: Tensor  # [M, 1]


def attend_quantized(
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
        return reference.attend_quantized(q, heads, scale, dtype, softcap, masks)
    rows = q.reshape(len(heads), m, d)
    if m > FEW:
        found = [_many(*each, n, scale, dtype) for each in zip(rows, heads, masks, strict=True)]
        out, lse = torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
        return out.view(h, n, -1), lse.view(h, n)
    # base 2 throughout: exp2 is three times as fast as exp
    wide = rows.float() * (scale / softcap if softcap > 0 else scale * LOG2E)
    forms = zip(wide, wide.to(dtype), *in_digits(wide), strict=True)
    each = [_few(_Rows(*form), head, mask, n, softcap) for form, head, mask in zip(forms, heads, masks, strict=True)]
    out, mass, top = (torch.stack(list(ts)) for ts in zip(*each, strict=True))
    return (out / mass.clamp_min(torch.finfo(torch.float32).tiny)).view(h, n, -1), mass.log2().add_(top).div_(
        LOG2E
    ).view(h, n)


def _few(rows: _Rows, head: PackedHead, mask: Tensor | None, n: int, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sum of values [M, E], the sum of weights [M, 1], and the score that they are relative to."""
    m = rows.wide.shape[0]
    if not head.length:
        return rows.wide.new_zeros(m, head.v_dim), rows.wide.new_zeros(m, 1), rows.wide.new_zeros(m, 1)
    score = _scores(rows, head)  # [M, S] float32
    if softcap > 0:
        score.tanh_().mul_(softcap * LOG2E)
    if mask is not None:
        score.masked_fill_(~(mask if mask.shape[0] == 1 else mask.repeat(m // n, 1)), -torch.inf)
    top = score.amax(-1, keepdim=True)
    if mask is not None:
        top.masked_fill_(top == -torch.inf, 0.0)  # a row that sees no slot: exp2(-inf - -inf) would be NaN
    weights = score.sub_(top).exp2_()
    mass = weights.sum(-1, keepdim=True)
    return _weigh(weights, head.values, rows.narrow.dtype), mass, top


def _many(
    rows: Tensor, head: PackedHead, mask: Tensor | None, n: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attend with many rows: dequantize keys and values once, then use torch's flash kernel, which stores no scores."""
    if not head.length:
        return rows.new_zeros(rows.shape[0], head.v_dim).float(), rows.new_full((rows.shape[0], 1), -torch.inf).float()
    like = rows.new_empty(0, dtype=dtype)
    k = torch.cat([unpack_keys(head.keys, like), head.rest]).unsqueeze(0)
    v = unpack_values(head.values, like, head.length).unsqueeze(0)
    q = rows.to(dtype).view(-1, n, rows.shape[1])
    out, lse = flash(q, k, v, scale, None if mask is None else mask.expand(n, -1))
    return out.flatten(0, 1).float(), lse.reshape(-1, 1)


def in_digits(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Split [.., M, D] float32 -> digits [.., 2 M, D] int8 and steps [.., M, 1]: 14 bits of each number."""
    step = wide.abs().amax(-1, keepdim=True).div_(127 * DIGIT).clamp_min_(torch.finfo(torch.float32).tiny)
    whole = (wide / step).round_()
    high = (whole / DIGIT).round_()
    return torch.cat([high, whole.sub_(high, alpha=DIGIT)], -2).to(torch.int8), step


def _scores(rows: _Rows, head: PackedHead) -> Tensor:
    """Multiply rows and all keys -> [M, S] float32, which the caller may overwrite."""
    keys, (m, d) = head.keys, rows.wide.shape
    if keys.zero is not None:
        score = _ranged_scores(rows, keys)
    elif keys.bits == 8 and m <= BYTES and d % LANES == 0:
        score = scores_in_bytes(rows.digits, rows.step, keys)
    else:
        score = widened_scores(rows.narrow, keys)
    if not head.rest.shape[0]:
        return score
    return torch.cat([score, (rows.narrow @ head.rest.T).float()], 1)


def scores_in_bytes(digits: Tensor, step: Tensor, keys: Rounded) -> Tensor:
    """Multiply rows from `in_digits` and keys of 8 bits, without conversion -> [M, S] float32."""
    assert keys.scale is not None
    m = step.shape[0]
    found = torch._int_mm(digits, keys.codes.T)  # [2 M, S] int32
    score = found[m:].add_(found[:m], alpha=DIGIT).float()
    # in place, one factor at a time: half the time of one call that broadcasts both
    return score.mul_(keys.scale.float()).mul_(step)


def widened_scores(narrow: Tensor, keys: Rounded) -> Tensor:
    """Multiply rows [M, D] in the dtype of the KV cache and keys of 16 or 8 bits -> [M, S] float32."""
    if keys.scale is None:
        return (narrow @ keys.codes.T).float()
    # codes are exact in every float type; scaling the score avoids rounding keys twice
    return (narrow @ keys.codes.to(narrow.dtype).T).float().mul_(keys.scale.float())


def _ranged_scores(rows: _Rows, keys: Rounded) -> Tensor:
    """Multiply rows and keys of 4 or 2 bits -> [M, S] float32.

    q (middle + scale * code) = (q * scale) code + q middle: rows are scaled for each group, and no key is dequantized.
    """
    scale, middle = _middle(keys)  # [groups, D]
    groups, d = scale.shape
    if not groups:
        return rows.wide.new_empty(rows.wide.shape[0], 0)
    codes = _spread(keys.codes, keys.bits).to(rows.narrow.dtype).view(groups, -1, d)
    folded = (rows.wide * scale.unsqueeze(1)).to(codes.dtype)  # [groups, M, D]
    score = torch.bmm(folded, codes.transpose(1, 2)).float()  # [groups, M, g]
    score += (middle @ rows.wide.T).unsqueeze(2)
    return score.transpose(0, 1).flatten(1)


def _weigh(weights: Tensor, values: Rounded, dtype: torch.dtype) -> Tensor:
    """Multiply weights [M, S] float32, overwritten, and all values -> [M, E] float32."""
    if values.scale is None:
        return (weights.to(dtype) @ values.codes).float()
    if values.zero is not None:
        return _weigh_range(weights, values, dtype)
    if weights.shape[0] <= BYTES:
        return weigh_in_bytes(weights, values)
    n = weights.shape[1]
    return (weights.mul_(values.scale[:n].float()).to(dtype) @ values.codes.to(dtype)[:, :n].T).float()


def _weigh_range(weights: Tensor, values: Rounded, dtype: torch.dtype) -> Tensor:
    """Multiply weights and values of 4 or 2 bits: scales are multiplied into the weights, middles are added."""
    scale, middle = _middle(values)  # [S, D / c]
    codes = _spread(values.codes, values.bits).to(dtype).chunk(scale.shape[1], 1)
    parts = [(weights * s).to(dtype) @ c for s, c in zip(scale.T, codes, strict=True)]
    return torch.stack(parts, 1).float().add_((weights @ middle).unsqueeze(2)).flatten(1)


def weigh_in_bytes(weights: Tensor, values: Rounded) -> Tensor:
    """Multiply weights and values of 8 bits, without conversion."""
    assert values.scale is not None
    n, room = weights.shape[1], values.codes.shape[1]
    narrow = weights.new_zeros if room > n else weights.new_empty
    scaled = narrow((weights.shape[0], room), dtype=torch.bfloat16)
    scaled[:, :n] = weights.mul_(values.scale[:n].float())
    ones = scaled.new_ones(values.codes.shape[0])
    return torch.ops.aten._weight_int8pack_mm(scaled, values.codes, ones).float()


def _middle(r: Rounded) -> tuple[Tensor, Tensor]:
    """Return the scales, and the value of the middle code of each range; float32.

    Relative to the middle, sums of codes are about as large as the sums of values. Relative to the zero they are
    larger, and their rounding to 16 bits would exceed the difference.
    """
    assert r.scale is not None
    assert r.zero is not None
    scale = r.scale.float()
    return scale, torch.add(r.zero.float(), scale, alpha=1 << r.bits - 1)


def _spread(codes: Tensor, bits: int) -> Tensor:
    """Unpack [S, m] uint8 -> [S, m * 8 / bits] int8, relative to the middle, by shifts within wider integers."""
    if bits == 4:
        wide = codes.to(torch.int16)
        wide = (wide | wide << 4).bitwise_and_(0x0F0F)
    else:
        wide = codes.to(torch.int32)
        wide |= wide << 12
        wide = (wide | wide << 6).bitwise_and_(0x03030303)
    return wide.view(torch.int8).sub_(1 << bits - 1)
