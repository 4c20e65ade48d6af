"""Fused attention in Triton's interpreter: softmax attention, and of each row the same bits alone and in company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvcli.kernels.append_kv import addresses
from kvcli.kernels.append_kv import reference as append_reference
from kvcli.kernels.attend import reference as attend_reference
from kvcli.kernels.attend.cpu import flash
from kvcli.kernels.attend_invariant import NewRows, StoredKV, prompts, reference
from kvcli.kernels.attend_invariant.tables import Table, Tree, uploaded
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.merge_attention import merge_attention as merge_parts
from kvcli.kernels.merge_attention import reference as merge_reference
from kvcli.kv.slots import AttentionParams
from tests import make

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before what is fused
fused = import_module("kvcli.kernels.attend_invariant.fused")
append, attend, merge, passes = (
    import_module(f"kvcli.kernels.{name}")
    for name in ("append_kv.fused", "attend.fused", "merge_attention.fused", "attend_invariant.passes")
)

CPU = torch.device("cpu")
TILE, UNIT = 16, 32  # spans of 32 slots, from 1,024 on of 128 and from 8,192 on of 512
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
        return self._run(self.q, self.table(self.lengths), self.fk, self.fv, tree, unit, max(self.lengths) + 40)

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
        return fused.attend_invariant(q, table, fk, fv, tree, 0.3, **bent, **given)

    def want(self) -> tuple[Tensor, Tensor]:
        """By the reference in float64: [N, H, E], [N, H]."""
        n = len(self.parents)
        sees = torch.eye(n, dtype=torch.bool)
        for row in range(n):
            sees[row, above(self.parents, row)] = True
        run = StoredKV(self.k.double(), self.v.double(), self.pos, self.starts, list(self.lengths), self.starts)
        fresh = self.fk.double(), self.fv.double()
        bent = {"window": self.window, "softcap": self.softcap, "sink": self.sink}
        part = reference.attend_invariant(self.q.double(), run, fresh, self.row_pos(), 0.3, sees=sees, **bent)
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


@pytest.mark.parametrize("length", [TILE, 2 * TILE + 5])
def test_holes_are_not_seen_through_a_window_wider_than_the_text(length: int) -> None:
    """Neither in whole tiles nor in the last one, which fresh rows share."""
    one = Case(chain(2), [length], window=10 * length)
    for hole in (3, length - 2, length - 1):
        one.pos[one.starts[0] + hole] = -1
        one.k[one.starts[0] + hole] *= 50
    out, lse = one.together()
    want, mass = one.want()
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), mass, atol=1e-5, rtol=1e-5)


BENT = {"softcap": 2.0, "window": 25, "has_sink": True}
COMPANY = {
    "chain of 9, in the first tile": {"parents": chain(9), "lengths": [15]},
    "chain of 9, over a span's edge, bent": {"parents": chain(9), "lengths": [60, 5], **BENT},
    "chain of 32, over two": {"parents": chain(32), "lengths": [31], "group": 1},
    "tree of 10, over an edge": {"parents": TREE, "lengths": [30, 63], "group": 1},
    "tree of 10, bent": {"parents": TREE, "lengths": [47], **BENT},
}


@pytest.mark.parametrize("case", COMPANY)
def test_a_row_has_the_bits_in_a_batch_that_it_has_alone(case: str) -> None:
    assert not rows_that_differ(Case(**COMPANY[case]))


@pytest.mark.core
def test_branches_behind_the_edge_of_a_span_have_the_bits_that_they_have_alone() -> None:
    assert not rows_that_differ(Case([-1, 0, 0], [UNIT - 1], group=1))


@pytest.mark.slow
@pytest.mark.parametrize("bent", [{}, BENT], ids=["plain", "bent"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 120, 250, 1023, 1024])
@pytest.mark.parametrize("parents", [chain(9), chain(32), TREE], ids=["chain of 9", "chain of 32", "tree of 10"])
def test_a_row_has_these_bits_round_every_edge(parents: list[int], length: int, dtype: torch.dtype, bent: dict) -> None:
    assert not rows_that_differ(Case(parents, [length, length // 3], dtype, **bent))


def test_a_partition_that_knows_the_number_of_rows_is_caught() -> None:
    case = Case(chain(3), [90], group=1)
    assert rows_that_differ(case, lambda n: UNIT if n > 1 else 2 * UNIT)


def test_rows_that_are_none_write_nothing() -> None:
    case = Case(chain(3), [40])
    tree = Tree.of_rows(case.parents, case.row_pos(), CPU)
    tree.path_of[1] = -1
    out = torch.full((3, 2, 16), torch.nan, dtype=case.dtype)
    out, lse = fused.attend_invariant(case.q, case.table([40]), case.fk, case.fv, tree, 0.3, capacity=64, out=out)
    assert out[1].isnan().all()
    assert lse[[0, 2]].isfinite().all()
    torch.testing.assert_close(out[[0, 2]].double(), case.want()[0][[0, 2]], atol=2e-2, rtol=2e-2)


def test_partitions_know_their_spans() -> None:
    for slots in (1, 127, 128, 129, 4096, 4097, 32768, 32769, 131072, 131073):
        spans = fused.n_spans(slots)
        fine, coarse = min(spans, 32), max(spans - 88, 0)
        assert (fine + 4 * (spans - fine - coarse) + 16 * coarse) * fused.UNIT >= slots, "the last slot is in the last"


def test_slots_lie_in_the_span_that_begins_before_them() -> None:
    """All partitions up to a million slots: those behind 32,768 too, which no test here is long enough for."""
    first_of, span_of = (getattr(fused, name).fn for name in ("first_of", "span_of"))
    firsts = [_plain(first_of, span, fused.UNIT) for span in range(fused.n_spans(1 << 20) + 1)]
    assert firsts[0] == 0
    assert firsts == sorted(set(firsts))
    for span, (first, behind) in enumerate(pairwise(firsts)):
        for slot in (first, behind - 1):
            assert (_plain(span_of, slot, fused.UNIT), fused.n_spans(slot + 1)) == (span, span + 1)


def _plain(helper: Callable[[Tensor, int], Tensor], of: int, unit: int) -> int:
    """What a helper of the kernels says, by Python's numbers."""
    plain = {"minimum": min, "maximum": max, "where": lambda when, then, other: then if when else other}
    return FunctionType(helper.__code__, {"tl": SimpleNamespace(**plain)})(of, unit)


@pytest.mark.parametrize("is_prompt", [False, True])
@pytest.mark.parametrize("window", [None, 30])
def test_kv_caches_hand_over_runs_and_passes(
    is_prompt: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows over a run with what their pass brings, lookahead rows that see their own rows, and what they saw before."""
    monkeypatch.setattr(passes, "MANY", 3)
    n = 5
    case = Case(chain(n), [50, 21], window=window, has_sink=True, group=1)
    line = None
    if not is_prompt:
        line = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1]]).bool()
    asks = n if line is None else len(line)
    q, pos = case.q[:, -asks:], case.row_pos()
    run = StoredKV(case.k, case.v, case.pos, case.starts, case.lengths, case.starts)
    before = [PartialAttention(torch.randn(2, asks, 16), torch.randn(2, asks))]
    own = NewRows(case.fk, case.fv, pos, line, None, case.sink, before)
    how = {"window": window, "softcap": 0.0}
    got = passes.read(q, run, own, pos[-asks:], 0.3, **how, is_prompt=is_prompt)
    want = reference.attend_invariant(
        q, run, (case.fk, case.fv), pos, 0.3, sees=line, before=before, sink=case.sink, **how
    )
    torch.testing.assert_close(got.out.float(), want.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-4, rtol=1e-4)
    sent = dict(own.sent)
    passes.read(q, run, own, pos[-asks:], 0.3, **how)
    assert {id(x) for x in own.sent.values()} == {id(x) for x in sent.values()}, "indices go to the device once a pass"
    alone = passes.read(q, run, None, pos[-asks:], 0.3, **how)
    want = reference.attend_invariant(q, run, None, pos[-asks:], 0.3, **how)
    torch.testing.assert_close(alone.out, want.out, atol=2e-2, rtol=2e-2)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> PartialAttention:
    """Stands for PyTorch's, which a GPU has alone."""
    return PartialAttention(
        *flash(q, k, v, scale, torch.ones(q.shape[1], k.shape[1]).tril().bool() if is_causal else None)
    )


@pytest.mark.parametrize("stored", [0, 21])
def test_chunks_of_a_prompt_are_merged_of_what_flash_attention_gives(
    stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "MANY", 3)
    monkeypatch.setattr(prompts, "_flash", _flash)
    case = Case(chain(5), [stored, stored])
    run = StoredKV(case.k, case.v, case.pos, case.starts, case.lengths, case.starts)
    before = [PartialAttention(torch.randn(len(case.q), 5, 16), torch.randn(len(case.q), 5))] if stored else []
    own, pos = NewRows(case.fk, case.fv, case.row_pos(), None, None, None, before), case.row_pos()
    got = passes.read(case.q, run, own, pos, 0.3, window=None, softcap=0.0, is_prompt=True)
    want = reference.attend_invariant(case.q, run, (case.fk, case.fv), pos, 0.3, before=before)
    torch.testing.assert_close(got.out.float(), want.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-4, rtol=1e-4)
    assert not prompts.serves(case.q, run, own, 8, 0.0)
    assert not prompts.serves(case.q, replace(run, lengths=[stored, 3]), own, None, 0.0)
    assert not prompts.serves(case.q[:, 1:], run, own, None, 0.0)


def test_flash_attention_takes_rows_as_they_are_handed_over() -> None:
    q, k = (torch.empty(heads, n, 64, dtype=torch.bfloat16, device="meta") for heads, n in ((4, 70), (2, 90)))
    part = prompts._flash(q, k, k, 0.3, is_causal=False)
    assert (part.out.shape, part.lse.shape) == ((4, 70, 64), (4, 70))


@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_kv_cache_reads_its_slots_through_them(is_ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    r = torch.Generator().manual_seed(8)
    q, k, v, fk, fv = (torch.randn(2, n, 16, generator=r).bfloat16() for n in (3, 41, 41, 3, 3))
    kv, pos = make.dense((1, 2, 16), torch.bfloat16, step=8), [41, 42, 42]
    kv.append(0, k, v, 0)
    if is_ragged:
        kv.evict_except(0, torch.rand(2, 41, generator=r) < 0.6)
    line = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    for sight in (AttentionParams(0.3), AttentionParams(0.3, softcap=1.5, window=20, is_prompt=True)):
        sees = line if sight.window is None else line & (torch.tensor(pos) > torch.tensor(pos)[:, None] - sight.window)
        want = merge_parts(kv.attend(0, q, sight, pos, NewRows(fk, fv, pos, line, sees)))
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr("kvcli.kv.tiers.dense_layer.attend_stored_and_new", passes.read)
            on_gpu.setattr("kvcli.kv.tiers.dense_layer.serves", lambda q, v: True)
            got = merge_parts(kv.attend(0, q, sight, pos, NewRows(fk, fv, pos, line, None)))
        torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def test_a_pass_over_nothing_reads_itself() -> None:
    case = Case(chain(2), [0])
    got = passes.read(case.q, None, NewRows(case.fk, case.fv, [0, 1], None, None), [0, 1], 0.3, window=8, softcap=0.0)
    want = reference.attend_invariant(case.q, None, (case.fk, case.fv), [0, 1], 0.3, window=8)
    torch.testing.assert_close(got.out.float(), want.out, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("length", [0, 70, [70, 3]])
@pytest.mark.parametrize("upto", [None, [0, 9, 70]])
def test_slots_alone_are_read_as_the_reference_reads_them(length: int | list[int], upto: list[int] | None) -> None:
    r = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(shape, generator=r).bfloat16() for shape in ((4, 3, 16), (2, 80, 16), (2, 80, 16)))
    limit = None if upto is None else torch.tensor(upto, dtype=torch.int32)
    args = q, k[:, 2:], v[:, 2:], 0.3, 1.5, None, length, limit
    for got, want in zip(attend.attend(*args), attend_reference.attend(*args), strict=True):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_many_rows_over_slots_alone_leave_one_part_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt over a tier of 32,768 slots would take 2.4 GB otherwise, in an 8B shape."""
    monkeypatch.setattr(attend, "MANY", 2)
    monkeypatch.setattr(passes, "MANY", 2)
    parts, fold = [], fused.fold
    monkeypatch.setattr(fused, "fold", lambda outs, *a, **k: (parts.append(outs.shape[2]), fold(outs, *a, **k)))
    r = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 3, 16, generator=r).bfloat16(), torch.randn(1, 600, 16, generator=r).bfloat16()
    want = attend_reference.attend(q, k, k, 0.3, 0.0, None, 600)
    run = StoredKV(k[0], k[0], torch.arange(600, dtype=torch.int32), [0], [600], [0])
    part = passes.read(q, run, None, [600] * 3, 0.3, window=None, softcap=0.0)
    for got in (attend.attend(q, k, k, 0.3, 0.0, None, 600), (part.out, part.lse)):
        torch.testing.assert_close(got[0], want[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(got[1], want[1], atol=1e-4, rtol=1e-4)
    assert parts == [1, 1]


def test_no_slots_at_all_are_read() -> None:
    q, k = torch.randn(2, 3, 16).bfloat16(), torch.zeros(2, 0, 16).bfloat16()
    out, lse = attend.attend(q, k, k, 0.3, 0.0, None, 0)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_masks_are_left_to_the_reference() -> None:
    q, k = torch.randn(2, 3, 16).bfloat16(), torch.randn(1, 5, 16).bfloat16()
    mask = torch.rand(3, 5) < 0.5
    assert torch.equal(
        attend.attend(q, k, k, 1.0, 0.0, mask, 5)[0], attend_reference.attend(q, k, k, 1.0, 0.0, mask, 5)[0]
    )


@pytest.mark.parametrize("n_parts", [1, 2, 5])
def test_parts_merge_and_one_that_saw_nothing_changes_no_bit(n_parts: int) -> None:
    r = torch.Generator().manual_seed(5)
    outs = [torch.randn(2, 3, 24, generator=r) for _ in range(n_parts)]
    lses = [torch.randn(2, 3, generator=r) * 4 for _ in range(n_parts)]
    lses[0][0, 0] = -torch.inf
    out, lse = merge.merge_attention(outs, lses)
    torch.testing.assert_close(out, merge_reference.merge_attention(outs, lses))
    torch.testing.assert_close(lse, torch.logsumexp(torch.stack(lses), 0))
    blind = torch.full_like(outs[0], torch.nan), torch.full_like(lses[0], -torch.inf)
    for at in range(n_parts + 1):
        more = [*outs[:at], blind[0], *outs[at:]], [*lses[:at], blind[1], *lses[at:]]
        assert all(map(torch.equal, merge.merge_attention(*more), (out, lse)))
    if n_parts == 1:
        assert torch.equal(out[:, 1:], outs[0][:, 1:]), "one part is as it is"


def merged(outs: list[Tensor], lses: list[Tensor], rows: slice) -> Tensor:
    return merge.merge_attention([o[:, rows] for o in outs], [t[:, rows] for t in lses])[0]


def rows_that_merge_otherwise() -> int:
    r, n = torch.Generator().manual_seed(9), 7
    outs, lses = ([torch.randn(2, n, *more, generator=r) for _ in range(6)] for more in ((24,), ()))
    together = merged(outs, lses, slice(n))
    return sum(not torch.equal(merged(outs, lses, slice(i, i + 1))[:, 0], together[:, i]) for i in range(n))


def test_rows_merge_alone_as_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_that_merge_otherwise() == 0
    fold = merge.fold  # and the test of the test: as many parts at once as there are rows, up to two
    monkeypatch.setattr(merge, "fold", lambda *a, **k: fold(*a, **k, at_once=min(2, a[0].shape[1])))
    assert rows_that_merge_otherwise() > 0


def test_rows_with_limits_have_the_same_bits_alone() -> None:
    """A tile that one row's limit lies in, and others are past, is one that all slots are stored of."""
    r = torch.Generator().manual_seed(4)
    limits = torch.tensor([0, 9, 63, 64, 65, 200, 256, 299], dtype=torch.int32)
    q, k, v = (torch.randn(kv, n, 16, generator=r).bfloat16() for kv, n in ((2, len(limits)), (1, 300), (1, 300)))
    args = k, v, 0.3, 0.0, None, 300
    together = attend.attend(q, *args, limits)
    for i in range(len(limits)):
        mine = slice(i, i + 1)
        for got, want in zip(attend.attend(q[:, mine], *args, limits[mine]), together, strict=True):
            assert torch.equal(got, want[:, mine])


def test_accepted_rows_are_slots_of_all_layers() -> None:
    r = torch.Generator().manual_seed(6)
    got, want = ([_layer(r, shared) for shared in (False, True)] for r in (r, torch.Generator().manual_seed(6)))
    fresh = [tuple(torch.randn(20, 2, size, generator=r).bfloat16().transpose(0, 1) for size in (16, 48)) for _ in "ab"]
    path, pos = torch.tensor([*range(1, 20, 2), *range(0, 18, 2), -1], dtype=torch.int32), torch.arange(90, 110).int()
    for count in (torch.tensor([n], dtype=torch.int32) for n in (19, 0, 1)):
        append.append_kv(addresses(got, fresh, CPU), path, count, pos, heads=2, d=16, e=48, like=fresh[0][0])
        append_reference.append_kv(want, fresh, path, count, pos)
        for a, b in zip(got, want, strict=True):
            for name in ("k", "v", "pos", "length"):
                torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0, equal_nan=True)


def _layer(r: torch.Generator, is_shared: bool) -> Table:
    """Two heads in one pool, of unequal length unless their positions are one row."""
    lengths = torch.tensor([9, 9] if is_shared else [9, 30], dtype=torch.int32)
    k, v = (torch.full((110, size), torch.nan, dtype=torch.bfloat16) for size in (16, 48))
    start = torch.tensor([1, 55], dtype=torch.int32)
    return Table(k, v, torch.zeros(110, dtype=torch.int32), start, lengths, start * 0 if is_shared else None)
