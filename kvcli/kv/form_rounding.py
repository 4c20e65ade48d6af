"""Rounding that forms share: numbers in ranges of few bits, and back (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.pack import round_range, spread, squeeze, width_of
from kvcli.kv.form_blocks import Codes


def rounded(x: Tensor, bits: int, dim: int) -> Codes:
    """x [.., D] by ranges along `dim` -> codes [.., D * bits / 8], scale and zero with that dimension 1."""
    codes, scale, zero = round_range(x, bits, dim)
    return squeeze(codes, bits), scale, zero


def numbers(of: Codes, bits: int, exact: torch.dtype) -> Tensor:
    """The inverse, but for rounding, in the type `exact`."""
    codes, scale, zero = of
    return zero.to(exact) + spread(codes, bits).to(exact) * scale.to(exact)


def by_slot(v: Tensor, bits: int, group: int) -> Codes:
    """Values [.., E] of each slot, by groups of at most `group` channels."""
    codes, scale, zero = round_range(grouped(v, v.shape[-1] // width_of(v.shape[-1], group)), bits, -1)
    return squeeze(codes.flatten(-2), bits), scale.squeeze(-1), zero.squeeze(-1)


def of_slots(of: Codes, bits: int, exact: torch.dtype) -> Tensor:
    """The inverse, but for rounding."""
    codes, scale, zero = of
    q = grouped(spread(codes, bits).to(exact), scale.shape[-1])
    return (zero.to(exact).unsqueeze(-1) + q * scale.to(exact).unsqueeze(-1)).flatten(-2)


def grouped(x: Tensor, groups: int) -> Tensor:
    """x [.., D] -> [.., groups, D / groups]."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
