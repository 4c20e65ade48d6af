"""The likeliest token and the drawn one, of a vocabulary of 151,936."""

from __future__ import annotations

from tests.kernels.variants import Variant

OP = "kvcli.kernels.argmax.fused"
PIECES = 149


def _pieces(name: str, logits: str, draws: bool) -> Variant:
    scores = "*fp64" if draws else "*fp32"
    by = (
        {"p_seed": "*i64", "p_pos": "*i64", "p_heat": "*fp32"}
        if draws
        else dict.fromkeys(("p_seed", "p_pos", "p_heat"), logits)
    )
    return Variant(
        kernel=f"{OP}:pieces_kernel",
        name=name,
        types={"p_logits": logits, **by, "p_scores": scores, "p_found": "*i32", "V": "i32"},
        consts={"PIECES": PIECES, "PIECE": 1024, "DRAWS": draws},
        aligned=("V",),
    )


VARIANTS = [
    _pieces("likeliest, bf16", "*bf16", False),
    _pieces("likeliest, fp32", "*fp32", False),
    _pieces("drawn, bf16", "*bf16", True),
    *(
        Variant(
            kernel=f"{OP}:row_kernel",
            name=f"of pieces, {scores[1:]}",
            types={"p_scores": scores, "p_found": "*i32", "p_ids": "*i32"},
            consts={"PIECES": PIECES, "BLOCK": 256},
        )
        for scores in ("*fp32", "*fp64")
    ),
]
