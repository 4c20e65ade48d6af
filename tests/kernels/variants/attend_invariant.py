"""Forms of the attention of rows over slots and each other."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
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
BENT = {"p_upto": None}  # a window, and bent scores
WHOLE = 1 << 26


def form(
    name: str,
    d: int = 128,
    group: int = 4,
    rows: int = 16,
    without: Mapping[str, None] = MappingProxyType(BARE),
    unit: int = 128,
    **others: Any,
) -> Variant:
    """A head of `d` numbers and `group` query heads to one of keys, in tiles of `rows` rows."""
    tile, wide = (64 if d <= 128 else 32), 1 << (d - 1).bit_length()
    consts = {"G": group, "D": d, "E": d, "DP": wide, "EP": wide, "M": rows, "B": tile, "UNIT": unit, **without}
    return Variant(
        kernel="kvcli.kernels.attend_invariant.fused:spans_kernel",
        name=name,
        types={**TYPES, **others.pop("types", {})},
        consts=consts,
        aligned=STRIDES,
        # a prompt is not held to the bits of one row, and has rows enough to be bound by products
        streams=unit != WHOLE,
        products=unit != WHOLE,
        tile_bytes=4 * tile * d,
        **others,
    )


FP16 = dict.fromkeys("p_q p_k p_v p_fk p_fv".split(), "*fp16")
VARIANTS = [
    form("16 rows", budget=241),
    form("16 rows, three under way", stages=3, archs=(80, 90)),
    form("32 rows", rows=32, budget=407),
    form("32 rows, three under way", rows=32, stages=3, archs=(80, 90)),
    form("16 rows, fp16", types=FP16, budget=241),
    form("16 rows, window, soft cap", without=BENT, budget=389),
    form("32 rows, window, soft cap", rows=32, without=BENT, budget=716),
    form("16 rows, heads of 64", d=64, group=8, budget=189),
    form("16 rows, heads of 80", d=80, group=1, budget=243),
    form("16 rows, heads of 96", d=96, group=1, budget=243),
    form("16 rows, heads of 256", d=256, group=2, budget=252),
    form("16 rows, heads of 256, window, soft cap", d=256, group=2, without=BENT),
    form("prompt", rows=64, unit=WHOLE, warps=8),
    form("prompt, window, soft cap", rows=32, unit=WHOLE, without=BENT, warps=8),
    form("prompt, heads of 256, window, soft cap", d=256, group=2, rows=32, unit=WHOLE, without=BENT, warps=8),
    form("prompt, heads of 256", d=256, group=2, rows=64, unit=WHOLE, warps=8),
]
