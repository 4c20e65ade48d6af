"""What compiled kernels may take, and the orders in which their forms must sum."""

from __future__ import annotations

from collections.abc import Sequence

from tests.kernels.compiled import CARDS, KIB, Compiled
from tests.kernels.variants import Variant

ROWS = ("M", "BM")  # names of the rows of a tile
EXCHANGES = ("LDS", "STS", "BAR", "SHFL")  # of threads of a program
# of what a step loads may come in pieces of 1 or 2 bytes: scales, which threads share, not what is streamed
NARROW = 1 / 3
SPILLED = 8  # bytes of stack: a value that waits while a program loops, which a step does not touch


def faults(variant: Variant, found: Compiled) -> list[str]:
    """What is wrong with a form on an architecture, a sentence each."""
    if found.fault:
        return [f"does not compile: {found.fault}"]
    if isinstance(found.arch, str):
        return [f"spills {found.stack} registers ({found.registers} taken)"] if found.stack else []
    said = []
    if found.stack > SPILLED or any(name.startswith(("LDL", "STL")) for name in found.counts):
        said.append(f"spills: {found.stack} bytes of stack, {found.spills} accesses ({found.registers} registers)")
    most = CARDS[found.arch][0] * KIB
    if found.shared > most:
        said.append(f"takes {found.shared:,} bytes of shared memory, a program has {most:,}")
    if variant.streams:
        said += _streaming_faults(found)
    if variant.budget and found.arch == 86 and found.step > 1.1 * variant.budget:
        said.append(f"takes {found.step:.0f} instructions a step, its budget is {variant.budget}")
    if variant.products and not found.layouts:
        said.append("has no matrix product")
    if variant.straight and (shared := [name for name in found.counts if name.startswith(EXCHANGES)]):
        said.append(f"has operands that go through shared memory in a step: {', '.join(shared)}")
    return said


def _streaming_faults(found: Compiled) -> list[str]:
    said = []
    width = {name: n * _bytes(name) for name, n in found.loads.items()}
    narrow = sum(n for name, n in width.items() if _bytes(name) < 4)
    if narrow > NARROW * sum(width.values()):
        said.append(f"loads in pieces of 1 and 2 bytes: {found.loads}")
    if not any(_bytes(name) == 16 for name in width):
        said.append(f"loads nothing in pieces of 16 bytes: {found.loads}")
    if found.programs < 2:
        said.append(f"{found.programs} program fits on a processor, for {found.limit}: nothing hides what it waits for")
    return said


def _bytes(load: str) -> int:
    """That an instruction loads for a thread: LDG.E.U16, LDGSTS.E.BYPASS.128."""
    words = set(load.split("."))
    return next(
        (n for n, names in {1: {"U8", "S8"}, 2: {"U16", "S16"}, 8: {"64"}, 16: {"128"}}.items() if words & names), 4
    )


def parted(found: Sequence[Compiled]) -> list[str]:
    """Layouts of warps and instructions, where forms of an op have several on an architecture: their rows part."""
    return (
        sorted({layout for one in found for layout in one.layouts})
        if len({str(one.layouts) for one in found}) > 1
        else []
    )


def other_sums(of: Sequence[tuple[Variant, Compiled]]) -> list[str]:
    """Forms of one kernel that differ by the rows of a tile alone, and sum in different orders; a sentence each.

    The compiler chooses which threads hold an axis by the shape of all of it. An interpreter cannot show it. Forms of
    prompts (no `products`), whose rows need no bits of their own, are held to one another alone.
    """
    said, first = [], dict[str, tuple[Variant, Compiled]]()
    for variant, found in of:
        same = variant.products, {name: value for name, value in variant.consts.items() if name not in ROWS}
        other, theirs = first.setdefault(f"{variant.kernel} {variant.types} {same}", (variant, found))
        if theirs.sums != found.sums:
            said.append(f"{other.name} sums by {theirs.sums}, {variant.name} by {found.sums}")
    return said
