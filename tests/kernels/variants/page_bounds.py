"""Forms of page_bounds: boxes in bfloat16 and in float32."""

from __future__ import annotations

from tests.kernels.variants import Variant

VARIANTS = [
    Variant(
        "kvcli.kernels.page_bounds.fused:bounds_kernel",
        f"boxes in {kind[1:]}",
        {"p_row": "*fp32", "p_low": kind, "p_high": kind, "p_out": "*fp32", "n_rows": "i32", "n_pages": "i32"},
        {"D": 128, "X": 16, "Y": 128},
        stages=1,
    )
    for kind in ("*bf16", "*fp32")
]
