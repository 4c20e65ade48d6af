"""RMSNorm in the widths of an 8B model: of hidden states and of heads, alone and behind a residual."""

from __future__ import annotations

from tests.kernels.variants import Variant


def _norm(form: str, h: int, block: int, warps: int, is_added: bool = False) -> Variant:
    without = {} if is_added else {"p_y": None, "p_total": None}
    return Variant(
        kernel="kvcli.kernels.rms_norm.fused:rms_norm_kernel",
        name=f"{form}, {h}{', added' if is_added else ''}",
        types={
            **dict.fromkeys("p_x p_y p_wy p_w p_total p_normed".split(), "*bf16"),
            **{"eps_y": "fp32", "eps": "fp32"},
        },
        consts={"H": h, "BLOCK": block, "FORM_Y": form, "FORM": form, **without},
        warps=warps,
    )


VARIANTS = [
    _norm(form, h, block, warps)
    for form in ("round first", "one more", "round last")
    for h, block, warps in ((4096, 4096, 8), (2880, 4096, 8), (128, 128, 1))
]
VARIANTS += [_norm("one more", 2560, 4096, 8, is_added=True)]
