"""Linear layers for few rows, in the shapes of an 8B model."""

from __future__ import annotations

from tests.kernels.variants import Variant

OP = "kvcli.kernels.linear_skinny.fused"
K = 4096
TYPES = {
    **dict.fromkeys(("p_x", "p_book", "p_bias"), "*bf16"),
    **dict.fromkeys(("p_sums", "p_parts"), "*fp32"),
    **dict.fromkeys(("M", "N", "first", "last"), "i32"),
}
# the types of weights, scales and results, inputs to a scale, bytes of codes in a tile of 64 x 128
KINDS = {
    "plain": ("*bf16", "*bf16", "*bf16", 0, 16384),
    "int8": ("*i8", "*bf16", "*bf16", 0, 8192),
    "int4": ("*u8", "*i32", "*fp32", 128, 4096),
    "nf4": ("*u8", "*i32", "*fp32", 64, 4096),
}
BUDGETS = {"plain": (114, 149), "int8": (308, 403), "int4": (287, 406), "nf4": (454, 563)}  # for 16 and 32 rows


def _linear(kind: str, rows: int, group: int = 0, x: str = "*bf16") -> Variant:
    w, scale, y, own, size = KINDS[kind]
    group = group or own
    sk = 4 if y == "*fp32" else 1
    consts = {"K": K, "GROUP": group, "BM": rows, "BN": 64, "BK": 64 if group == 32 else 128, "SK": sk, "KIND": kind}
    return Variant(
        kernel=f"{OP}:linear_kernel",
        name=f"{kind}{f' by {group}' if group else ''}, {rows} rows, {x[1:]}",
        types={**TYPES, "p_w": w, "p_scale": scale, "p_y": y, "p_x": x, "p_book": x},
        consts=consts | {"HAS_BIAS": False, "PTX": True},
        stages=3,
        aligned=("N",),
        budget=BUDGETS[kind][rows == 32] if group == own else None,
        streams=True,
        products=True,
        tile_bytes=size // (2 if group == 32 else 1),
    )


VARIANTS = [
    *(_linear(kind, rows) for kind in KINDS for rows in (16, 32)),
    *(_linear("int4", 16, group) for group in (64, 32)),
    *(_linear(kind, 16, x="*fp16") for kind in ("int4", "nf4")),
    Variant(
        kernel=f"{OP}:sums_kernel",
        name="sums of inputs",
        types=TYPES,
        consts={"K": K, "GROUP": 128, "GROUPS": 8},
        stages=3,
    ),
    Variant(
        kernel=f"{OP}:add_kernel",
        name="stretches, with a bias",
        types={**TYPES, "p_y": "*bf16"},
        consts={"SK": 4, "BLOCK": 256, "HAS_BIAS": True},
        stages=3,
        aligned=("N",),
    ),
    *(
        Variant(
            kernel=f"{OP}:widen_kernel",
            name=f"{kind} widened",
            types={**TYPES, "p_w": "*u8", "p_scale": KINDS[kind][1], "p_y": "*bf16"},
            consts={"K": K, "GROUP": KINDS[kind][3], "BN": 64, "BK": 128, "KIND": kind, "PTX": True},
            stages=3,
            aligned=("N", "first"),
        )
        for kind in ("int4", "nf4")
    ),
]
