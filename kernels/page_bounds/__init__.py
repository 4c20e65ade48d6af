"""Upper bounds on the scores of pages of keys, from the minimum and maximum of each channel (arXiv 2406.10774).

rows [K, R, D]; low, high [K, P, D], channel-wise bounds of a page's keys -> [K, R, P], the sum over channels of max(q
low, q high): no key of the page has a higher score. In float32, or float64 for float64. The caller ensures low <= high,
and applies scale and softcap later, because both keep the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels import triton_support


def page_bounds(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Compute two products, without an [R, P, D]: positive parts of a query with maxima, negative parts with minima."""
    if triton_support.serves(rows, low, high):
        from kvcli.kernels.page_bounds import fused  # imports Triton, which is not installed everywhere

        return fused.page_bounds(rows, low, high)
    wide = torch.promote_types(rows.dtype, torch.float32)
    rows = rows.to(wide)
    bound = rows.clamp(min=0) @ high.to(wide).transpose(1, 2)
    return bound.baddbmm_(rows.clamp(max=0), low.to(wide).transpose(1, 2))
