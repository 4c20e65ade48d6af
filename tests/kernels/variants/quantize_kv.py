"""Forms of pack: keys by groups of slots, values by groups of channels; 8 bits by slot, values of them transposed."""

from __future__ import annotations

from tests.kernels.variants import Variant

RANGE = {"p_x": "*bf16", "p_code": "*u8", "p_scale": "*fp16", "p_zero": "*fp16", "m": "i32", "d": "i32"}
SCALED = {"p_x": "*bf16", "p_code": "*i8", "p_scale": "*fp16", "s": "i32", "room": "i32"}

VARIANTS = [
    *(
        Variant(
            "kvcli.kernels.quantize_kv.fused:range_kernel",
            f"{of} of {bits} bits",
            RANGE,
            {"BITS": bits, "X": 64, "Y": 64, "DIM": dim},
            stages=1,
            aligned=("d",),
        )
        for bits in (4, 2)
        for dim, of in enumerate(("keys", "values"))
    ),
    *(
        Variant(
            "kvcli.kernels.quantize_kv.fused:scaled_kernel",
            f"{of} of 8 bits",
            SCALED,
            {"D": 128, "X": 32, "Y": 128, "TURNED": turned},
            stages=1,
            aligned=("room",),
        )
        for turned, of in enumerate(("keys", "values"))
    ),
    *(
        Variant(
            "kvcli.kernels.quantize_kv.fused:turn_kernel",
            f"Hadamard, {d} numbers in {kind[1:]}",
            {"p_x": kind, "p_out": "*fp32", "by": "fp32", "n_rows": "i32"},
            {"D": d, "M": 16, "X": 64, "B": 32, "THREE": kind == "*fp32"},
            stages=1,
            products=True,
        )
        for d, kind in ((128, "*bf16"), (64, "*fp32"), (256, "*fp32"))
    ),
]
