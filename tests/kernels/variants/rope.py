"""Forms of rotate: both ways, both kinds of pairs, 16 and 32 bits."""

from __future__ import annotations

from tests.kernels.variants import Variant

VARIANTS = [
    Variant(
        "kvcli.kernels.rope.fused:rotate_kernel",
        f"{kind}, {'back' if back else 'forth'}, {'neighbours' if near else 'halves'}",
        {"p_k": kind, "p_pos": "*i32", "p_freq": "*fp32", "p_out": kind, "scaling": "fp32", "s": "i32"},
        {"R": 64, "D": 128, "X": 8, "P": 64, "Y": 128, "NEAR": near, "BACK": back},
        stages=1,
    )
    for kind, near, back in (("*bf16", False, False), ("*bf16", True, True), ("*fp32", False, True))
]
