"""The gated delta rule in the sizes of Qwen3.5 and Qwen3-Next, and its convolution; that of LFM2 has no SiLU."""

from __future__ import annotations

from tests.kernels.variants import Variant

ROWS = "p_q p_k p_v p_beta p_out".split()
NUMBERS = "n by_count writes_state writes_out q_step k_step v_step".split()


def _rule(heads: int, group: int, d: int) -> Variant:
    return Variant(
        kernel="kvcli.kernels.gated_delta.fused:gated_delta_kernel",
        name=f"{heads} heads of {d}",
        types={
            **dict.fromkeys(ROWS, "*bf16"),
            **dict.fromkeys(("p_g", "p_before", "p_behind"), "*fp32"),
            **{"p_count": "*i32"},
            **dict.fromkeys(NUMBERS, "i32"),
        },
        consts={
            **{"H": heads, "GROUP": group, "DK": d, "DV": d, "BK": d, "BV": 16, "ROOT": d**0.5},
            "IS_NORMED": True,
        },
        warps=1,
        aligned=("q_step", "k_step", "v_step"),
        budget=BUDGET,
    )


def _conv(channels: int, width: int, has_silu: bool) -> Variant:
    return Variant(
        kernel="kvcli.kernels.gated_delta.fused:causal_conv_kernel",
        name=f"{channels} channels{', silu' if has_silu else ''}",
        types={**dict.fromkeys(("p_x", "p_w", "p_y"), "*bf16"), **{"n": "i32", "length": "i32"}},
        consts={"p_bias": None, "C": channels, "W": width, "HAS_SILU": has_silu, "BT": 16, "BC": 64},
    )


BUDGET = 650  # instructions of a warp for a row; 2,048 numbers of a state take six operations of 64 each
VARIANTS = [_rule(32, 2, 128), _rule(48, 3, 128), _conv(8192, 4, has_silu=True), _conv(2048, 3, has_silu=False)]
