"""Forms of the attention of rows over slots and each other."""

from __future__ import annotations

from typing import Any

from tests.kernels.variants import Variant

INDICES = "p_start p_length p_pos_start p_path p_path_of p_depth p_row_pos"
COUNTS = "window n_rows n_before n_paths n_deep n_late n_spans"
STRIDES = ("q_head", "q_row", "fk_head", "fk_row", "fv_head", "fv_row")
TYPES = {
    **dict.fromkeys("p_q p_k p_v p_fk p_fv".split(), "*bf16"),
    **dict.fromkeys(f"{INDICES} p_pos p_upto".split(), "*i32"),
    **dict.fromkeys(("p_out", "p_lse"), "*fp32"),
    **dict.fromkeys((*COUNTS.split(), *STRIDES), "i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}
BARE = {"p_pos": None, "p_upto": None, "softcap": None}  # neither window nor limits nor bent scores


def form(name: str, d: int = 128, group: int = 4, rows: int = 16, without: Any = BARE, **others: Any) -> Variant:
    """A head of `d` numbers and `group` query heads to one of keys, in tiles of `rows` rows."""
    tile, unit = (64 if d <= 128 else 32), others.pop("unit", 256)
    wide = 1 << (d - 1).bit_length()
    consts = {"G": group, "D": d, "E": d, "DP": wide, "EP": wide, "M": rows, "B": tile, "UNIT": unit, **without}
    types = {**TYPES, **others.pop("types", {})}
    tile_bytes, held = 4 * tile * d, {"aligned": STRIDES, "streams": True, "products": unit == 256}
    return Variant(
        "kvcli.kernels.attend_rows.fused:spans_kernel", name, types, consts, tile_bytes=tile_bytes, **held, **others
    )


FP16 = dict.fromkeys("p_q p_k p_v p_fk p_fv".split(), "*fp16")
VARIANTS = [
    form("16 rows"),
    form("32 rows", rows=32),
    form("16 rows, fp16", types=FP16),
    form("16 rows, window, soft cap", without={"p_upto": None}),
    form("32 rows, window, soft cap", rows=32, without={"p_upto": None}),
    form("16 rows, heads of 64", d=64, group=8),
    form("16 rows, heads of 80", d=80, group=1),
    form("16 rows, heads of 96", d=96, group=1),
    form("16 rows, heads of 256", d=256, group=2),
    form("32 rows, heads of 256", d=256, group=2, rows=32),
    form("prompt", rows=64, unit=1 << 26),
    form("prompt, heads of 256", d=256, group=2, rows=32, unit=1 << 26),
]
