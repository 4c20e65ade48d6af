"""Forms of attention_mass: its two passes, sizes of heads, soft caps and windows."""

from __future__ import annotations

from tests.kernels.variants import Variant

TYPES = {
    **{"p_q": "*bf16", "p_at": "*i64", "p_k": "*bf16", "p_pos": "*i32", "p_lse": "*fp32", "by": "fp32", "cap": "fp32"},
    **dict.fromkeys(("window", "w", "s", "k_head", "k_slot", "pos_head", "pos_slot"), "i32"),
}
FORMS = [(128, False, 1), (64, True, 2), (256, False, 0)]  # size of a head, bent and windowed, how rows are folded


def form(of: str, d: int, bent: bool, more: dict[str, int], types: dict[str, str]) -> Variant:
    return Variant(
        f"kvcli.kernels.attention_mass.fused:{of}_kernel",
        f"{of}, heads of {d}" + ", soft cap, window" * bent,
        TYPES | types,
        {"G": 4, "D": d, "M": 32, "B": 64, "HAS_CAP": bent, "HAS_WINDOW": bent, **more},
        aligned=("k_head", "k_slot"),
        streams=d < 256,
        products=True,
        tile_bytes=64 * (2 * d + 4),
    )


VARIANTS = [
    *(form("lse", d, bent, {"SPAN": 4096}, {}) for d, bent, _ in FORMS),
    *(form("mass", d, bent, {"FOLD": fold}, {"p_out": "*fp32", "share": "fp32"}) for d, bent, fold in FORMS),
]
