"""PTX that widens 4-bit codes to bf16 or fp16: first the low halves of four bytes, then the high halves.

Triton's conversion takes at least an instruction per code, and 15 to select one of 16 numbers. A GPU cannot issue that
many while the bytes load. `prmt` looks up four bytes at once; `lop3` (a ? b : c) joins two tables of eight. `$0` and
`$1` are the numbers of the low halves, `$2` and `$3` those of the high halves, `$4` the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# for normally distributed weights, as in bitsandbytes (QLoRA, arXiv 2305.14314, appendix E)
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
CONSTRAINTS = "=r,=r,=r,=r,r"


def nf4(dtype: torch.dtype) -> str:
    """Return PTX from codes to the numbers of NF4, rounded to this dtype."""
    numbers = torch.tensor(NF4).to(dtype).view(torch.int16).tolist()
    tables = [[_word(n >> shift for n in numbers[i : i + 4]) for i in (0, 4, 8, 12)] for shift in (0, 8)]

    def pairs(source: str, low: str, high: str) -> str:
        """Return PTX for the two lowest bytes of `source`."""
        (a, b, c, d), (e, f, g, h) = tables
        return f"""and.b32 s, {source}, 0x7777; shr.u32 m, {source}, 3; and.b32 m, m, 0x1111;
            prmt.b32 m, 0x0000FF00, 0, m;
            prmt.b32 x, {a}, {b}, s; prmt.b32 y, {c}, {d}, s; lop3.b32 x, m, y, x, 0xCA;
            prmt.b32 y, {e}, {f}, s; prmt.b32 z, {g}, {h}, s; lop3.b32 y, m, z, y, 0xCA;
            prmt.b32 {low}, x, y, 0x6240; prmt.b32 {high}, x, y, 0x7351;"""

    upper = "shr.u32 t, $4, 16;"
    return "{ .reg .b32 s, m, x, y, z, t;" + pairs("$4", "$0", "$2") + upper + pairs("t", "$1", "$3") + "}"


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


def _word(four: Iterable[int]) -> str:
    """Join the lowest bytes of four numbers, the first lowest."""
    return f"0x{int.from_bytes(bytes(n & 255 for n in four), 'little'):08x}"
