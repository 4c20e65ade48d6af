"""Linear layers for few rows: each row has the bits that it has alone, and numbers that are those of its weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from kvcli.engine.loading.weights import quantize_for_gpu
from kvcli.kernels import linear_quantized, triton_support
from kvcli.kernels.linear_quantized import reference as packed
from kvcli.kernels.linear_skinny import (
    MOST,
    Weight,
    linear_skinny,
    pack4,
    pack8,
    pack_nf4,
    plain,
    ptx,
    reference,
    tinygemm,
)
from kvcli.kernels.linear_skinny.module import lay_out_skinny_, of_bitsandbytes
from tests.families import build
from tests.kernels.variants import linear_skinny as compiled

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before anything that is fused
fused = import_module("kvcli.kernels.linear_skinny.fused")
torch.set_num_threads(1)

BF16, FP16 = torch.bfloat16, torch.float16
# kind, N, K: one shape a group, and among them outputs that fill no program and inputs that fill no step
SHAPES = [
    ("plain", 71, 272),
    ("int8", 7, 272),
    ("int4", 16, 256),
    ("int4", 16, 192),
    ("int4", 16, 160),
    ("nf4", 12, 192),
]
WITHIN = {BF16: 4e-3, FP16: 6e-4}  # of the norm of the result: what it costs to round it, and the numbers of nf4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Rows of different sizes, so that a scale on the wrong row shows."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise * torch.linspace(0.1, 3.0, shape[0]).unsqueeze(1)


@cache
def weight(kind: str, n: int, k: int, dtype: torch.dtype = BF16) -> Weight:
    w = numbers(n, k).to(dtype)
    if kind == "plain":
        return plain(w)
    if kind == "int8":
        return pack8(*packed.round8(w))
    if kind == "int4":
        group = linear_quantized.group_of(k)
        return pack4(*packed.round4(w, group), group)
    return pack_nf4(*quantized(w)[:2])


def quantized(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By bitsandbytes: codes [N, K], the largest of each 64 [N, K // 64], and the numbers that they stand for."""
    functional = pytest.importorskip("bitsandbytes.functional")
    data, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)
    return *of_bitsandbytes(data, state), functional.dequantize_4bit(data, state)


def ours(x: Tensor, w: Weight, sk: int) -> Tensor:
    """In float32: rounded to 16 bits, most sums in another order are the same."""
    found = fused.linear(x.contiguous(), w, None, sk, torch.float32)
    assert not w.arrivals.any(), "the last program counts anew"
    return found


def test_products_of_two_streams_would_count_into_each_other() -> None:
    """So a model has one stream (engine/resources.py): a count of another product ends this one too early."""
    w, x = weight("plain", 71, 272), numbers(3, 272).to(BF16)
    want = fused.linear(x, w, None, 2, torch.float32)
    other = replace(w, arrivals=w.arrivals + 1)
    assert not torch.equal(fused.linear(x, other, None, 2, torch.float32), want)


def differing(run: Callable[[Tensor], Tensor], x: Tensor) -> list[int]:
    """How many rows there were in passes where one of them was not as among all of x."""
    together, last = run(x), len(x) - 1
    parts = [slice(m) for m in (1, 5, 9, 32)] + [slice(last, last + 1)]
    return [len(x[part]) for part in parts if not torch.equal(run(x[part]), together[part])]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n", "k"), SHAPES)
def test_each_number_of_rows_gives_each_row_its_bits(kind: str, n: int, k: int):
    """1 to 64 rows, and each row in every place of a tile."""
    x = numbers(MOST, k, seed=1).to(BF16)
    alone = torch.cat([ours(row[None], weight(kind, n, k), 2) for row in x])
    for rows in range(1, MOST + 1):
        assert torch.equal(ours(x[:rows], weight(kind, n, k), 2), alone[:rows])
    for shift in range(1, 32):
        assert torch.equal(ours(x[:32].roll(shift, 0), weight(kind, n, k), 2), alone[:32].roll(shift, 0))


@pytest.mark.parametrize(("kind", "n", "k"), SHAPES)
def test_a_row_has_the_bits_that_it_has_alone(kind: str, n: int, k: int):
    x = numbers(33, k, seed=1).to(BF16)
    assert differing(lambda rows: ours(rows, weight(kind, n, k), 2), x) == []


def test_a_kernel_that_looks_at_the_number_of_rows_is_caught():
    """The test of the test: as many stretches as there are rows, up to two."""
    x = numbers(33, 384, seed=1).to(BF16)
    assert differing(lambda rows: ours(rows, weight("plain", 16, 384), min(2, len(rows))), x) == [1, 1]


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize(("kind", "n", "k"), SHAPES)
def test_results_are_those_of_the_weight(kind: str, n: int, k: int, dtype: torch.dtype):
    w, x, bias = weight(kind, n, k, dtype), numbers(3, k, seed=2).to(dtype), numbers(n, 1, seed=3).flatten().to(dtype)
    want = x.double() @ reference.weight(w).double().T + bias.double()
    for sk in (1, 2):
        got = fused.linear(x, w, bias, sk)
        assert (got.double() - want).norm() < WITHIN[dtype] * want.norm()
    assert (reference.linear_skinny(x, w, bias).double() - want).norm() < WITHIN[dtype] * want.norm()


@pytest.mark.parametrize(("kind", "n", "k"), SHAPES)
def test_many_rows_are_multiplied_by_what_is_fastest(kind: str, n: int, k: int, monkeypatch: pytest.MonkeyPatch):
    from kvcli.kernels import linear_skinny as op

    monkeypatch.setattr(op, "STRETCH", 2 * k * 64)
    w, x = weight(kind, n, k), numbers(MOST + 1, k, seed=2).to(BF16)
    want = x.double() @ reference.weight(w).double().T
    got = linear_skinny(x, w, torch.ones(n, dtype=BF16))
    assert (got.double() - want - 1).norm() < 2 * WITHIN[BF16] * want.norm()


@pytest.mark.parametrize(("kind", "n", "k"), SHAPES[1:])
def test_codes_and_scales_are_found_again(kind: str, n: int, k: int):
    """Each in its place: a test of sums alone would find inputs that are exchanged in both operands right."""
    w, g = weight(kind, n, k), torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    q = q.view(torch.int8) if kind == "int8" else q
    assert torch.equal(reference.codes(replace(w, data=reference.arrange(q, w.kind)), torch.arange(n)), q)
    for at in ((0, 0), (n - 1, k - 1), (n // 2, k // 3)):  # one input alone
        x = torch.zeros(1, k, dtype=BF16)
        x[0, at[1]] = 1
        assert torch.allclose(ours(x, w, 1)[0, at[0]], reference.weight(w)[at], rtol=1e-2, atol=1e-4)


def test_a_launch_has_the_bounds_that_are_compiled():
    assert fused.REGISTERS == compiled.REGISTERS


def test_int4_is_of_the_numbers_that_a_cpu_has():
    for k in (256, 192, 160):
        w = numbers(32, k).to(BF16)
        there = linear_quantized.pack(w, 4, native=False)
        here = pack4(packed.unpack4(there.data), there.scale, there.group)
        assert torch.equal(
            reference.weight(here), packed.weight(4, there.group, packed.unpack4(there.data), there.scale)
        )


def test_nf4_is_of_the_numbers_of_bitsandbytes():
    w = numbers(12, 192).to(BF16)
    codes, largest, theirs = quantized(w)
    within = torch.finfo(BF16).eps * theirs.abs().max()
    assert (reference.weight(pack_nf4(codes, largest)) - theirs.float()).abs().max() < within


# ---- what only a GPU runs, emulated ----


def run_ptx(asm: str, words: dict[str, int], n: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """The `n` pairs of numbers that it makes of words, as bits."""
    register = dict(words)

    def value(name: str) -> int:
        return register[name] if name in register else int(name, 0)

    def pair(a: int) -> Tensor:
        return torch.tensor([a & 0xFFFF, a >> 16], dtype=torch.uint16).view(dtype).double()

    def bits(numbers: Tensor) -> int:
        low, high = numbers.to(dtype).view(torch.int16).tolist()
        return low & 0xFFFF | (high & 0xFFFF) << 16

    def prmt(a: int, b: int, order: int) -> int:
        both = (a | b << 32).to_bytes(8, "little")
        picked = [(both[n & 7], n & 8) for n in (order >> 4 * i & 15 for i in range(4))]
        return int.from_bytes(bytes((255 if v & 128 else 0) if sign else v for v, sign in picked), "little")

    for line in asm.strip("{} ").split(";"):
        op, _, rest = line.strip().partition(" ")
        to, *given = [name.strip() for name in rest.split(",")]
        if not op or op == ".reg":
            continue
        a, b, c, table = (*map(value, given), 0, 0, 0)[:4]
        register[to] = {
            "and": lambda a=a, b=b: a & b,
            "shr": lambda a=a, b=b: a >> b,
            "mov": lambda a=a: a,
            "prmt": lambda a=a, b=b, c=c: prmt(a, b, c),
            "lop3": lambda a=a, b=b, c=c, t=table: a & b | (c if t == 0xEA else ~a & c & 0xFFFFFFFF),
            "fma": lambda a=a, b=b, c=c: bits(pair(a) * pair(b) + pair(c)),
            "sub": lambda a=a, b=b: bits(pair(a) - pair(b)),
        }[op.split(".")[0]]()
    return [(register[f"${i}"] & 0xFFFF, register[f"${i}"] >> 16) for i in range(n)]


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4", *ptx.BOOKS])
def test_ptx_makes_the_numbers_of_the_codes(kind: reference.Kind, dtype: torch.dtype):
    """As the interpreted kernel orders them: pairs of the first word, then those of the second."""
    g, (n, wide) = torch.Generator().manual_seed(0), (4, 8) if kind == "int8" else (8, 4)
    is_book = kind in ptx.BOOKS
    of = torch.tensor(ptx.BOOKS[kind], dtype=torch.float32) if is_book else torch.arange(16.0) + ptx.ABOVE[dtype]
    numbers = (torch.arange(256.0) + 128) % 256 - 128 if kind == "int8" else of
    bits = (numbers.to(torch.int8).float() if kind == "int8" else numbers).to(dtype).view(torch.int16)
    for a, b in torch.randint(0, 1 << 32, (60, 2), generator=g).tolist():
        code = [[word >> wide * i & (1 << wide) - 1 for i in range(32 // wide)] for word in (a, b)]
        at = [divmod(i, n // 2) for i in range(n)]  # word and pair
        step = n // 2 if not is_book else 1  # from one code of a pair to the other
        first = [(w, p if not is_book else 2 * p) for w, p in at]
        want = [tuple(int(bits[code[w][i + e * step]]) & 0xFFFF for e in (0, 1)) for w, i in first]
        words = {f"${n}": a, f"${n + 1}": b}
        made = ptx.looked_up(ptx.BOOKS[kind], dtype) if is_book else getattr(ptx, kind)(dtype)
        assert run_ptx(made, words, n, dtype) == want


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
def test_ptx_of_experts_makes_the_low_halves_then_the_high_halves(dtype: torch.dtype):
    bits = (torch.arange(16.0) - 8).to(dtype).view(torch.int16)
    for word in torch.randint(0, 1 << 32, (60,), generator=torch.Generator().manual_seed(0)).tolist():
        halves = [word >> 8 * byte + high & 15 for high in (0, 4) for byte in range(4)]
        numbers = [int(bits[code]) & 0xFFFF for code in halves]
        assert run_ptx(ptx.int4_bytes(dtype), {"$4": word}, 4, dtype) == [
            *zip(numbers[::2], numbers[1::2], strict=True)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "int8", "int4", "nf4"])
@pytest.mark.parametrize("sk", [1, 2, 3])
def test_bits_of_more_shapes(kind: str, sk: int):
    for n, k in ((64, 512), (130, 384), (48, 320)):
        if kind == "int4" and n % 16:
            continue
        x = numbers(49, k, seed=4).to(FP16)
        assert differing(lambda rows, n=n, k=k: ours(rows, weight(kind, n, k, FP16), sk), x) == []


# ---- in a model ----


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        triton_support, "why_not", lambda device, dtype: "" if dtype in WITHIN else "float32 needs full precision"
    )


def layers() -> nn.Sequential:
    """Plain ones, one with a bias, one of odd width, and one that is tied to an embedding."""
    torch.manual_seed(0)
    root = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 48, bias=False), nn.Linear(9, 7), nn.Embedding(32, 48))
    root.append(nn.Linear(48, 32, bias=False)).bfloat16().requires_grad_(False)
    root[4].weight = root[3].weight
    return root


def test_plain_layers_keep_their_weights(served: None):
    root, x = layers(), numbers(3, 48).to(BF16)
    want, names = root[4](x), [*root.state_dict()]
    assert lay_out_skinny_(root) == 3
    assert [type(layer).__name__ for layer in root[:3]] == ["SkinnyLinear", "SkinnyLinear", "Linear"]
    assert root[4].weight is root[3].weight
    assert [*root.state_dict()] == names
    torch.testing.assert_close(root[4](x), want, rtol=1e-2, atol=1e-2)
    assert root[0](numbers(2 * 3, 128).view(2, 3, 128).to(BF16)).shape == (2, 3, 64)
    assert lay_out_skinny_(root) == 0


@pytest.mark.parametrize(("quant", "within"), [("int8", 0.02), ("int4", 0.15), ("nf4", 0.13)])
@pytest.mark.filterwarnings("ignore")
def test_quant_on_a_gpu_is_in_our_kernels(quant: str, within: float, served: None):
    if quant == "nf4":
        pytest.importorskip("bitsandbytes")
    root, x = layers()[:2], numbers(3, 128).to(BF16)
    before = root(x).float()
    swap, by = quantize_for_gpu(root, quant, torch.device("cpu"))
    assert (by, swap.packed) == (f"fused {quant}", 2)
    assert [(layer.kind, layer.out_features) for layer in root] == [(quant, 64), (quant, 48)]
    assert 0 < (root(x).float() - before).norm() < 2 * within * before.norm()
    if quant != "nf4":
        there = linear_quantized.pack(layers()[0].weight, 8 if quant == "int8" else 4, native=False)
        scale = root[0].scale if quant == "int8" else reference.scales(root[0].scale, torch.arange(64))
        assert torch.equal(scale, there.scale)


@pytest.mark.parametrize(("is_served", "quant", "why"), [
    (True, "nf4", "experts support int8 and int4, not nf4"), (False, "int4", "bitsandbytes quantizes no experts"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_experts_that_no_kernel_packs_are_said(is_served: bool, quant: str, why: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(triton_support, "why_not", lambda *_: "" if is_served else "no card")
    swap, _ = quantize_for_gpu(build("qwen3_moe", BF16, hidden_size=64).model.layers, quant, torch.device("cpu"))
    assert (swap.packed, swap.kept) == (12, {why: 30})


def test_what_no_kernel_serves_stays_with_others():
    pytest.importorskip("bitsandbytes")
    _, by = quantize_for_gpu(layers()[:2], "int4", torch.device("cpu"))
    assert by == "bitsandbytes fp4 (no fused kernels for cpu)"
    assert lay_out_skinny_(layers()) == 0


def test_torch_multiplies_int4_where_triton_is_not(monkeypatch: pytest.MonkeyPatch):
    """Its codes have the first of two inputs in the high half of a byte; all else is as ours."""

    def product(x: Tensor, data: Tensor, group: int, scale: Tensor) -> Tensor:
        q = torch.stack([data >> 4, data & 15], dim=2).flatten(1)
        return (x.float() @ packed.weight(4, group, q, scale).T).to(x.dtype)

    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", lambda data, tiles: data)
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm", product)
    monkeypatch.setattr(tinygemm, "serves", lambda *_: True)
    root, x = layers()[:2], numbers(2 * 3, 128).view(2, 3, 128).to(BF16)
    want = [linear_quantized.PackedLinear.of(layer, 4, torch.device("cpu")) for layer in root]
    swap, by = quantize_for_gpu(root, "int4", torch.device("cpu"))
    assert (swap.packed, by) == (2, "torch's int4 (no fused kernels for cpu)")
    assert torch.equal(root[0](x), want[0](x))
    assert torch.equal(root(x), want[1](want[0](x)))


def test_torch_is_not_asked_for_what_it_lacks():
    assert not tinygemm.serves(torch.device("cpu"), BF16)
    assert not tinygemm.serves(torch.device("cuda"), FP16)


def test_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match="64 inputs in"):
        linear_skinny(torch.zeros(1, 64, dtype=BF16), weight("int4", 16, 192))
    with pytest.raises(ValueError, match=r"in torch\.bfloat16 \(int4\)"):
        linear_skinny(torch.zeros(1, 192), weight("int4", 16, 192))
    assert linear_skinny(torch.zeros(2, 0, 192, dtype=BF16), weight("int4", 16, 192)).shape == (2, 0, 16)
