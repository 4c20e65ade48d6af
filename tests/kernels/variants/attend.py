"""Forms of the attention of rows over slots alone: the kernel of attend_invariant without a path."""

from __future__ import annotations

from tests.kernels.variants.attend_invariant import BARE, WHOLE, form

ALONE = {**BARE, "p_path": None}
VARIANTS = [
    form("slots alone, 16 rows", without=ALONE, budget=241),
    form("slots alone, 32 rows", rows=32, without=ALONE, budget=387),
    form("slots alone, 16 rows, limits", without={"p_pos": None, "softcap": None, "p_path": None}, budget=267),
    form("slots alone, 16 rows, window, soft cap", without={"p_upto": None, "p_path": None}, budget=405),
    form("prompt over slots alone", rows=64, unit=WHOLE, warps=8, without=ALONE),
]
