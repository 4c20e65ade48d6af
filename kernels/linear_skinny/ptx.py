"""PTX that widens words of codes to pairs of bf16 or fp16, in the order of `reference.ORDER`.

Triton's conversion takes at least an instruction per code, and 15 to select one of 16 numbers. A GPU cannot issue that
many while the words load. `lop3` puts a code into the last bits of 128 (bf16) or 1024 (fp16); `prmt` looks up four
bytes at once. Two words make the results: those of the first word, then those of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import torch

# for normally distributed weights, as in bitsandbytes (QLoRA, arXiv 2305.14314, appendix E)
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# llama.cpp's IQ4_NL and IQ4_XS; and e2m1 of MXFP4, doubled
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
BOOKS: dict[str, tuple[float, ...]] = {"nf4": NF4, "iq4": IQ4, "mxfp4": MXFP4}  # kinds whose codes are looked up
# added to a code of 4 bits: bf16 keeps 128, which kernels subtract with the zero of a group. Of 1024, float32 sums
# would lose more than fp16 rounds
ABOVE = {torch.bfloat16: 128, torch.float16: 0}
OF4, OF8 = "=r,=r,=r,=r,=r,=r,=r,=r,r,r", "=r,=r,=r,=r,r,r"  # constraints of 4 and 8 bits
OF_BYTES = "=r,=r,=r,=r,r"  # of `int4_bytes`


def int4(dtype: torch.dtype) -> str:
    """Return PTX from codes 0..15 to the codes above `ABOVE`."""
    bf16 = dtype == torch.bfloat16
    lines = [f".reg .b32 t, m, e; mov.b32 m, 0x000F000F; mov.b32 e, {'0x43004300' if bf16 else '0x64006400'};"]
    for first, source in ((0, "$8"), (4, "$9")):
        for pair in range(4):
            to = f"${first + pair}"
            lines.append(f"shr.b32 t, {source}, {4 * pair}; lop3.b32 {to}, t, m, e, 0xEA;")
            lines += [] if bf16 else [f"sub.f16x2 {to}, {to}, e;"]
    return f"{{ {' '.join(lines)} }}"


def int4_bytes(dtype: torch.dtype) -> str:
    """Return PTX from four bytes of codes 0..15 to -8..7: those of the low halves, then those of the high halves. A
    code becomes the last bits of 128 (bf16) or 1024 (fp16), from which that and 8 are subtracted."""
    exponent, one, less, kind = {
        torch.bfloat16: ("0x43434343", "0x3F803F80", "0xC308C308", "bf16x2"),  # 1, -136
        torch.float16: ("0x64646464", "0x3C003C00", "0xE408E408", "f16x2"),  # 1, -1032
    }[dtype]
    widen = "".join(
        f"prmt.b32 ${i}, {half}, e, {order}; fma.rn.{kind} ${i}, ${i}, one, less;"
        for i, (half, order) in enumerate(product("lh", ("0x4140", "0x4342")))
    )
    return (
        "{ .reg .b32 l, h, e, one, less; and.b32 l, $4, 0x0F0F0F0F; shr.u32 h, $4, 4; and.b32 h, h, 0x0F0F0F0F;"
        f"mov.b32 e, {exponent}; mov.b32 one, {one}; mov.b32 less, {less}; {widen} }}"
    )


def int8(dtype: torch.dtype) -> str:
    """Return PTX from signed codes to numbers: the low seven bits behind 128, less 128, or 256 by the sign."""
    e, less, kind = (
        ("0x43004300", "0xBF80BF80", "bf16x2") if dtype == torch.bfloat16 else ("0x64006400", "0xBC00BC00", "f16x2")
    )
    lines = [f".reg .b32 t, a, b, m, n, e, o; mov.b32 m, 0x007F007F; mov.b32 n, 0x00800080; mov.b32 e, {e};"]
    lines.append(f"mov.b32 o, {less};")
    for first, source in ((0, "$4"), (2, "$5")):
        for pair in range(2):
            lines.append(f"shr.b32 t, {source}, {8 * pair}; lop3.b32 a, t, m, e, 0xEA; lop3.b32 b, t, n, e, 0xEA;")
            lines.append(f"fma.rn.{kind} ${first + pair}, b, o, a;")
    return f"{{ {' '.join(lines)} }}"


def looked_up(book: Sequence[float], dtype: torch.dtype) -> str:
    """Return PTX from codes to the 16 numbers of a book, rounded to this dtype."""
    numbers = torch.tensor(book).to(dtype).view(torch.int16).tolist()
    tables = [[_word(n >> shift for n in numbers[i : i + 4]) for i in (0, 4, 8, 12)] for shift in (0, 8)]

    def pairs(source: str, first: str, second: str) -> str:
        """Return PTX for the four lowest codes of `source`."""
        (a, b, c, d), (e, f, g, h) = tables
        return f"""and.b32 s, {source}, 0x7777; shr.u32 m, {source}, 3; and.b32 m, m, 0x1111;
            prmt.b32 m, 0x0000FF00, 0, m;
            prmt.b32 x, {a}, {b}, s; prmt.b32 y, {c}, {d}, s; lop3.b32 x, m, y, x, 0xCA;
            prmt.b32 y, {e}, {f}, s; prmt.b32 z, {g}, {h}, s; lop3.b32 y, m, z, y, 0xCA;
            prmt.b32 {first}, x, y, 0x5140; prmt.b32 {second}, x, y, 0x7362;"""

    lines = [".reg .b32 s, m, x, y, z, t;"]
    for first, source in ((0, "$8"), (4, "$9")):
        lines += [pairs(source, f"${first}", f"${first + 1}"), f"shr.u32 t, {source}, 16;"]
        lines.append(pairs("t", f"${first + 2}", f"${first + 3}"))
    return f"{{ {' '.join(lines)} }}"


def _word(four: Iterable[int]) -> str:
    """Join the lowest bytes of four numbers, the first lowest."""
    return f"0x{int.from_bytes(bytes(n & 255 for n in four), 'little'):08x}"
