"""Bytes that a pass takes beside weights, keys and values, on a device whose room is divided by them.

By the shapes of the model alone, so that it is known before the first pass; `kvcli.fit` counts more closely.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.kernels import gpu
from kvcli.kernels.attend.reference import BLOCK

if TYPE_CHECKING:
    import torch

    from kvcli.engine.lm import LM

WIDE = 4  # bytes of a float32
LOGITS = 16  # rows whose logits are wanted at once, at most; three copies in float32 while one is drawn


def pass_bytes(lm: LM, rows: int, dtype: torch.dtype) -> int:
    """Of so many rows: what one layer computes, scores where no kernel keeps them, fresh keys and values, logits."""
    config = lm.model.config.get_text_config()
    hidden: int = config.hidden_size
    inner: int = getattr(config, "intermediate_size", None) or 4 * hidden
    widths = (h * max(s.k_dim, s.v_dim) for h, s in zip(lm.heads, lm.shapes, strict=True))
    width, number = max(widths), lm.dtype.itemsize
    layer = rows * (number * (2 * hidden + 3 * (inner + width)) + 3 * WIDE * width)
    scores = 3 * lm.n_heads * rows * BLOCK * WIDE if gpu.why_not(lm.device, dtype) else 0
    fresh = rows * sum(of.numbers for of in lm.shapes) * dtype.itemsize
    return layer + scores + fresh + 3 * LOGITS * lm.vocab * WIDE
