"""Linear layers with what follows them, in the shapes of an 8B model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.kernels.variants import Variant
from tests.kernels.variants.linear_skinny import CODES, K_DOWN, KINDS, K, without

OP = "kvcli.kernels.linear_epilogue.fused"
TYPES = {
    **dict.fromkeys("p_x p_book p_bias p_y p_kv p_cos p_sin p_wq p_wk".split(), "*bf16"),
    **{"p_parts": "*fp32", "p_arrivals": "*i32", "eps_q": "fp32", "eps_k": "fp32", "M": "i32"},
}
BUDGETS = {("int4", 8): 202, ("int4", 16): 249, ("int4", 32): 336}  # as without an epilogue
NO_NORMS = {"p_wq": None, "p_wk": None}
GATED = {"HOW": "silu", "H": 0, "D": 0, "DP": 1, "R": 0, "N": 28_672, "SPAN": 14_336, "COLS": 128, "p_bias": None}
GATED |= {"p_cos": None, "p_sin": None, **NO_NORMS}
HEADS = {"HOW": "round first", "H": 32, "D": 128, "DP": 128, "R": 128, "N": 6144, "SPAN": 6144, "COLS": 128}
SMALL = {"H": 14, "D": 64, "DP": 64, "R": 64, "N": 1152, "SPAN": 1152, "COLS": 64, **NO_NORMS}


def _product(name: str, kind: str, rows: int, given: Mapping[str, Any], sk: int) -> Variant:
    w, scale, factor, step, size = KINDS[kind]
    consts = {
        "K": K_DOWN if kind == "plain" else K,
        "STEP": step,
        "BM": rows,
        "SK": sk,
        "KIND": CODES.get(kind, kind),
        "ABOVE": 128,
        "PTX": True,
        "WIDTH": 2,
        **without(kind),
    }
    return Variant(
        kernel=f"{OP}:product_kernel",
        name=f"{name}, {kind}, {rows} rows",
        types={**TYPES, "p_w": w, "p_scale": scale, "p_factor": factor},
        consts={**consts, **given},
        warps=2,
        stages=1,
        budget=BUDGETS.get((kind, rows)),
        streams=True,
        products=True,
        straight=True,
        tile_bytes=size,
    )


def _alone(name: str, given: Mapping[str, Any]) -> Variant:
    return Variant(
        kernel=f"{OP}:epilogue_kernel",
        name=f"{name}, after another product",
        types={**TYPES, "p_parts": "*bf16"},
        consts={"p_scale": None, "SK": 1, "KIND": "plain", **given},
        warps=4,
        stages=1,
    )


VARIANTS = [
    *(_product("gated", kind, rows, GATED, 2) for kind in ("int4", "plain") for rows in (8, 16, 32)),
    *(_product("normed heads", kind, rows, HEADS, 11) for kind in ("int4", "int8") for rows in (8, 16, 32)),
    _product("heads of 64", "plain", 8, HEADS | SMALL, 4),
    *(_product("gated", "Q4_K", rows, GATED, 2) for rows in (8, 32)),
    *(_product("normed heads", kind, rows, HEADS, 11) for kind in ("Q4_K", "of several") for rows in (8, 32)),
    _alone("gated", GATED),
    _alone("normed heads", HEADS),
]
