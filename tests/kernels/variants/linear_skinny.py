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
# types of weights, scales and factors, inputs to a group, bytes of a step of 64 outputs with its scales
KINDS = {
    "plain": ("*bf16", "", "", 64, 8192),
    "int8": ("*i32", "*bf16", "", 64, 4096),
    "int4": ("*i32", "*i32", "", 128, 4096 + 256),
    "nf4": ("*i32", "*fp16", "", 64, 2048 + 128),
    "Q4_K": ("*i32", "*i32", "*i16", 32, 1024 + 160),
    "Q6_K": ("*i32", "*fp16", "*i8", 16, 2048 + 144),
    "Q8_0": ("*i32", "*fp16", "", 32, 2048 + 128),
    "Q4_0": ("*i32", "*fp16", "", 32, 1024 + 128),
    "Q5_K": ("*i32", "*i32", "*i16", 32, 2048 + 160),
    "IQ4_XS": ("*i32", "*fp16", "*i8", 32, 1024 + 80),
    "MXFP4": ("*i32", "*bf16", "", 32, 1024 + 128),
    "of several": ("*i32", "*i32", "*i16", 16, 2048 + 288),
}
CODES = {"Q4_K": "blocks4", "Q4_0": "blocks4", "IQ4_XS": "iq4", "MXFP4": "mxfp4"}
CODES |= dict.fromkeys(("Q6_K", "Q8_0", "Q5_K", "of several"), "blocks8")
# for 8, 16 and 32 rows
BUDGETS = {"plain": (53, 97, 190), "int8": (136, 149, 172), "int4": (200, 246, 339), "nf4": (321, 341, 381)}
REGISTERS = {8: 72, 16: 104, 32: 176}


def without(kind: str) -> dict[str, None]:
    """Return the arguments that weights of this kind lack."""
    return {name: None for name, of in zip(("p_scale", "p_factor"), KINDS[kind][1:3], strict=True) if not of}


def _linear(kind: str, rows: int, group: int = 0, x: str = "*bf16", residual: str = "") -> Variant:
    w, scale, factor, own, size = KINDS[kind]
    step, above = group or own, 128 if x == "*bf16" else 0
    consts = {"K": K_DOWN if kind == "plain" else K, "STEP": step, "BM": rows, "SK": 4, "ABOVE": above}
    consts |= {"KIND": CODES.get(kind, kind)} | without(kind)
    name = f"{kind}{f' by {step}' if kind in ('int4', 'nf4') else ''}, {rows} rows, {x[1:]}"
    return Variant(
        kernel=f"{OP}:linear_kernel",
        name=name + (residual and ", residual"),
        types={**TYPES, "p_w": w, "p_scale": scale, "p_factor": factor, "p_x": x, "p_book": x, "p_residual": residual},
        consts=consts | {"p_bias": None, "PTX": True, "WIDTH": 2} | ({} if residual else {"p_residual": None}),
        warps=2,
        stages=1,
        registers=None if kind == "plain" else REGISTERS[rows] + 8 * (kind != "int8" and step <= 32),
        aligned=("N",),
        budget=BUDGETS.get(kind, [None] * 3)[(8, 16, 32).index(rows)] if step == own and x == "*bf16" else None,
        streams=True,
        products=True,
        straight=True,
        tile_bytes=size * step // own,
    )


VARIANTS = [
    *(_linear(kind, rows) for kind in KINDS for rows in (8, 16, 32)),
    *(_linear("int4", rows, residual="*bf16") for rows in (8, 32)),
    *(_linear("int4", rows, group) for rows in (8, 16, 32) for group in (64, 32)),
    *(_linear(kind, 8, x="*fp16") for kind in KINDS if kind != "plain"),
    *(
        Variant(
            kernel=f"{OP}:widen_kernel",
            name=f"{kind} widened",
            types={**TYPES, "p_w": "*i32", "p_scale": KINDS[kind][1], "p_factor": KINDS[kind][2], "p_y": "*bf16"},
            consts={"K": K, "STEP": KINDS[kind][3], "KIND": CODES.get(kind, kind), "ABOVE": 128, "PTX": True}
            | without(kind),
            warps=2,
            stages=1,
            aligned=("N", "first"),
        )
        for kind in KINDS
        if kind != "plain"
    ),
]
