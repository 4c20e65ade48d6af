"""Forms of code_scores: rows in bfloat16, and rows in float32 as three of them."""

from __future__ import annotations

from tests.kernels.variants import Variant

VARIANTS = [
    Variant(
        "kvcli.kernels.quantized_key_scores.fused:scores_kernel",
        f"rows in {kind[1:]}",
        {"p_row": kind, "p_code": "*i8", "p_scale": "*bf16", "p_out": "*fp32", "n_rows": "i32", "s": "i32"},
        {"D": 128, "M": 16, "B": 64, "Y": 128, "THREE": three},
        stages=1,
        products=True,
    )
    for kind, three in (("*bf16", False), ("*fp32", True))
]
