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
from kvcli.kernels.attend_invariant import SelectedPages, StoredKV, attend_invariant, attend_part, reference, why_not
from kvcli.kernels.merge_attention import PartialAttention

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
    before: list[PartialAttention]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def pos(self) -> list[int]:
        return [max(self.lengths) + int(row.sum()) - 1 for row in self.sees]

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def run(self) -> StoredKV:
        kv, cap, d = self.k.shape
        starts = [j * cap for j in range(kv)]
        # a shorter head lacks its oldest slots
        pos = torch.cat([torch.arange(cap, dtype=torch.int32) + max(self.lengths) - n for n in self.lengths])
        return StoredKV(self.k.view(-1, d), self.v.view(kv * cap, -1), pos, starts, self.lengths, starts)

    def attend(self, level: str, sees: Tensor | None = None) -> Tensor:
        run = self.run() if max(self.lengths) else None
        return attend_invariant(
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
            [PartialAttention(p.out[:, i : i + 1], p.lse[:, i : i + 1]) for p in self.before],
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
        PartialAttention(torch.randn(heads, n, e).to(number), torch.randn(heads, n) * 2)
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
                before=[PartialAttention(b.out[:, rest], b.lse[:, rest]) for b in p.before],
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
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("stored", [200, 4500, 8200])
def test_slots_behind_the_window_may_be_in_no_memory(level: str, dtype: torch.dtype, stored: int) -> None:
    """Spans and blocks are counted from where the sequence begins."""
    for rows in (chain(1), chain(70), tree(11)):
        p = past((32, 32, 2, 3), stored, rows, dtype, "window")
        want, run, d = p.attend(level, p.sees), p.run(), p.k.shape[2]
        for gone in {64, (stored - 70) // 64 * 64}:
            k, v = (t[:, gone:stored].reshape(-1, d) for t in (p.k, p.v))
            left = stored - gone
            part = StoredKV(k, v, run.pos[gone:stored].clone(), [0, left], [left] * 2, [0, 0], gone)
            assert torch.equal(
                attend_invariant(p.q, part, p.fresh, p.pos, p.scale, sees=p.sees, level=level, **p.options), want
            )
        wrong = StoredKV(k, v, run.pos[gone:stored].clone(), [0, left], [left] * 2, [0, 0])
        moved = attend_invariant(p.q, wrong, p.fresh, p.pos, p.scale, sees=p.sees, level=level, **p.options)
        torch.testing.assert_close(moved, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", FORMS)
def test_it_computes_what_the_reference_says(level: str, form: str) -> None:
    for shape, stored, sees in zip(SHAPES, (130, 0, 4200, 64, 70, 1, 63), (1, 5, 2, 9, 65, 7, 130), strict=True):
        p = past(shape, stored, tree(sees) if sees < 64 else chain(sees), torch.float32, form)
        p.k.nan_to_num_(0.0), p.v.nan_to_num_(0.0, posinf=0.0)
        run = p.run()
        wide = replace(run, k=run.k.double(), v=run.v.double())
        fresh = (p.fresh[0].double(), p.fresh[1].double())
        want = reference.attend_invariant(
            p.q.double(), wide, fresh, p.pos, p.scale, sees=p.sees, before=p.before, **p.options
        )
        torch.testing.assert_close(p.attend(level, p.sees).transpose(0, 1).double(), want.out, atol=3e-6, rtol=1e-5)
        asks = {key: p.options[key] for key in ("window", "softcap") if key in p.options}
        part = attend_part(p.q, run, p.pos, p.scale, level=level, **asks)
        want = reference.attend_invariant(p.q.double(), wide, None, p.pos, p.scale, **asks)
        torch.testing.assert_close(part.out.double(), want.out, atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(part.lse.double(), want.lse, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_a_part_is_what_the_same_slots_give_in_a_run(level: str) -> None:
    """A tier that nothing is appended to, then the newest: as one softmax over both."""
    p, older = (past((64, 64, 2, 2), n, chain(3), torch.bfloat16, "plain") for n in (300, 200))
    p.before = [attend_part(p.q, older.run(), p.pos, p.scale, level=level)]
    both = reference.attend_invariant(p.q, older.run(), None, p.pos, p.scale)
    want = reference.attend_invariant(p.q, p.run(), p.fresh, p.pos, p.scale, before=[both])
    torch.testing.assert_close(p.attend(level).transpose(0, 1).float(), want.out, atol=1e-2, rtol=1e-2)
    same_alone(p, [0, 1, 2], level, None)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The last rows of a chain of as many as there are keys."""
    rows, slots = q.shape[1], k.shape[1]
    sees = torch.ones(rows, slots, dtype=torch.bool).tril(slots - rows) if rows > 1 else None
    q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True)[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_it_is_as_exact_as_torch(level: str, dtype: torch.dtype) -> None:
    for shape, stored, n in (((64, 64, 2, 4), 500, 1), ((64, 64, 2, 4), 5000, 8), ((128, 128, 2, 2), 5000, 1)):
        p = past(shape, stored, chain(n), dtype, "plain")
        k = torch.cat([p.k[:, :stored], p.fresh[0]], 1)
        v = torch.cat([p.v[:, :stored], p.fresh[1]], 1)
        want = sdpa(p.q.double(), k.double(), v.double(), p.scale)
        theirs = (sdpa(p.q, k, v, p.scale).double() - want).norm()
        assert (p.attend(level).transpose(0, 1).double() - want).norm() <= 1.1 * theirs


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_last_rows_of_a_pass_may_ask_alone(level: str, dtype: torch.dtype, form: str) -> None:
    """As lookahead rows do: what they see of the rows before them is the same whether those ask beside them or not."""
    for shape, stored, n in (((64, 64, 2, 2), 130, 9), ((16, 8, 1, 1), 0, 5), ((8, 24, 3, 2), 4090, 40)):
        p = past(shape, stored, tree(n), dtype, form)
        together = p.attend(level, p.sees)
        for some in (1, 2, n - 1):
            last = slice(n - some, n)
            before = [PartialAttention(b.out[:, last], b.lse[:, last]) for b in p.before]
            asks = replace(p, q=p.q[:, last], before=before)
            assert torch.equal(asks.attend(level, p.sees[last]), together[last]), f"the last {some} of {n}"
            assert torch.equal(asks.attend(level), p.attend(level)[last]), "of a prompt"


def chosen(p: Past, page: int, share: float) -> SelectedPages:
    """Pages drawn by lot for each row and head; what lies behind the last whole page is read by all."""
    kv, n = len(p.lengths), p.q.shape[1]
    whole = [max(0, length - 13) // page for length in p.lengths]
    pages = torch.rand(kv, n, max(whole)) < share
    for j, m in enumerate(whole):
        pages[j, :, m:] = False
    behind = [m * page for m in whole]
    return SelectedPages(pages, page, behind, [a - b for a, b in zip(p.lengths, behind, strict=True)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", ["plain", "all"])
@pytest.mark.parametrize("page", [1, 4, 16, 64, 100])
def test_rows_read_the_pages_that_each_chose(level: str, form: str, page: int) -> None:
    for shape, stored, n in (((64, 64, 2, 4), 400, 5), ((16, 8, 3, 1), 5000, 2), ((96, 96, 1, 7), 130, 3)):
        p = past(shape, stored, chain(n), torch.float32, form)
        asks = {key: p.options[key] for key in ("window", "softcap") if key in p.options}
        for share in (0.0, 0.2, 0.95):
            mine = chosen(p, page, share)
            got = attend_part(p.q, p.run(), p.pos, p.scale, chosen=mine, level=level, **asks)
            run = p.run()
            wide = replace(run, k=run.k.double().nan_to_num(0.0), v=run.v.double().nan_to_num(0.0, posinf=0.0))
            want = reference.attend_invariant(p.q.double(), wide, None, p.pos, p.scale, chosen=mine, **asks)
            torch.testing.assert_close(got.out.double(), want.out, atol=3e-6, rtol=1e-5)
            torch.testing.assert_close(got.lse.double(), want.lse, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_what_others_chose_changes_no_bit(level: str, dtype: torch.dtype) -> None:
    """A row's sequence is its own pages: as if nothing else were stored."""
    p = past((64, 48, 2, 3), 5000, chain(6), dtype, "all")
    mine, asks = chosen(p, 16, 0.9), {"softcap": 5.0, "level": level}
    together = attend_part(p.q, p.run(), p.pos, p.scale, chosen=mine, **asks)
    for i in range(6):
        q, pos = p.q[:, i : i + 1], p.pos[i : i + 1]
        alone = attend_part(
            q, p.run(), pos, p.scale, chosen=replace(mine, pages=mine.pages[:, i : i + 1].clone()), **asks
        )
        k, v, lengths = torch.zeros_like(p.k), torch.zeros_like(p.v), []
        for j, n in enumerate(p.lengths):
            held = mine.pages[j, i].repeat_interleave(16).nonzero().flatten()
            held = torch.cat([held, torch.arange(mine.behind[j], n)])
            k[j, : len(held)], v[j, : len(held)] = p.k[j, held], p.v[j, held]
            lengths.append(len(held))
        only = attend_part(q, replace(p, k=k, v=v, lengths=lengths).run(), pos, p.scale, **asks)
        for part in (alone, only):
            assert torch.equal(part.out, together.out[:, i : i + 1])
            assert torch.equal(part.lse, together.lse[:, i : i + 1])


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


def test_what_is_not_served_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.kernels.triton_support._why_no_card", lambda device: "")
    card = torch.device("cuda", 7)  # the answers are kept
    assert why_not(torch.bfloat16, card, 64, 80) == ""
    assert "needs full precision" in why_not(torch.float32, card, 64, 64)
    assert "72" in why_not(torch.bfloat16, card, 72, 64)
    assert "512" in why_not(torch.float16, card, 64, 512)
