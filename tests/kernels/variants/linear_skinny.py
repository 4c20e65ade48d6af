"""Linear layers for few rows, in the shapes of an 8B model."""

from __future__ import annotations

from tests.kernels.variants import Variant

OP = "kvcli.kernels.linear_skinny.fused"
K = 4096
K_DOWN = 14_336  # of 64 inputs at a time: a loop that is not unrolled to its end
TYPES = {
    **dict.fromkeys(("p_x", "p_book", "p_bias"), "*bf16"),
    **dict.fromkeys(("p_parts", "p_y"), "*fp32"),
    **dict.fromkeys(("M", "N", "first", "last"), "i32"),
    "p_arrivals": "*i32",
}
# types of weights and scales, inputs to a step, bytes of a step of 64 outputs with its scales
KINDS = {
    "plain": ("*bf16", "*bf16", 64, 8192),
    "int8": ("*i32", "*bf16", 64, 4096),
    "int4": ("*i32", "*i32", 128, 4096 + 256),
    "nf4": ("*i32", "*fp16", 64, 2048 + 128),
}
# for 8, 16 and 32 rows
BUDGETS = {"plain": (53, 97, 190), "int8": (136, 149, 172), "int4": (200, 246, 339), "nf4": (321, 341, 381)}
REGISTERS = {8: 72, 16: 104, 32: 176}


def _linear(kind: str, rows: int, group: int = 0, x: str = "*bf16", residual: str = "") -> Variant:
    w, scale, own, size = KINDS[kind]
    step, above = group or own, 128 if x == "*bf16" else 0
    consts = {"K": K_DOWN if kind == "plain" else K, "STEP": step, "BM": rows, "SK": 4, "KIND": kind, "ABOVE": above}
    name = f"{kind}{f' by {step}' if kind in ('int4', 'nf4') else ''}, {rows} rows, {x[1:]}"
    return Variant(
        kernel=f"{OP}:linear_kernel",
        name=name + (residual and ", residual"),
        types={**TYPES, "p_w": w, "p_scale": scale, "p_x": x, "p_book": x, "p_residual": residual},
        consts=consts | {"HAS_BIAS": False, "PTX": True, "WIDTH": 2} | ({} if residual else {"p_residual": None}),
        warps=2,
        stages=1,
        registers=None if kind == "plain" else REGISTERS[rows],
        aligned=("N",),
        budget=BUDGETS[kind][(8, 16, 32).index(rows)] if step == own and x == "*bf16" else None,
        streams=True,
        products=True,
        straight=True,
        tile_bytes=size * step // own,
    )


VARIANTS = [
    *(_linear(kind, rows) for kind in KINDS for rows in (8, 16, 32)),
    *(_linear("int4", rows, residual="*bf16") for rows in (8, 32)),
    *(_linear("int4", rows, group) for rows in (8, 16, 32) for group in (64, 32)),
    *(_linear(kind, 8, x="*fp16") for kind in ("int8", "int4", "nf4")),
    *(
        Variant(
            kernel=f"{OP}:widen_kernel",
            name=f"{kind} widened",
            types={**TYPES, "p_w": "*i32", "p_scale": KINDS[kind][1], "p_y": "*bf16"},
            consts={"K": K, "STEP": KINDS[kind][2], "KIND": kind, "ABOVE": 128, "PTX": True},
            warps=2,
            stages=1,
            aligned=("N", "first"),
        )
        for kind in ("int8", "int4", "nf4")
    ),
]
