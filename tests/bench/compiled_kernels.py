"""What all variants of the Triton kernels take on cards that are not here: registers, shared memory, spills.

    python tests/bench/compiled_kernels.py [--ops linear_skinny,attend] [--archs 80,86,89,90,120] [--out FILE]

Compiling all takes an hour or two of one core. What was compiled lies in .pytest_cache by source and compiler, as for
tests/kernels/test_compiled.py, so an interrupted run continues. No GPU is needed, and none is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import triton

from tests.bench.harness import Ints, Row, Rows, Words, measurement, picked
from tests.kernels.bounds import faults, other_sums, parted
from tests.kernels.compiled import KIB, Compiled, compiled, variants
from tests.kernels.variants import ARCHS, Variant

COLUMNS = ("op", "card", "variants", "registers", "shared_kib", "programs", "spills", "outside_bounds")
NOTE = (
    "Of all variants of an op: the most registers of a thread and the most shared memory of a program, the fewest "
    "programs that fit on a processor at once, bytes of stack and accesses of spilled registers, and how many variants "
    f"or orders of sums are outside the bounds of tests/kernels/bounds.py. Triton {triton.__version__}; nothing ran."
)


@measurement("Kernels compiled for cards that are not here", columns=COLUMNS, note=NOTE, is_counts=True)
def compiled_kernels(ops: Words = (), archs: Ints = ARCHS) -> Rows:
    every = variants()
    for op in picked(ops or tuple(every), every):
        jobs = [(arch, variant) for arch in archs for variant in every[op] if arch in variant.archs]
        found = compiled([(variant, arch) for arch, variant in jobs], ROOT / ".pytest_cache" / "d" / "compiled")
        by_arch = {arch: list[tuple[Variant, Compiled]]() for arch, _ in jobs}
        for (arch, variant), each in zip(jobs, found, strict=True):
            by_arch[arch].append((variant, each))
        yield from (_row(op, arch, of) for arch, of in by_arch.items())


def _row(op: str, arch: int, of: Sequence[tuple[Variant, Compiled]]) -> Row:
    said = [f"{variant.name} {why}" for variant, each in of for why in faults(variant, each)]
    orders = parted([each for variant, each in of if variant.products])
    said += [f"products by {', '.join(orders)}"] * bool(orders) + other_sums(of)
    every = [each for _, each in of]
    return {
        "op": op,
        "card": f"{arch // 10}.{arch % 10}",
        "variants": len(of),
        "registers": max(each.registers for each in every),
        "shared_kib": round(max(each.shared for each in every) / KIB, 1),
        "programs": min(each.programs for each in every),
        "spills": sum(each.stack + each.spills for each in every),
        "outside_bounds": len(said),
        "why": said,
    }


if __name__ == "__main__":
    compiled_kernels.main()
