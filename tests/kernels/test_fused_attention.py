"""Fused attention in Triton's interpreter: softmax attention, and of each row the same bits alone and in company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvcli.kernels.attend_rows import Run, reference
from kvcli.kernels.attend_rows.tables import Table, Tree, uploaded

pytest.importorskip("tests.kernels.interpreted")  # before what is fused
fused = pytest.importorskip("kvcli.kernels.attend_rows.fused")

CPU = torch.device("cpu")
TILE, UNIT = 16, 32  # spans of 32 slots, from 512 on of 64 and from 4096 on of 256
TREE = [-1, 0, 0, 1, 1, 2, 4, 3, 0, 8]
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


def chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def above(parents: Sequence[int], row: int) -> list[int]:
    """A row's ancestors from the root down."""
    parent = parents[row]
    return [] if parent < 0 else [*above(parents, parent), parent]


@dataclass
class Case:
    """Rows of a tree over heads that hold slots each, in one pool, with gaps of garbage between them."""

    parents: Sequence[int]
    lengths: Sequence[int]
    dtype: torch.dtype = torch.bfloat16
    group: int = 2
    d: int = 16
    e: int = 16
    window: int | None = None
    softcap: float = 0.0
    has_sink: bool = False

    def __post_init__(self) -> None:
        r, kv, n = torch.Generator().manual_seed(7), len(self.lengths), len(self.parents)
        self.depth = [len(above(self.parents, row)) for row in range(n)]
        room = [length + n + 3 for length in self.lengths]
        self.starts = [sum(room[:j]) for j in range(kv)]
        self.q, self.k, self.v, self.fk, self.fv = (
            torch.randn(shape, generator=r).to(self.dtype)
            for shape in (
                (kv * self.group, n, self.d),
                *((sum(room), size) for size in (self.d, self.e)),
                *((kv, n, size) for size in (self.d, self.e)),
            )
        )
        self.pos = torch.full((sum(room),), -1, dtype=torch.int32)
        self.first = max(self.lengths)  # position of the root; what a head has lost is behind it
        for start, length in zip(self.starts, self.lengths, strict=True):
            self.pos[start : start + length] = torch.arange(self.first - length, self.first)
        self.sink = torch.randn(kv * self.group, generator=r) if self.has_sink else None

    def row_pos(self) -> list[int]:
        return [self.first + depth for depth in self.depth]

    def table(self, lengths: Sequence[int]) -> Table:
        return Table(self.k, self.v, self.pos, *uploaded([self.starts, lengths], CPU))

    def together(self, unit: int = UNIT) -> tuple[Tensor, Tensor]:
        """All rows in one pass: [N, H, E], [N, H]."""
        tree = Tree.of_rows(self.parents, self.row_pos(), CPU)
        return self._run(self.q, self.table(self.lengths), self.fk, self.fv, tree, unit, max(self.lengths) + 999)

    def alone(self, row: int, unit: int = UNIT) -> tuple[Tensor, Tensor]:
        """One row whose ancestors are stored: [1, H, E], [1, H]."""
        before = above(self.parents, row)
        for j, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            at = slice(start + length, start + length + len(before))
            self.k[at], self.v[at] = self.fk[j, before], self.fv[j, before]
            self.pos[at] = torch.arange(self.first, self.first + len(before))
        lengths = [length + len(before) for length in self.lengths]
        tree = Tree.of_rows([-1], [self.first + len(before)], CPU)
        mine = slice(row, row + 1)
        fresh = self.fk[:, mine], self.fv[:, mine]
        return self._run(self.q[:, mine], self.table(lengths), *fresh, tree, unit, max(lengths))

    def _run(
        self, q: Tensor, table: Table, fk: Tensor, fv: Tensor, tree: Tree, unit: int, capacity: int
    ) -> tuple[Tensor, Tensor]:
        bent = {"softcap": self.softcap, "window": self.window, "sink": self.sink}
        size = fused.scratch_size(q.shape[0], q.shape[1], self.e, capacity, tree.path.shape[1]) * fused.UNIT // unit
        scratch = torch.full((size,), torch.nan)
        out = torch.full((q.shape[1], q.shape[0], self.e), torch.nan, dtype=self.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
        given = {"out": out, "lse": lse, "scratch": scratch, "capacity": capacity, "unit": unit, "tile": TILE}
        return fused.attend_rows(q, table, fk, fv, tree, 0.3, **bent, **given)

    def want(self) -> tuple[Tensor, Tensor]:
        """By the reference in float64: [N, H, E], [N, H]."""
        n = len(self.parents)
        sees = torch.eye(n, dtype=torch.bool)
        for row in range(n):
            sees[row, above(self.parents, row)] = True
        run = Run(self.k.double(), self.v.double(), self.pos, self.starts, list(self.lengths), self.starts)
        fresh = self.fk.double(), self.fv.double()
        bent = {"window": self.window, "softcap": self.softcap, "sink": self.sink}
        part = reference.attend_rows(self.q.double(), run, fresh, self.row_pos(), 0.3, sees=sees, **bent)
        return part.out.transpose(0, 1), part.lse.T


def rows_that_differ(case: Case, unit_of: Callable[[int], int] = lambda n: UNIT) -> list[int]:
    """Rows that have other bits in company than alone; `unit_of` a number of rows, a partition that must not know."""
    out, lse = case.together(unit_of(len(case.parents)))
    found = []
    for row in range(len(case.parents)):
        one, mass = case.alone(row, unit_of(1))
        if not (torch.equal(one[0], out[row]) and torch.equal(mass[0], lse[row])):
            found.append(row)
    return found


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "case",
    [
        {"parents": [-1], "lengths": [0]},
        {"parents": chain(9), "lengths": [77, 31]},
        {"parents": TREE, "lengths": [64, 3], "window": 30, "softcap": 2.0, "has_sink": True},
        {"parents": TREE, "lengths": [33], "group": 3, "d": 80, "e": 48},
        {"parents": chain(3), "lengths": [600], "group": 1, "window": 40},
    ],
    ids=lambda case: ",".join(map(str, case.values())) if isinstance(case, dict) else None,
)
def test_rows_are_softmax_attention_over_slots_and_ancestors(case: dict, dtype: torch.dtype) -> None:
    one = Case(dtype=dtype, **case)
    out, lse = one.together()
    want, mass = one.want()
    torch.testing.assert_close(out.double(), want, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    torch.testing.assert_close(lse.double(), mass, atol=1e-5, rtol=1e-5)
