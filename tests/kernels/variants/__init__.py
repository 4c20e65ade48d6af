"""Forms in which Triton kernels run on GPUs, by op: what is compiled ahead of time without one, and what it may take.

One file an op, with a list `VARIANTS` in it; `tests/kernels/test_compiled.py` compiles each for each architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHS = (80, 86, 89, 90, 120)  # compute capabilities


@dataclass(frozen=True)
class Variant:
    """One kernel with its constants."""

    kernel: str  # module:name of the jitted function, as kvcli.kernels.merge_attention.fused:merge_kernel
    name: str  # of the form: "16 rows, body"
    types: Mapping[str, str]  # of arguments that are no constants: *bf16, *fp32, *i32, *i64, *u8, i32, fp32
    consts: Mapping[str, Any]
    warps: int = 4
    stages: int = 2
    registers: int | None = None  # `maxnreg` of the launch
    aligned: tuple[str, ...] = ()  # integers known to be multiples of 16; all pointers are
    budget: int | None = None  # instructions of a warp in a step of the innermost loop, on sm86; None = not held
    streams: bool = False  # reads gigabytes: loads have to be 16 bytes wide and go past the registers
    products: bool = False  # has matrix products: all variants of an op need the same layout of warps and instruction
    straight: bool = False  # operands go from memory to the matrix units: threads exchange nothing in a step
    tile_bytes: int = 0  # that a step of the innermost loop reads of memory, of all warps; for the model of time
    archs: tuple[int, ...] = ARCHS
