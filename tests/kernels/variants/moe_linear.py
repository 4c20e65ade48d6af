"""Experts in the shapes of Qwen3 30B-A3B: 128 of them, 8 for a row, 2,048 inputs."""

from __future__ import annotations

import torch

from kvcli.kernels.linear_skinny import ptx
from tests.kernels.variants import Variant

ASM = ptx.int4_bytes(torch.bfloat16)
OP = "kvcli.kernels.moe_linear.fused"
TYPES = {
    **dict.fromkeys(("p_x", "p_bias", "p_y", "p_out", "p_weight"), "*bf16"),
    **dict.fromkeys(("p_order", "p_table"), "*i32"),
    **dict.fromkeys(("P", "U", "by_w", "by_scale"), "i32"),
    "p_ids": "*i64",
}
# the types of weights and scales, bytes of codes in a tile of 64 x 128
KINDS = {"plain": ("*bf16", "*bf16", 16384), "int8": ("*i8", "*bf16", 8192), "int4": ("*u8", "*i32", 4096)}
BUDGETS = {"plain": 107, "int8": 308, "int4": 296}  # for 16 rows


def _experts(kind: str, rows: int, group: int = 0) -> Variant:
    w, scale, size = KINDS[kind]
    consts = {"N": 1536, "K": 2048, "TOP": 8, "GROUP": group, "BM": rows, "BN": 64, "BK": group or 128, "KIND": kind}
    return Variant(
        kernel=f"{OP}:moe_kernel",
        name=f"{kind}{f' by {group}' if group else ''}, {rows} rows",
        types={**TYPES, "p_w": w, "p_scale": scale},
        consts=consts | {"IS_TURNED": False, "HAS_BIAS": False, "ASM": ASM if kind == "int4" else ""},
        stages=3,
        aligned=("by_w", "by_scale"),
        budget=BUDGETS[kind] if rows == 16 and group in (0, 128) else None,
        streams=rows == 16,
        products=rows == 16,  # of prompts, rows need no bits of their own
        tile_bytes=size * (group or 128) // 128,
    )


VARIANTS = [
    *(_experts(kind, 16, 128 * (kind == "int4")) for kind in KINDS),
    _experts("int4", 16, 64),
    *(_experts(kind, 64, 128 * (kind == "int4")) for kind in KINDS),
    Variant(
        kernel=f"{OP}:lists_kernel", name="lists of 512 pairs", types=TYPES, consts={"E": 128, "PP": 512, "EP": 128},
        stages=3,
    ),
    Variant(
        kernel=f"{OP}:combine_kernel", name="sum of 8 experts", types=TYPES,
        consts={"N": 2048, "TOP": 8, "BLOCK": 256}, stages=3,
    ),
]  # fmt: skip
