"""Linear layers for few rows on a GPU: weights in 16 bits, int8, int4 in kvcli's groups, nf4, or llama.cpp's blocks.

Layouts: x [..., K], weight [N, K], bias [N], result [..., N], in bfloat16 or float16 throughout.
  plain: the unchanged weight
  int8, int4: the codes and scales of kernels/linear_quantized in the order of `reference.arrange`
  nf4: the codes of bitsandbytes in the same order
  blocks8, blocks4, iq4, mxfp4: the codes of llama.cpp's blocks in the same order, with the scales of their formats
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
from kvcli.kernels.linear_quantized.formats import parts_of
from kvcli.kernels.linear_skinny.reference import BLOCK, Kind, Weight, arrange, arrange_scales, no_arrivals

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
    return Weight("plain", (n, k), weight, no_arrivals(n, weight.device))


def pack8(q: Tensor, scale: Tensor) -> Weight:
    """Build a weight from codes [N, K] and scales [N] of kernels/linear_quantized."""
    return _of_codes("int8", q, scale, 0)


def pack4(q: Tensor, scale: Tensor, group: int) -> Weight:
    """Build a weight from codes [N, K] in 0..15, scale and zero [K // g, N, 2] of kernels/linear_quantized."""
    return _of_codes("int4", q, arrange_scales(scale), group)


def of_packed(w: QuantizedWeight) -> Weight:
    """Build a weight of the same numbers from kvcli's quantized weight in portable order, or from blocks in panels."""
    if w.format.span:
        return _of_blocks(w)
    return pack4(w.codes, w.scale, w.group) if w.bits == 4 else pack8(w.data, w.scale)


def pack_nf4(q: Tensor, largest: Tensor) -> Weight:
    """Build a weight from NF4 codes [N, K] and the largest number per 64 of a row, [N, K // 64].

    float16 stores the largest numbers far more precisely than the eight bits that bitsandbytes rounds them to.
    """
    return _of_codes("nf4", q, arrange_scales(largest.T.to(torch.float16)), 64)


def _of_codes(kind: Kind, q: Tensor, scale: Tensor, group: int) -> Weight:
    n, k = q.shape
    return Weight(kind, (n, k), arrange(q, kind), no_arrivals(n, q.device), scale, group)


def _of_blocks(w: QuantizedWeight) -> Weight:
    """Rearrange the panels of a weight, some rows at a time."""
    of, (n, k), device = w.format, w.shape, w.data.device
    kind: Kind = ("mxfp4" if of.is_bf16 else "iq4") if of.table else "blocks4" if of.bits <= 4 else "blocks8"
    step, found = max(1, STRETCH // 4 // (k * BLOCK)) * BLOCK, list[tuple[Tensor, ...]]()
    for rows in torch.arange(n, device=device).split(step):
        q, *scales = parts_of(rows, w.data, w.scale, of)
        if not of.table and not of.has_min:  # blocks4 are less 8, blocks8 are signed
            q = q + (8 - of.offset) if kind == "blocks4" else (q - of.offset)
        by_group = (t.flatten(1, -2).transpose(0, 1) for t in scales if t is not None)  # [groups, R, 1 or 2]
        arranged = (arrange_scales(t if of.has_min else t.squeeze(-1)) for t in by_group)
        found.append((arrange(q, kind), *arranged))
    data, *rest = zip(*found, strict=True)
    scale, factor = (*(torch.cat(parts, dim=1) for parts in rest), None)[:2]
    return Weight(kind, (n, k), torch.cat(data), no_arrivals(n, device), scale, of.group, factor)


def linear_skinny(x: Tensor, w: Weight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Compute x [..., K] -> [..., N], added to `residual` [M, N]."""
    n, k = w.shape
    of = w.data if w.kind == "plain" else w.scale if w.kind in ("int8", "int4") else x
    dtype = x.dtype if of is None else of.dtype
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
    rows = max(1, STRETCH // (k * x.itemsize * BLOCK)) * BLOCK
    for a in range(0, n, rows):
        b = min(a + rows, n)
        y[:, a:b] = functional.linear(x, fused.widen(w, a, b, x.dtype))
    if w.kind == "int8" and w.scale is not None:
        y *= w.scale  # on the result, so that no weight is rounded twice
    return y if bias is None else y.add_(bias)


__all__ = ["MOST", "Kind", "Weight", "linear_skinny", "of_packed", "pack4", "pack8", "pack_nf4", "plain", "why_not"]
