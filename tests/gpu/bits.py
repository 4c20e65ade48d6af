"""Whether a row has the same bits alone as among others: fused ops by rows and places, attention by what is stored.

Of ours none may differ. What libraries do instead is counted beside it, which is why there are ops of our own; and an
op that does what ours may not has to be caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.gpu.ops import OURS, SEEDED, THEIRS, TINY, Make, Op, Size, layer, of_op
from tests.gpu.stage import On, Row, interpret_on_a_cpu, why
from tests.kernels.row_dependent import looking_at_rows

LOOKING = ("rms_norm", "linear_skinny", "attend_invariant")  # ops whose kernels are spoiled, to be caught
TOGETHER = (2, 3, 8, 16, 17, 32)
SCALE = 0.1
# round tiles of 32 and 64 slots, and round the ends of spans: of 128 each at first, from 4,096 on 512, then 2,048
AT = [0, 1, 5, 31, 32, 33, 60, 63, 64, 65, 96, 120, 127, 128, 129, 250, 255, 256, 257, 300, 511, 512, 513, 1000, 1023]
AT += [1024, 1025, 2047, 2048, 4088, 4095, 4096, 4097, 4600, 4607, 4608, 8191, 32_760, 32_767, 32_768, 34_815]
CHAIN, TREE = [*range(-1, 8)], [-1, 0, 0, 1, 1, 2, 3, 5, 5, 6]  # parents of rows
SHAPES = {"chain of 9": CHAIN, "chain of 32": [*range(-1, 31)], "tree of 10": TREE}


def differing(op: Op, together: Sequence[int], places: int) -> tuple[int, int]:
    """Rows that were tried among others, and how many of them had other bits than alone."""
    alone = torch.cat([op.call([i]) for i in range(max(together))])
    assert alone.isfinite().all(), "not all of it is a number"
    tried = bad = 0
    for n in together:
        for shift in range(0, n, max(1, n // places)):
            rows = [(i + shift) % n for i in range(n)]
            bad += _unequal(op.call(rows), alone[rows])
            tried += n
    return tried, bad


def _unequal(got: Tensor, want: Tensor) -> int:
    """Rows whose bits differ."""
    kind = {2: torch.int16, 4: torch.int32}[got.itemsize]
    return int((got.contiguous().view(kind) != want.contiguous().view(kind)).view(len(want), -1).any(1).sum())


def apart(parents: Sequence[int], slots: int, size: Size, g: torch.Generator, **more: Any) -> tuple[int, int]:
    """Rows of a tree in one pass against each alone, its ancestors stored: how many, and how many differ."""
    from kvcli.kernels.attend_invariant import fused
    from kvcli.kernels.attend_invariant.tables import Tree

    n = len(parents)
    q, table, k, v = layer(replace(size, slots=slots), g, room=n)
    lines = [_line(parents, row) for row in range(n)]
    pos = [slots + len(line) - 1 for line in lines]
    given = dict(capacity=slots + n, **more)
    tree = Tree.of_rows(parents, pos, g.device)
    fresh = (q[:, :n].contiguous(), k[:, :n].contiguous(), v[:, :n].contiguous())
    together, lse = fused.attend_invariant(fresh[0], table, *fresh[1:], tree, SCALE, **given)
    bad = 0
    for row, line in enumerate(lines):
        above = line[:-1]
        for head in range(size.kv):  # its ancestors become slots
            at = int(table.start[head]) + slots
            for held, new in ((table.k, k), (table.v, v)):
                held[at : at + len(above)] = new[head, above]
        one = replace(table, length=table.length + len(above))
        x, fresh_k, fresh_v = (t[:, row : row + 1].contiguous() for t in (q, k, v))
        alone, lse_alone = fused.attend_invariant(
            x, one, fresh_k, fresh_v, Tree.of_rows([-1], pos[row : row + 1], g.device), SCALE, **given
        )
        bad += bool(_unequal(together[row : row + 1], alone) or _unequal(lse[row : row + 1], lse_alone))
    return n, bad


def _line(parents: Sequence[int], row: int) -> list[int]:
    """A row's ancestors from the root down, and itself."""
    return [*(_line(parents, parents[row]) if parents[row] >= 0 else []), row]


def _sinks(size: Size, g: torch.Generator) -> dict[str, dict[str, Any]]:
    sink = torch.randn(size.heads, generator=g, device=g.device)
    return {"plain": {}, "softcap, window, sink": {"softcap": 5.0, "window": 100, "sink": sink}}


def run(on: On) -> Iterator[Row]:
    interpret_on_a_cpu(on)
    size, together, places = (TINY, (3,), 1) if on.is_tiny else (Size(slots=8192), TOGETHER, 32)
    g = torch.Generator(on.device).manual_seed(0)
    ours = bad = faults = 0

    def tried(name: str, kind: str, make: Make) -> Row:
        return _counted(name, kind, lambda: differing(make(size, g), together, places))

    for kind, ops in (("ours", OURS), ("libraries", THEIRS)):
        for name, make in ops.items():
            yield (row := tried(name, kind, make))
            if kind == "ours":
                ours, bad, faults = ours + row.get("tried", 0), bad + row.get("differ", 0), faults + ("fault" in row)
    seeded = [*_seeded(tried, LOOKING[: 1 if on.is_tiny else None])]
    yield from seeded
    yield from _stored(on, g, ours, bad, faults)
    missed = [row["op"] for row in seeded if not row.get("differ")]
    assert not missed, f"not caught: {', '.join(missed)}"  # behind all that was found


def _stored(on: On, g: torch.Generator, ours: int, bad: int, faults: int) -> Iterator[Row]:
    """Rows over slots stored and fresh, and what is said of all, with those before: rows, of which differ, faults."""
    small = TINY if on.is_tiny else Size()
    for slots in (62,) if on.is_tiny else AT:
        for mode, more in _sinks(small, g).items():
            for shape, parents in list(SHAPES.items())[2 if on.is_tiny else 0 :]:
                if on.left < 0:
                    yield {"says": f"{bad} of {ours} rows differ, {faults} faults; out of time at {slots} slots"}
                    return
                row = _counted(
                    f"attend_invariant, {shape}, {mode}", "stored", partial(apart, parents, slots, small, g, **more)
                )
                yield {**row, "slots": slots}
                ours, bad, faults = ours + row.get("tried", 0), bad + row.get("differ", 0), faults + ("fault" in row)
    yield {"differ": bad, "tried": ours, "faults": faults, "says": f"{bad} of {ours} rows differ, {faults} faults"}


def _seeded(tried: Callable[[str, str, Make], Row], ops: Sequence[str]) -> Iterator[Row]:
    """What has to be caught: an op of torch's, and kernels of ours with a line exchanged."""
    for name, make in SEEDED.items():
        yield tried(name, "seeded", make)
    for op in ops:
        with looking_at_rows(op):
            yield tried(f"{op}, looking at the rows", "seeded", of_op(op))


def _counted(name: str, kind: str, count: Callable[[], tuple[int, int]]) -> Row:
    row: Row = {"op": name, "kind": kind}
    try:
        tried, differ = count()
    except ImportError as error:
        return {**row, "not_here": why(error)}
    except Exception as error:
        return {**row, "fault": why(error)}
    return {**row, "tried": tried, "differ": differ}
