"""Kernels of `ceilings`: one that only reads, one that does next to nothing."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

PIECE = 1024


def read(a: Tensor, out: Tensor, programs: int) -> None:
    """Read all of a, and leave what keeps the compiler from leaving it out."""
    read_kernel[(programs,)](a, out, a.numel() // PIECE, N=PIECE, num_warps=4)


def touch(x: Tensor, programs: int, early: bool) -> None:
    """Add 1 to some numbers. `early`: begin before the kernel in front has ended, and wait for it then."""
    more: dict[str, Any] = {"launch_pdl": True} if early else {}
    touch_kernel[(programs,)](x, N=PIECE, EARLY=early, num_warps=4, **more)


@triton.jit(do_not_specialize=["pieces"])
def read_kernel(p_a, p_out, pieces, N: tl.constexpr):
    i = tl.arange(0, N)
    found = tl.zeros([N], tl.int32)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        found ^= tl.load(p_a + piece * N + i)  # of at most 8 GiB
    tl.store(p_out + tl.program_id(0) * N + i, found)


@triton.jit
def touch_kernel(p_x, N: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(p_x + i, tl.load(p_x + i) + 1.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
