"""Native linear layers, plain and packed: a row's bits are its own, at every level; and the swap inside a model."""

from __future__ import annotations

import ctypes
import shutil
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from kvcli.kernels import linear_quantized
from kvcli.kernels import native as built
from kvcli.kernels.gated_mlp import type_of
from kvcli.kernels.linear import (
    PIECE,
    NativeLinear,
    NativeWeight,
    WeightArena,
    linear,
    pack,
    reference,
    unpack,
    use_native_linear_,
    why_not,
)
from kvcli.kernels.linear_quantized import reference as packed
from kvcli.kernels.linear_quantized.formats import group_format
from kvcli.kernels.native import build

pytestmark = pytest.mark.skipif(not built.levels(), reason=built.why_not())
LEVELS = built.levels() or ("none",)
MOST = 66  # rows: more than any tile, any number that begins another way, and one besides


@dataclass(frozen=True)
class Case:
    """A layer: 16, 32 or packed bits, rows of odd sizes, outputs that fill no panel."""

    bits: int  # 32 and 16: plain
    dtype: torch.dtype
    n: int
    k: int
    group: int = 0
    biased: bool = False

    def layer(self, level: str | None = None) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """What multiplies rows by it, and the same in float64."""
        g = torch.Generator().manual_seed(self.n * self.k)
        w = (torch.randn(self.n, self.k, generator=g) * 0.05).to(self.dtype)
        w[:, -1] = -w[:, 7 % self.k]  # so that `loud` rows end near zero
        b = torch.randn(self.n, generator=g).to(self.dtype) if self.biased else None
        if self.bits < 16:
            q, scale = packed.round8(w) if self.bits == 8 else packed.round4(w, self.group)
            wide, data = (
                packed.weight(self.bits, self.group, q, scale.double()),
                linear_quantized.arrange_panels(q, self.bits),
            )
            form = group_format(self.bits, self.group)
            return (
                lambda x: linear_quantized.linear(x, self.n, form, data, scale, level=level),
                lambda x: x.double() @ wide.T,
            )
        laid, wide_b = pack(w), None if b is None else b.double()
        return (
            lambda x: linear(x, laid, b, self.n, level=level),
            lambda x: reference.linear(x.double(), w.double(), wide_b),
        )

    def rows(self, m: int) -> Tensor:
        x = torch.randn(m, self.k, generator=torch.Generator().manual_seed(m))
        x[:, 7:8] *= 300  # an outlier channel, as models have
        return x.to(self.dtype)

    def loud(self, m: int) -> Tensor:
        """Rows whose sums go far up and come back in the end, so that bf16 shows what float32 lost on the way."""
        x = self.rows(m)
        x[:, 7 % self.k] = x[:, -1] = 3e4
        return x


BF16, FP32 = torch.bfloat16, torch.float32
CASES = [
    *(Case(16, BF16, *size, biased=biased) for size in ((1, 2), (100, 98), (131, 514)) for biased in (False, True)),
    *(Case(32, FP32, *size, biased=biased) for size in ((1, 1), (100, 97), (131, 257)) for biased in (False, True)),
    *(Case(8, dtype, *size) for size in ((1, 16), (100, 48), (131, 320)) for dtype in (BF16, FP32)),
    *(Case(4, dtype, 112, 3 * group, group) for group in (32, 64, 128) for dtype in (BF16, FP32)),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
levels = pytest.mark.parametrize("level", LEVELS)


def strays(run: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    """Companies in which a row of x came out otherwise than among all."""
    whole, found = run(x), []
    for m in range(1, x.shape[0]):
        if not torch.equal(run(x[:m]), whole[:m]):
            found.append(f"the first {m}")
    for seed, m in enumerate((1, 2, 3, 5, 7, 13, 30, x.shape[0])):
        some = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(seed))[:m]
        if not torch.equal(run(x[some]), whole[some]):
            found.append(f"{m} in another order")
    return found


@levels
@cases
def test_a_row_does_not_know_its_neighbours(case: Case, level: str):
    run, _ = case.layer(level)
    assert strays(run, case.loud(MOST)) == []


@levels
@cases
def test_nor_those_of_a_long_prompt(case: Case, level: str):
    run, _ = case.layer(level)
    x = case.loud(2048)
    whole = run(x)
    drawn = torch.randperm(2048, generator=torch.Generator().manual_seed(0))
    for some in (slice(0, 130), slice(500, 525), slice(2047, 2048), drawn[:65], drawn[65:600]):
        assert torch.equal(run(x[some]), whole[some]), some


@pytest.mark.skipif("avx512bf16" not in LEVELS, reason="this CPU has one kind of digits")
@pytest.mark.parametrize("case", [c for c in CASES if c.bits < 16 and c.dtype == BF16], ids=str)
def test_all_kinds_of_digits_give_the_same_bits(case: Case):
    for m in (1, 3, 4, 17, 66):
        want = case.layer("avx2")[0](case.loud(m))
        for level in LEVELS[LEVELS.index("avx512bf16") :]:
            assert torch.equal(case.layer(level)[0](case.loud(m)), want), (m, level)


@cases
def test_nor_the_threads(case: Case):
    run, _ = case.layer()
    functions = built.native()
    assert functions is not None
    for m in (1, 5, 40, 65, 130, 600):
        x, made = case.loud(m), []
        try:
            for threads in (1, 2, 5):
                functions.use_threads(threads)
                made += [run(x) for _ in range(3 if m < 65 else 1)]
        finally:
            functions.use_threads(1)
        assert all(torch.equal(made[0], other) for other in made)


@levels
@cases
def test_the_error_is_that_of_rounding_the_result(case: Case, level: str):
    run, exact = case.layer(level)
    x = case.rows(40)
    want = exact(x)
    error, alone = (run(x).double() - want).norm(), (want.to(case.dtype).double() - want).norm()
    # a sum in float32 errs more than its last rounding does, in whatever order
    assert error <= (1e-6 * want.norm() if case.dtype == FP32 else 1.05 * alone)


@levels
def test_numbers_that_are_none_stay_visible(level: str):
    for case in (c for c in CASES if c.k > 7):
        run, _ = case.layer(level)
        for wrong in (torch.nan, torch.inf):
            x = case.rows(3)
            x[1, 7] = wrong
            y = run(x)
            assert not y[1].isfinite().any()
            assert torch.equal(y[0], run(case.rows(3))[0])


@cases
def test_batches_keep_their_shape_and_may_be_empty(case: Case):
    run, _ = case.layer()
    if case.bits >= 16:  # packed ones are tested with their dispatch
        x = case.rows(6)
        assert torch.equal(run(x.view(2, 3, -1)), run(x).view(2, 3, -1))
        assert torch.equal(run(x.T.contiguous().T), run(x))
    assert run(case.rows(6)[:0]).shape == (0, case.n)


# ---- libraries that are wrong on purpose ----

SPLIT = {  # sums of stretches of k are added up, and how long those are, or in which order, depends on the rows
    "for (int64_t s = 0; s < whole; s += depth)": "for (int64_t s = (whole - 1) / depth * depth; s >= 0; s -= depth)",
    "acc[m][n] = load(F, part + m * PANEL + n * 16);": "acc[m][n] = (F){0};",
    "store(part + m * PANEL + n * 16, acc[m][n]);": "store(part + m * PANEL + n * 16, acc[m][n] + "
    "load(F, part + m * PANEL + n * 16));",
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> built.Native:
    """The best level with the sums of `SPLIT`, and products contracted into sums."""
    pytest.importorskip("ziglang", reason="the compiler; comes with the dev extra")
    made, (machine, system) = tmp_path_factory.mktemp("wrong"), build.here()
    shutil.copytree(build.HERE / "c", made / "c")
    source = (made / "c" / "linear.c").read_text()
    for right, bad in SPLIT.items():
        assert source.count(right) == 1
        source = source.replace(right, bad)
    (made / "c" / "linear.c").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "HERE", made)
        patch.setitem(build.LEVELS, machine, {LEVELS[-1]: build.LEVELS[machine][LEVELS[-1]]})
        compiler = [sys.executable, "-m", "ziglang", "cc"]
        library = build.build(made, machine, system, compiler, ["-ffp-contract=fast"])
    return built.Native(ctypes.CDLL(str(library)), LEVELS[-1])


def test_a_sum_over_k_that_depends_on_rows_is_caught(wrong: built.Native, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(built, "native", lambda level=None: wrong)
    for case in (Case(16, BF16, 100, 514), Case(32, FP32, 100, 257)):
        run, exact = case.layer()
        torch.testing.assert_close(run(case.rows(9)).double(), exact(case.rows(9)), rtol=2e-2, atol=1e-1)
        assert strays(run, case.loud(MOST)) != []  # the last bits alone


def is_fused(functions: built.Native) -> bool:
    """Whether a product is rounded together with the sum that follows it."""
    x = torch.tensor([1 + 2**-12, 1 + 2**-12, -1, 0])
    functions.unfused(x.data_ptr())
    return float(x[3]) != 2**-11


@levels
def test_products_are_rounded_before_they_are_added(level: str):
    functions = built.native(level)
    assert functions is not None
    assert not is_fused(functions)


def test_contraction_by_the_compiler_is_caught(wrong: built.Native):
    assert is_fused(wrong)


# ---- weights and models ----


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_unpacking_inverts_packing(dtype: torch.dtype):
    w = torch.randn(131, 34).to(dtype)
    assert torch.equal(unpack(pack(w), 131, dtype), w)
    index = torch.randint(0, 131, (2, 3))
    assert torch.equal(NativeWeight.of(w).rows(index), w[index])


def test_weights_that_share_a_room_have_memory_of_their_own():
    room, weights = WeightArena(), [torch.randn(n, 34).to(BF16) for n in (1, 131, 64)]
    made = [pack(w, room) for w in weights]
    for w, found in zip(weights, made, strict=True):
        assert torch.equal(found, pack(w))
        assert found.untyped_storage().nbytes() == found.nbytes  # memory is counted by storages
    large = room.empty((PIECE // 4 + 1,))
    large.zero_()
    assert torch.equal(made[1], pack(weights[1]))
    assert room.empty((0, 3)).shape == (0, 3)


def test_what_is_not_served_says_so():
    assert "float16" in why_not(torch.empty(2, 2, dtype=torch.float16))
    assert "3 inputs" in why_not(torch.empty(2, 3, dtype=BF16))
    for x in (torch.ones(1, 6, dtype=BF16), torch.ones(1, 8), torch.ones(1, 8, dtype=torch.float16)):
        with pytest.raises(ValueError, match="inputs in torch"):
            linear(x, pack(torch.ones(3, 8, dtype=BF16)), None, 3)


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * torch.tensor(7.0).to(self.weight.dtype)


class Tied(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embed = embedding
        self.body = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48, bias=False))
        self.head = nn.Linear(48, 151, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(ids)))
        return logits


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_tied_weight_exists_once_and_serves_both(kind: type[nn.Embedding], dtype: torch.dtype):
    model = Tied(kind(151, 48, padding_idx=150)).to(dtype)
    ids, weight = torch.randint(0, 151, (2, 9)), model.embed.weight.detach().clone()
    rows, want, seen = model.embed(ids), model(ids), list[Tensor]()
    assert use_native_linear_(model, seen.append) == len(seen) == 3
    assert torch.equal(model.embed(ids), rows)
    torch.testing.assert_close(model(ids), want, rtol=2e-2, atol=2e-2)
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }
    assert sum(held.values()) <= (3 * 64 + 2 * 64) * 48 * dtype.itemsize + 48 * dtype.itemsize
    for holder in (model.embed, model.head):  # for whoever wants to look
        assert torch.equal(holder.weight.detach() + 0, weight)
        assert holder.weight.dtype == dtype


def test_a_weight_that_something_else_holds_stays():
    class Other(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = weight

    model = Tied(nn.Embedding(151, 48))
    other = nn.ModuleList([model, Other(model.head.weight)])
    assert use_native_linear_(other) == 2
    assert type(model.head) is nn.Linear
    model = Tied(nn.Embedding(151, 48, max_norm=1.0))  # which writes to its weight
    assert use_native_linear_(model) == 2


@pytest.mark.parametrize("bias", [torch.zeros(5), torch.zeros(4, dtype=BF16)], ids=["wider", "too few"])
def test_a_bias_that_would_be_read_amiss_is_refused(bias: Tensor):
    layer = nn.Linear(8, 5, dtype=BF16)
    with pytest.raises(ValueError, match="a bias of"):
        linear(torch.ones(1, 8, dtype=BF16), pack(layer.weight), bias, 5)
    layer.bias = nn.Parameter(bias)
    root = nn.Sequential(layer)
    use_native_linear_(root)
    assert isinstance(root[0], NativeLinear)
    assert type_of(root[0]) is (None if bias.dtype != BF16 else BF16)  # nor handed on by its address


def test_a_weight_is_not_written_to():
    weight = NativeWeight.of(torch.ones(3, 4))
    with pytest.raises(AssertionError, match="write to a copy"):
        weight.mul_(2)


def test_replaced_layers_are_gone_before_the_next_ones_come():
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(9))
    weights = [weakref.ref(m.weight) for m in model.modules() if type(m) is nn.Linear]
    alive: list[int] = []

    class Parent(nn.Sequential):
        """Looks around whenever a child is swapped."""

        def __setattr__(self, name: str, value: object) -> None:
            alive.append(sum(ref() is not None for ref in weights))
            super().__setattr__(name, value)

    for parent in model:
        parent.__class__ = Parent
    assert use_native_linear_(model) == 9
    assert alive == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert all(isinstance(parent[0], NativeLinear) for parent in model)
