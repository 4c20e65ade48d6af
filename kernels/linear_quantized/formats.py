"""Formats of quantized weights: their codes and scales in panels of 64 outputs, as the CPU kernel reads them.

A weight is scale * (code - offset) + zero. native/c/linear_quantized.c describes the order of the bytes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

PANEL = 64
UNIT = 32  # inputs whose codes are in one piece
# order of the words of a unit, by bits: a word of high bits before the words of low bits that are read with it
_ORDER = {2: [0, 1], 3: [2, 0, 1], 4: [0, 1, 2, 3], 5: [4, 0, 1, 2, 3], 6: [4, 0, 1, 5, 2, 3]}


@dataclass(frozen=True)
class Format:
    """Layout of the codes and scales of one kind of weight."""

    bits: int  # per code: 2, 3, 4, 5, 6 or 8
    group: int = 0  # inputs that share a scale; 0 = all inputs of an output
    offset: int = 0  # subtracted from a code
    span: int = 0  # inputs that share a float16 scale d, 32 or 256; 0 = scales are in the dtype of the inputs
    has_min: bool = False  # with a float16 `least` beside d: zero is -least
    factor_bits: int = 0  # of the factors of d and least in each group: 8, 4, or 0 for none
    is_bf16: bool = False  # d is bfloat16, because its exponents exceed those of float16
    table: tuple[int, ...] = ()  # 16 values that replace the codes of 4 bits, plus the offset

    @property
    def address(self) -> int:
        """The address of the struct in native/c/linear_quantized.c, the same for equal formats."""
        return ctypes.addressof(_struct(self))

    @property
    def per_span(self) -> int:
        """Bytes of the scales of one output in a span."""
        factors = (1 + self.has_min) * self.factor_bits // 8
        return 2 * (1 + self.has_min) + factors * (self.span // self.group)

    def nbytes(self, n: int, k: int) -> tuple[int, int]:
        """Bytes of the codes and of the scales of a weight [n, k] in panels; of formats with a span."""
        padded = -(-n // PANEL) * PANEL
        return padded * k * self.bits // 8, padded * (k // self.span) * self.per_span


class _Struct(ctypes.Structure):
    _fields_ = [
        *((field.name, ctypes.c_int64) for field in fields(Format) if field.name != "table"),
        ("has_table", ctypes.c_int64),
        ("table", ctypes.c_uint8 * 16),
    ]


@cache
def _struct(of: Format) -> _Struct:
    numbers = [int(getattr(of, field.name)) for field in fields(Format) if field.name != "table"]
    return _Struct(*numbers, bool(of.table), (ctypes.c_uint8 * 16)(*of.table))


@cache
def group_format(bits: int, group: int) -> Format:
    """Return kvcli's own format: 8 bits with a scale per output, or 4 bits with a scale and a zero per group."""
    return Format(bits, group, offset=128 if bits == 8 else 8)


def arrange_panels(q: Tensor, bits: int) -> Tensor:
    """Arrange codes [N, K], int8 or from 0 -> bytes [ceil(N / 64), K * bits / 32, 64, 4], zeros beyond N outputs."""
    codes, k = _padded(q), q.shape[1]
    if bits == 8:
        words = codes.view(torch.uint8).view(-1, PANEL, k // 4, 4)
        return (words ^ 128 if q.dtype == torch.int8 else words).transpose(1, 2).contiguous()
    low = _low(bits)
    planes = [_join(codes & (1 << low) - 1, low)] + ([_join(codes >> low, bits - low)] if bits > low else [])
    words = torch.cat(planes, dim=3)[:, :, :, _ORDER[bits]]
    return words.permute(0, 2, 3, 1, 4).flatten(1, 2).contiguous()


def arrange_scales(scales: Tensor, format: Format) -> Tensor:
    """Arrange [N, K / span, bytes], by output d, least, then factors -> [ceil(N / 64), K / span, bytes of a panel]."""
    halves = 2 * (1 + format.has_min)
    by_panel = _padded(scales).view(-1, PANEL, *scales.shape[1:]).permute(0, 2, 3, 1)  # [P, spans, bytes, 64]
    d = by_panel[:, :, :halves].unflatten(2, (-1, 2)).transpose(3, 4)  # both bytes of a number beside each other
    return torch.cat([d.flatten(2), by_panel[:, :, halves:].flatten(2)], dim=2)


def parts_of(index: Tensor, data: Tensor, scale: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """Read rows `index` [R] of a weight in panels whose format has a span: codes [R, K] uint8, then d and perhaps
    `least` [R, spans, 1 or 2] and their factors [R, spans, groups, 1 or 2] int8, None if it has none."""
    at, panel, bits = index % PANEL, index // PANEL, format.bits
    words, low = data[panel, :, at], _low(bits)  # [R, words, 4]
    if bits == 8:
        codes = words.flatten(1)
    else:
        units = words.unflatten(1, (-1, bits))[:, :, sorted(range(bits), key=_ORDER[bits].__getitem__)]
        codes = _split(units[:, :, :low], low)
        if bits > low:
            codes |= _split(units[:, :, low:], bits - low) << low
    halves = 2 * PANEL * (1 + format.has_min)
    d = scale[..., :halves].view(torch.bfloat16 if format.is_bf16 else torch.float16).unflatten(2, (-1, PANEL))
    if not format.factor_bits:
        return codes, d[panel, :, :, at], None
    per_group = 1 + format.has_min if format.factor_bits == 8 else 1
    factors = scale[..., halves:].unflatten(2, (-1, per_group, PANEL))[panel, :, :, :, at]
    if format.factor_bits == 4:
        factors = torch.cat([factors & 15, factors >> 4], dim=3)
    return codes, d[panel, :, :, at], factors.view(torch.int8)


def rows_of(index: Tensor, data: Tensor, scale: Tensor, format: Format) -> Tensor:
    """Dequantize rows `index` [R] of a weight in panels whose format has a span -> [R, K] float32."""
    codes, d, factors = parts_of(index, data, scale, format)
    if format.table:
        codes = torch.tensor(format.table, dtype=torch.uint8)[codes.long()]
    pair = d.float().unsqueeze(2)
    if factors is not None:
        pair = pair * factors.float()  # [R, spans, groups, 1 or 2]
    by_group = codes.view(len(index), *pair.shape[1:2], -1, format.group)
    w = (by_group.float() - format.offset) * pair[..., :1]
    return (w - pair[..., 1:] if format.has_min else w).flatten(1)


def _low(bits: int) -> int:
    """Bits of a code in its first plane."""
    return 8 if bits == 8 else 4 if bits >= 4 else 2


def _padded(rows: Tensor) -> Tensor:
    whole = rows.new_zeros(-(-rows.shape[0] // PANEL) * PANEL, *rows.shape[1:])
    whole[: rows.shape[0]] = rows
    return whole


def _join(part: Tensor, bits: int) -> Tensor:
    """Join parts of codes [N, K] to the words of a plane, [N / 64, 64, K / 32, bits, 4]."""
    by_word = part.view(-1, PANEL, part.shape[1] // UNIT, bits, 8 // bits, 4)
    words = by_word[..., 0, :].clone()
    for i in range(1, 8 // bits):
        words |= by_word[..., i, :] << i * bits
    return words


def _split(words: Tensor, bits: int) -> Tensor:
    """Invert `_join` for some rows: [R, K / 32, bits, 4] -> [R, K]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device).view(-1, 1)
    return (words.unsqueeze(3) >> shifts & (1 << bits) - 1).flatten(1)
