"""Attention over one sequence a row: the numbers of the reference, and the same bits whoever else is in the pass."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcli.kernels import native
from kvcli.kernels.attend_rows import Run, attend_part, attend_rows, reference, why_not
from kvcli.kernels.merge import Part

pytestmark = pytest.mark.skipif(not native.levels(), reason=native.why_not() or "unknown")
LEVELS = native.levels()
NUMBERS = [torch.float32, torch.bfloat16]
# What else a layer may ask for; `before` is how many parts, `ragged` that heads differ in length
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "all": {"window": 190, "softcap": 5.0, "sink": True, "before": 2, "ragged": True},
    "ragged": {"ragged": True, "before": 1},
}
# (D, E, KV heads, query heads of each)
SHAPES = [
    (64, 64, 2, 4),
    (128, 128, 2, 1),
    (96, 96, 1, 7),
    (256, 256, 1, 2),
    (8, 24, 3, 2),
    (16, 8, 1, 1),
    (80, 64, 2, 3),
]
EDGES = [0, 1, 63, 64, 65, 127, 500, 4095, 4096, 8190]


@dataclass
class Past:
    """Stored slots and rows, with what a layer asks for."""

    q: Tensor  # [H, N, D], as a view of [N, H, D]
    k: Tensor  # [K, cap, D]
    v: Tensor  # [K, cap, E]
    lengths: list[int]
    fresh: tuple[Tensor, Tensor]
    sees: Tensor  # [N, N]
    before: list[Part]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def pos(self) -> list[int]:
        return [max(self.lengths) + int(row.sum()) - 1 for row in self.sees]

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def run(self) -> Run:
        kv, cap, d = self.k.shape
        starts = [j * cap for j in range(kv)]
        # a shorter head lacks its oldest slots
        pos = torch.cat([torch.arange(cap, dtype=torch.int32) + max(self.lengths) - n for n in self.lengths])
        return Run(self.k.view(-1, d), self.v.view(kv * cap, -1), pos, starts, self.lengths, starts)

    def attend(self, level: str, sees: Tensor | None = None) -> Tensor:
        run = self.run() if max(self.lengths) else None
        return attend_rows(
            self.q, run, self.fresh, self.pos, self.scale, sees=sees, before=self.before, level=level, **self.options
        )

    def alone(self, i: int) -> Past:
        """Row i by itself, after those it sees have been stored: plain decoding."""
        seen = [f for f in range(i) if self.sees[i, f]]
        k, v = self.k.clone(), self.v.clone()
        for j, n in enumerate(self.lengths):
            k[j, n : n + len(seen)] = self.fresh[0][j, seen]
            v[j, n : n + len(seen)] = self.fresh[1][j, seen]
        return Past(
            self.q[:, i : i + 1],
            k,
            v,
            [n + len(seen) for n in self.lengths],
            (self.fresh[0][:, i : i + 1], self.fresh[1][:, i : i + 1]),
            torch.ones(1, 1, dtype=torch.bool),
            [Part(p.out[:, i : i + 1], p.lse[:, i : i + 1]) for p in self.before],
            self.options,
        )


def past(shape: tuple[int, int, int, int], stored: int, sees: Tensor, dtype: torch.dtype, form: str) -> Past:
    """Random numbers; the spare room behind each head's slots is NaN and inf."""
    d, e, kv, group = shape
    n, asks = len(sees), dict(FORMS[form])
    shorter = 37 if asks.pop("ragged", False) else 0
    lengths = [max(0, stored - shorter * j) for j in range(kv)]
    k, v = (
        torch.full((kv, stored + n + 1, d), torch.nan, dtype=dtype),
        torch.full((kv, stored + n + 1, e), torch.inf, dtype=dtype),
    )
    for j, length in enumerate(lengths):
        k[j, :length], v[j, :length] = torch.randn(length, d), torch.randn(length, e)
    rows = [
        torch.randn(n, heads, size).to(dtype).transpose(0, 1) for heads, size in ((kv * group, d), (kv, d), (kv, e))
    ]
    heads = kv * group
    before = [
        Part(torch.randn(heads, n, e).to(number), torch.randn(heads, n) * 2)
        for number in (torch.float32, dtype)[: asks.pop("before", 0)]
    ]
    if asks.pop("sink", False):
        asks["sink"] = torch.randn(heads)
    return Past(rows[0], k, v, lengths, (rows[1], rows[2]), sees, before, asks)


def tree(n: int) -> Tensor:
    """[n, n]: who sees whom in a tree whose branches are mostly short, with some rows that see only themselves."""
    sees = torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        if random.random() < 0.9:
            sees[i] |= sees[random.randrange(max(0, i - 3), i) if random.random() < 0.8 else random.randrange(i)]
    return sees


def chain(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def same_alone(p: Past, rows: list[int], level: str, sees: Tensor | None) -> None:
    together = p.attend(level, sees)
    assert together.isfinite().all()
    for i in rows:
        assert torch.equal(p.alone(i).attend(level)[0], together[i]), f"row {i} of {len(p.sees)}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_a_tree_gives_the_bits_of_plain_decoding(level: str, dtype: torch.dtype, form: str) -> None:
    # rows whose tail fits a block beside rows whose tail does not, in one tile: 60 and 4,090 slots
    for shape, stored, n in zip(SHAPES, (60, 63, 0, 127, 4090, 64, 61), (64, 64, 33, 5, 40, 70, 2), strict=True):
        p = past(shape, stored, tree(n), dtype, form)
        same_alone(p, list(range(n)), level, p.sees)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_a_prompt_gives_the_bits_of_plain_decoding(level: str, dtype: torch.dtype, form: str) -> None:
    # the last: so many tiles that each does its own spans, and a span that ends among fresh rows
    for shape, stored, n in (((64, 64, 2, 4), 100, 200), ((8, 24, 3, 2), 0, 150), ((16, 8, 2, 7), 4090, 130)):
        p = past(shape, stored, chain(n), dtype, form)
        same_alone(p, [0, 1, 62, 63, 64, *random.sample(range(n), 4), n - 1], level, None)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_it_makes_no_difference_which_rows_are_stored_already(level: str, dtype: torch.dtype) -> None:
    for edge in (e for e in EDGES if e <= 4096):
        p = past((16, 16, 2, 2), edge, chain(67), dtype, "all")
        # the same sequence from other seams: the first m rows stored
        for m in (1, 2, 5, 64):
            stored = p.alone(m)
            rest = slice(m, None)
            later = replace(
                stored,
                q=p.q[:, rest],
                fresh=(p.fresh[0][:, rest], p.fresh[1][:, rest]),
                sees=chain(67 - m),
                before=[Part(b.out[:, rest], b.lse[:, rest]) for b in p.before],
            )
            assert torch.equal(later.attend(level), p.attend(level)[m:]), f"{edge} slots, then {m} rows"


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits_at_every_edge(
    level: str, dtype: torch.dtype, form: str, shape: tuple[int, int, int, int]
) -> None:
    for stored in EDGES:
        for n in (1, 2, 5, 16, 33, 64):
            p = past(shape, stored, tree(n), dtype, form)
            same_alone(p, random.sample(range(n), min(n, 4)), level, p.sees)
        p = past(shape, stored, chain(130), dtype, form)
        same_alone(p, random.sample(range(130), 5), level, None)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", FORMS)
def test_it_computes_what_the_reference_says(level: str, form: str) -> None:
    for shape, stored, sees in zip(SHAPES, (130, 0, 4200, 64, 70, 1, 63), (1, 5, 2, 9, 65, 7, 130), strict=True):
        p = past(shape, stored, tree(sees) if sees < 64 else chain(sees), torch.float32, form)
        p.k.nan_to_num_(0.0), p.v.nan_to_num_(0.0, posinf=0.0)
        run = p.run()
        wide = replace(run, k=run.k.double(), v=run.v.double())
        fresh = (p.fresh[0].double(), p.fresh[1].double())
        want = reference.attend_rows(
            p.q.double(), wide, fresh, p.pos, p.scale, sees=p.sees, before=p.before, **p.options
        )
        torch.testing.assert_close(p.attend(level, p.sees).transpose(0, 1).double(), want.out, atol=3e-6, rtol=1e-5)
        asks = {key: p.options[key] for key in ("window", "softcap") if key in p.options}
        part = attend_part(p.q, run, p.pos, p.scale, level=level, **asks)
        want = reference.attend_rows(p.q.double(), wide, None, p.pos, p.scale, **asks)
        torch.testing.assert_close(part.out.double(), want.out, atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(part.lse.double(), want.lse, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_a_part_is_what_the_same_slots_give_in_a_run(level: str) -> None:
    """A tier that nothing is appended to, then the newest: as one softmax over both."""
    p, older = (past((64, 64, 2, 2), n, chain(3), torch.bfloat16, "plain") for n in (300, 200))
    p.before = [attend_part(p.q, older.run(), p.pos, p.scale, level=level)]
    both = reference.attend_rows(p.q, older.run(), None, p.pos, p.scale)
    want = reference.attend_rows(p.q, p.run(), p.fresh, p.pos, p.scale, before=[both])
    torch.testing.assert_close(p.attend(level).transpose(0, 1).float(), want.out, atol=1e-2, rtol=1e-2)
    same_alone(p, [0, 1, 2], level, None)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_it_is_as_exact_as_torch(level: str, dtype: torch.dtype) -> None:
    for shape, stored in (((64, 64, 2, 4), 500), ((128, 128, 2, 2), 5000)):
        p = past(shape, stored, chain(1), dtype, "plain")
        k = torch.cat([p.k[:, :stored], p.fresh[0]], 1)
        v = torch.cat([p.v[:, :stored], p.fresh[1]], 1)

        want = sdpa(p.q.double(), k.double(), v.double(), p.scale)
        theirs = (sdpa(p.q, k, v, p.scale).double() - want).norm()
        # in float32 torch adds up one row's products in several chains, ours is one
        within = 1.1 if dtype == torch.bfloat16 else 1.5
        assert (p.attend(level).transpose(0, 1).double() - want).norm() <= within * theirs


@pytest.mark.parametrize("level", LEVELS)
def test_threads_change_nothing(level: str) -> None:
    functions = native.native(level)
    assert functions is not None
    cases = [
        past((64, 64, 2, 2), 9000, tree(9), torch.bfloat16, "all"),
        past((64, 64, 2, 7), 70, chain(300), torch.bfloat16, "all"),
    ]
    found = []
    try:
        for threads in (1, 2, 5):
            functions.use_threads(threads)
            found.append([p.attend(level, p.sees) for p in cases])
    finally:
        functions.use_threads(1)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_row_that_sees_nothing_gets_zeros() -> None:
    p = past((16, 16, 1, 2), 70, chain(1), torch.float32, "plain")
    part = attend_part(p.q, p.run(), [1000], p.scale, window=5)
    assert part.out.eq(0).all()
    assert part.lse.eq(-torch.inf).all()
    empty = attend_part(p.q, replace(p.run(), lengths=[0]), [0], p.scale)
    assert empty.out.eq(0).all()
    assert empty.lse.eq(-torch.inf).all()


def test_what_is_not_served() -> None:
    cpu = torch.device("cpu")
    assert why_not(torch.bfloat16, cpu, 64, 64) == ""
    assert "float16" in why_not(torch.float16, cpu, 64, 64)
    assert "meta" in why_not(torch.bfloat16, torch.device("meta"), 64, 64)
    assert "63" in why_not(torch.bfloat16, cpu, 63, 64)
