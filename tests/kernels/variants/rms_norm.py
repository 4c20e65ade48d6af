"""RMSNorm in the widths of an 8B model: of hidden states and of heads."""

from __future__ import annotations

from tests.kernels.variants import Variant

VARIANTS = [
    Variant(
        kernel="kvcli.kernels.rms_norm.fused:rms_norm_kernel",
        name=f"{form}, {h}",
        types={"p_x": "*bf16", "p_w": "*bf16", "p_y": "*bf16", "eps": "fp32"},
        consts={"H": h, "BLOCK": block, "FORM": form},
        warps=warps,
    )
    for form in ("round first", "one more", "round last")
    for h, block, warps in ((4096, 4096, 8), (2880, 4096, 8), (128, 128, 1))
]
