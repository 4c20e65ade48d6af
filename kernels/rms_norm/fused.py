"""RMSNorm on a GPU, one program per row, so that it is batch invariant; with what comes before and after it in a layer.

PyTorch sums a row in blocks whose shape depends on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.rms_norm.reference import RMS


def rms_norm(x: Tensor, norm: RMS) -> Tensor:
    """Compute x [..., H] in the weight's dtype -> [..., H]; reference.py defines the forms."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # [N, H]
    y = torch.empty_like(rows)
    _launch(rows, None, norm, norm, None, y)
    return y.view(x.shape)


def add_normed(x: Tensor, y: Tensor, of_y: RMS, norm: RMS | None = None) -> tuple[Tensor, Tensor]:
    """Add the norm of y to x, both [N, H]. Return the sum, and the sum or, with `norm`, its norm."""
    total = torch.empty_like(x)
    normed = None if norm is None else torch.empty_like(x)
    _launch(x, y, of_y, norm or of_y, total, normed)
    return total, total if normed is None else normed


def _launch(x: Tensor, y: Tensor | None, of_y: RMS, norm: RMS, total: Tensor | None, normed: Tensor | None) -> None:
    n, h = x.shape
    block = triton.next_power_of_2(h)
    if n:
        rms_norm_kernel[(n,)](
            *(x, y, of_y.weight, norm.weight, total, normed, of_y.eps, norm.eps),
            **{"H": h, "BLOCK": block, "FORM_Y": of_y.form, "FORM": norm.form},
            num_warps=max(1, min(16, block // 512)),  # depends on the width alone
            enable_fp_fusion=False,
        )


@triton.jit
def rms_norm_kernel(
    p_x, p_y, p_wy, p_w, p_total, p_normed, eps_y, eps, H: tl.constexpr, BLOCK: tl.constexpr, FORM_Y: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Normalize one row, or add the norm of another (p_y, or None) and normalize the sum (if there is p_normed); grid
    (M,)."""
    row = tl.program_id(0).to(tl.int64)
    i_h = tl.arange(0, BLOCK)
    m_h = i_h < H
    dtype: tl.constexpr = p_x.dtype.element_ty
    b_x = tl.load(p_x + row * H + i_h, mask=m_h, other=0.0).to(tl.float32)  # [BLOCK]
    if p_y is not None:
        b_y = tl.load(p_y + row * H + i_h, mask=m_h, other=0.0).to(tl.float32)
        b_x = (b_x + normed(b_y, p_wy, i_h, m_h, _size(b_y, H, eps_y), FORM_Y, dtype).to(tl.float32)).to(dtype)
        tl.store(p_total + row * H + i_h, b_x, mask=m_h)
        b_x = b_x.to(tl.float32)
    if p_normed is not None:
        b_y = normed(b_x, p_w, i_h, m_h, _size(b_x, H, eps), FORM, dtype)
        tl.store(p_normed + row * H + i_h, b_y, mask=m_h)


@triton.jit
def _size(b_x, H: tl.constexpr, eps):
    return tl.rsqrt(tl.sum(b_x * b_x, 0) / H + eps)


@triton.jit
def normed(b_x, p_w, i_h, m_h, size, FORM: tl.constexpr, dtype: tl.constexpr):
    """Multiply numbers of a row by `size`, 1 / root mean square, and by their weights, in the order of a form."""
    b_w = tl.load(p_w + i_h, mask=m_h, other=0.0).to(tl.float32)
    b_x = b_x * size
    if FORM == "round first":
        b_x = b_x.to(dtype).to(tl.float32)
    elif FORM == "one more":
        b_w += 1.0
    return (b_x * b_w).to(dtype)
