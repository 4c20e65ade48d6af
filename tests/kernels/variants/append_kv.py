"""Forms of storing accepted rows."""

from __future__ import annotations

from kvcli.kernels.append_kv import COLUMNS
from tests.kernels.variants import Variant

TYPES = {"p_layers": "*i64", **dict.fromkeys(("p_path", "p_count", "p_row_pos"), "*i32"), "p_like": "*bf16"}
VARIANTS = [
    Variant(
        "kvcli.kernels.append_kv.fused:append_kernel",
        f"heads of {d}",
        TYPES,
        {"COLUMNS": COLUMNS, "D": d, "E": d, "DP": wide, "EP": wide, "R": 16},
    )
    for d, wide in ((128, 128), (80, 128), (256, 256))
]
