"""Forms of attend_quantized: the bits of keys and values, one row and many, sizes of heads, windows and soft caps."""

from __future__ import annotations

from tests.kernels.variants import ARCHS, Variant

KERNEL = "kvcli.kernels.attend_quantized.fused:packed_kernel"
TYPES = {
    **{"p_q": "*bf16", "p_table": "*i64", "p_at": "*i32", "p_out": "*fp32", "p_lse": "*fp32"},
    **{"by": "fp32", "cap": "fp32"},
    **dict.fromkeys(("window", "n_rows", "n_spans"), "i32"),
}


def form(
    bits: int,
    budget: int | None = None,
    *,
    rows: int = 16,
    d: int = 128,
    cap: bool = False,
    sight: int = 0,
    streams: bool = True,
    under_way: int = 2,
) -> Variant:
    tile = 32 if d > 128 else 64
    way = ", three under way" * (under_way == 3)
    scales = 0 if bits == 8 else 2 * 2 * d + tile * 2 * 2 * (d // 64)
    return Variant(
        KERNEL,
        f"{bits} bits, {rows} rows, heads of {d}" + ", soft cap" * cap + ", window" * (sight == 2) + way,
        TYPES,
        {
            **{"UNIT": 256, "G": 4, "D": d, "M": rows, "B": tile, "K_BITS": bits, "V_BITS": bits, "GROUP": 64, "C": 64},
            **{"HAS_CAP": cap, "SIGHT": sight, "BF16": True, "PTX": True},
        },
        budget=budget,
        streams=streams,
        products=True,
        stages=under_way,
        archs=(80, 90) if under_way == 3 else ARCHS,
        tile_bytes=2 * tile * d * bits // 8 + scales + (2 * 2 * tile if bits == 8 else 0),
    )


VARIANTS = [
    form(4, 590),
    form(8, 570),
    form(2, 580),
    form(4, 830, rows=32),
    form(8, 780, rows=32),
    form(4, 350, d=64),
    form(2, 365, d=64, streams=False),  # a tile of a kilobyte: 8 bytes a thread
    form(4, 600, d=256),
    form(8, 820, rows=32, d=256),
    form(4, 770, cap=True, sight=2),
    form(4, under_way=3),
    form(8, under_way=3),
    form(4, rows=32, under_way=3),
    form(8, rows=32, under_way=3),
    form(4, d=256, under_way=3),
    Variant(
        "kvcli.kernels.attend_quantized.fused:meet_kernel",
        "spans meet",
        {**dict.fromkeys(("p_part", "p_lses", "p_out", "p_lse"), "*fp32"), "n_spans": "i32"},
        {"D": 128},
    ),
]
