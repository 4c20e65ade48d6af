"""PTX that widens the 4-bit codes of experts to bf16 or fp16: first the low halves of four bytes, then the high halves.

Triton's conversion takes at least an instruction per code, and a GPU cannot issue that many while the bytes load. `$0`
and `$1` are the numbers of the low halves, `$2` and `$3` those of the high halves, `$4` the bytes.
"""

from __future__ import annotations

import torch

CONSTRAINTS = "=r,=r,=r,=r,r"


def int4(dtype: torch.dtype) -> str:
    """Return PTX from codes 0..15 to -8..7: a code in the last bits of 128 (bf16) or 1024 (fp16), minus that plus 8."""
    exponent, one, less, kind = {
        torch.bfloat16: ("0x43434343", "0x3F803F80", "0xC308C308", "bf16x2"),  # 1, -136
        torch.float16: ("0x64646464", "0x3C003C00", "0xE408E408", "f16x2"),  # 1, -1032
    }[dtype]
    widen = "".join(
        f"prmt.b32 ${i}, {half}, e, {order};"
        for i, (half, order) in enumerate((half, order) for half in "lh" for order in ("0x4140", "0x4342"))
    )
    return (
        "{ .reg .b32 l, h, e, one, less; and.b32 l, $4, 0x0F0F0F0F; shr.u32 h, $4, 4; and.b32 h, h, 0x0F0F0F0F;"
        + f"mov.b32 e, {exponent}; mov.b32 one, {one}; mov.b32 less, {less};"
        + widen
        + "".join(f"fma.rn.{kind} ${i}, ${i}, one, less;" for i in range(4))
        + "}"
    )
