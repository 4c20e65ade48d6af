"""Linear layers for few rows on a GPU, with weights in 16 bits, int8, int4 in kvcli's groups, or nf4.

Layouts: x [..., K], weight [N, K], bias [N], result [..., N], in bfloat16 or float16 throughout.
  plain: the unchanged weight
  int8, int4: the codes and scales of kernels/linear_quantized in the order of `reference.arrange`
  nf4: the codes of bitsandbytes in the same order
A row is batch invariant in passes of at most MOST rows, which are decoding passes. Larger passes, as in prefill, use
the fastest product; quantized weights are then dequantized to the dtype of the inputs, a part at a time. `why_not`
rejects inputs that are no multiple of 16, because each weight row must begin at a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels import triton_support
from kvcli.kernels.linear_quantized import QuantizedWeight
from kvcli.kernels.linear_skinny import reference
from kvcli.kernels.linear_skinny.reference import Kind, Weight

MOST = 64  # most rows of a batch-invariant pass; each 32 rows read the weight again
STRETCH = 64 << 20  # bytes of a quantized weight that are dequantized at a time


def why_not(weight: Tensor) -> str:
    """Return why a weight [N, K] in 16 bits is not supported on its device; "" if it is."""
    if why := triton_support.why_not(weight.device, weight.dtype):
        return why
    if not weight.is_contiguous():
        return "its rows are not contiguous"
    return f"{weight.shape[1]} inputs are not a multiple of 16" if weight.shape[1] % 16 else ""


def plain(weight: Tensor) -> Weight:
    """Build a weight from an unchanged one, [N, K]."""
    n, k = weight.shape
    return Weight("plain", (n, k), weight, reference.no_arrivals(n, weight.device))


def pack8(q: Tensor, scale: Tensor) -> Weight:
    """Build a weight from codes [N, K] and scales [N] of kernels/linear_quantized."""
    return _of_codes("int8", q, scale, 0)


def pack4(q: Tensor, scale: Tensor, group: int) -> Weight:
    """Build a weight from codes [N, K] in 0..15, scale and zero [K // g, N, 2] of kernels/linear_quantized."""
    return _of_codes("int4", q, reference.arrange_scales(scale), group)


def of_packed(w: QuantizedWeight) -> Weight:
    """Build a weight from kvcli's quantized weight in portable order."""
    return pack4(w.codes, w.scale, w.group) if w.bits == 4 else pack8(w.data, w.scale)


def pack_nf4(q: Tensor, largest: Tensor) -> Weight:
    """Build a weight from NF4 codes [N, K] and the largest number per 64 of a row, [N, K // 64].

    float16 stores the largest numbers far more precisely than the eight bits that bitsandbytes rounds them to.
    """
    return _of_codes("nf4", q, reference.arrange_scales(largest.T.to(torch.float16)), 64)


def _of_codes(kind: Kind, q: Tensor, scale: Tensor, group: int) -> Weight:
    n, k = q.shape
    return Weight(kind, (n, k), reference.arrange(q, kind), reference.no_arrivals(n, q.device), scale, group)


def linear_skinny(x: Tensor, w: Weight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Compute x [..., K] -> [..., N], added to `residual` [M, N]."""
    n, k = w.shape
    dtype = x.dtype if w.kind == "nf4" else (w.data if w.scale is None else w.scale).dtype
    if x.shape[-1] != k or x.dtype != dtype or dtype not in triton_support.TYPES:
        raise ValueError(f"{x.shape[-1]} inputs in {x.dtype} for a weight of {k} in {dtype} ({w.kind})")
    rows = x.reshape(-1, k).contiguous()  # [M, K]
    if rows.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], n)
    # imported late, because there may be no Triton where nothing is supported
    from kvcli.kernels.linear_skinny import fused

    if rows.shape[0] <= MOST:
        y = fused.linear(rows, w, bias, residual=residual)
    else:
        y = _many(rows, w, bias)
        y = y if residual is None else y.add_(residual)
    return y.view(*x.shape[:-1], n)


def _many(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    """Compute x [M, K] -> [M, N] by torch's product."""
    from kvcli.kernels.linear_skinny import fused

    n, k = w.shape
    if w.kind == "plain":
        return functional.linear(x, w.data, bias)
    y = x.new_empty(x.shape[0], n)
    rows = max(1, STRETCH // (k * x.itemsize * reference.BLOCK)) * reference.BLOCK
    for a in range(0, n, rows):
        b = min(a + rows, n)
        y[:, a:b] = functional.linear(x, fused.widen(w, a, b, x.dtype))
    if w.kind == "int8" and w.scale is not None:
        y *= w.scale  # on the result, so that no weight is rounded twice
    return y if bias is None else y.add_(bias)


__all__ = ["MOST", "Kind", "Weight", "linear_skinny", "of_packed", "pack4", "pack8", "pack_nf4", "plain", "why_not"]
