"""A product of few rows with a large matrix: a sound form, and forms that each break one bound of `compiled.py`."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from tests.kernels.variants import Variant


@triton.jit(do_not_specialize=["stride"])
def product(p_x, p_w, p_y, stride, I: tl.constexpr, M: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr):  # noqa: E741
    """y [M, O] of x [M, I] and w [O, I], whose rows lie `stride` numbers apart."""
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    r = tl.arange(0, M)
    i = tl.arange(0, BI)
    acc = tl.zeros([M, BO], tl.float32)
    for k in range(0, I, BI):
        x = tl.load(p_x + r[:, None] * I + (k + i)[None, :])  # [M, BI]
        w = tl.load(p_w + o[None, :].to(tl.int64) * stride + (k + i)[:, None])  # [BI, BO]
        acc = tl.dot(x, w, acc)
    tl.store(p_y + r[:, None] * 4096 + o[None, :], acc)


SOUND = Variant(
    "tests.kernels.spoiled:product",
    "sound",
    {"p_x": "*bf16", "p_w": "*bf16", "p_y": "*fp32"},
    {"stride": 4096, "I": 4096, "M": 16, "BO": 64, "BI": 128},
    budget=120,
    streams=True,
    products=True,
    archs=(86, 90),
)


def form(name: str, arch: int, warps: int = 4, stages: int = 2, **consts: int) -> Variant:
    consts = dict(SOUND.consts) | consts
    return replace(SOUND, name=name, warps=warps, stages=stages, consts=consts, archs=(arch,))


# the stride comes at run time, so that nothing is known of where a row begins
NARROW = replace(
    SOUND,
    name="narrow",
    types=dict(SOUND.types) | {"stride": "i32"},
    consts={name: value for name, value in SOUND.consts.items() if name != "stride"},
    archs=(86,),
)
SPILLING = form("one warp for a large tile", 86, warps=1, BO=256)
GREEDY = form("eight stages", 86, stages=8)
TALL = form("32 rows", 90, M=32)
TALLER = form("64 rows, for which Hopper has another instruction", 90, M=64)


@triton.jit
def halved(p_x, n):
    """Of whose form only a launch decides: one number would be no argument at all."""
    i = tl.arange(0, 128)
    tl.store(p_x + i, tl.load(p_x + i, mask=i < n, other=0.0) / 2, mask=i < n)


LOOKING = Variant("tests.kernels.spoiled:halved", "looking at a number", {"p_x": "*fp32", "n": "i32"}, {}, archs=(86,))


@triton.jit
def summed(p_x, p_y, BM: tl.constexpr, BY_TWO: tl.constexpr):
    """y [BM] of x [64, BM], in whichever order the compiler takes, or two neighbours at a time."""
    x = tl.load(p_x + tl.arange(0, 64)[:, None] * BM + tl.arange(0, BM)[None, :])
    if BY_TWO:
        x = tl.sum(tl.reshape(x, [32, 2, BM]), 1)
        x = tl.sum(tl.reshape(x, [16, 2, BM]), 1)
        x = tl.sum(tl.reshape(x, [8, 2, BM]), 1)
        x = tl.sum(tl.reshape(x, [4, 2, BM]), 1)
        x = tl.sum(tl.reshape(x, [2, 2, BM]), 1)
    tl.store(p_y + tl.arange(0, BM), tl.sum(x, 0))


SUMS = [
    Variant(
        "tests.kernels.spoiled:summed",
        f"sums of {rows} columns{' by two' * by_two}",
        {"p_x": "*fp32", "p_y": "*fp32"},
        {"BM": rows, "BY_TWO": by_two},
        archs=(86,),
    )
    for by_two in (False, True)
    for rows in (8, 16)
]
