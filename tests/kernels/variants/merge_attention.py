"""Forms of merging: spans of rows, and parts."""

from __future__ import annotations

from tests.kernels.variants import Variant

STRIDES = ("out_head", "out_row")
TYPES = {
    **dict.fromkeys("p_outs p_lses p_sink p_lse".split(), "*fp32"),
    **dict.fromkeys([*"n_rows n_parts lse_head lse_row".split(), *STRIDES], "i32"),
    "p_rows": "*i32",
    "p_out": "*bf16",
}
KERNEL = "kvcli.kernels.merge_attention.fused:merge_kernel"
VARIANTS = [
    Variant(KERNEL, f"{name}, heads of {e}", TYPES, {"E": e, "EP": wide, "AT_ONCE": at_once, **none}, aligned=STRIDES)
    for name, at_once, none in (
        ("spans", 32, {"p_sink": None}),
        ("spans with a sink", 32, {}),
        ("parts", 1, {"p_rows": None}),
    )
    for e, wide in ((128, 128), (80, 128), (256, 256))
]
