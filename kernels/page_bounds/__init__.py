"""Upper bounds on the scores of pages of keys, from the smallest and largest number of each channel (arXiv 2406.10774).

rows [K, R, D]; low, high [K, P, D], channel-wise bounds of a page's keys -> [K, R, P], the sum over channels of
max(q low, q high): no key of the page scores more. In float32, or float64 for float64. low <= high is the caller's
business; scale and softcap come later, as both keep the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels import triton_support


def page_bounds(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Two products: positive parts of a query meet the maxima, negative ones the minima. No [R, P, D] exists."""
    if triton_support.serves(rows, low, high):
        from kvcli.kernels.page_bounds import fused  # brings Triton, which is not everywhere

        return fused.page_bounds(rows, low, high)
    wide = torch.promote_types(rows.dtype, torch.float32)
    rows = rows.to(wide)
    bound = rows.clamp(min=0) @ high.to(wide).transpose(1, 2)
    return bound.baddbmm_(rows.clamp(max=0), low.to(wide).transpose(1, 2))
