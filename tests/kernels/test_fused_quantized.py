"""Attention over packed slots in Triton's interpreter: what the codes say, and a row's bits alone and in company."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kvcli.kernels import triton_support
from kvcli.kernels.attend_quantized import PackedHead, attend_table, reference, table_of, why_not
from kvcli.kernels.attend_quantized.table import ROOM
from kvcli.kernels.quantize_kv import Rounded
from kvcli.kv.cache.level import TierLevel
from kvcli.kv.slots import AttentionParams, LayerShape
from kvcli.kv.tiers import quantized
from kvcli.kv.tiers.block_run import BlockRun
from kvcli.kv.tiers.host import HostTier
from kvcli.kv.tiers.quantized import kivi_form, packed_head
from tests import make
from tests.fake_graphs import FakeGraphs

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before what is fused
fused = import_module("kvcli.kernels.attend_quantized.fused")

torch.set_num_threads(1)

D, G = 64, 2
BITS = [(8, 8), (4, 4), (2, 2), (4, 2), (16, 8), (8, 16)]
ALONE = [(8, 8), (4, 4)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_of(dtype: torch.dtype, k_bits: int, v_bits: int, group: int = 64, d: int = D, **more: bool) -> BlockRun:
    return BlockRun(kivi_form(LayerShape(1, d, d), dtype, k_bits, v_bits, group, **more), "cpu")


def heads_of(
    bits: tuple[int, int], slots: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, d: int = D, group: int = 64
) -> list[BlockRun]:
    """As a tier has them: taken in two parts, channels of different place."""
    heads = [run_of(dtype, *bits, group, d) for _ in slots]
    for j, (head, n) in enumerate(zip(heads, slots, strict=True)):
        k, v = noise(n, d, seed=j) * 3 + torch.linspace(-5, 5, d), noise(n, d, seed=j + 9)
        for part in (slice(0, n // 3), slice(n // 3, n)):
            BlockRun.take([head], k[None, part].to(dtype), v[None, part].to(dtype), torch.arange(n)[None, part])
    return heads


def rows(heads: list[BlockRun], n: int, dtype: torch.dtype = torch.bfloat16, d: int = D) -> Tensor:
    return noise(G * len(heads), n, d, seed=5).to(dtype)


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN."""
    empty, like = torch.empty, torch.empty_like
    monkeypatch.setattr(fused.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(fused.torch, "empty_like", lambda *a, **k: like(*a, **k).fill_(torch.nan))


def close(got: tuple[Tensor, Tensor], q: Tensor, heads: list[PackedHead], softcap: float, masks: list) -> None:  # type: ignore[type-arg]
    """As the reference in float32, but for what 11 bits of rows, keys and weights round."""
    out, lse = reference.attend_quantized(q, heads, D**-0.5, torch.float32, softcap, masks)
    assert got[0].isfinite().all()
    assert (got[0] - out).norm() <= 1e-3 * out.norm()
    torch.testing.assert_close(got[1], lse, atol=6e-3, rtol=1e-3)


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_it_gives_what_the_codes_say(bits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float16 if bits == (2, 2) else torch.bfloat16
    heads = [packed_head(head) for head in heads_of(bits, (300, 67, 0), dtype)]  # the last is empty
    q = rows(heads, 3, dtype)  # type: ignore[arg-type]
    poisoned(monkeypatch)
    assert why_not(heads) == ""
    close(fused.attend_quantized(q, heads, D**-0.5, dtype, 0.0, [None] * 3), q, heads, 0.0, [None] * 3)


@pytest.mark.parametrize(("d", "group", "bits"), [(128, 32, (4, 4)), (256, 128, (4, 8)), (64, 16, (2, 4))], ids=str)
@pytest.mark.slow
def test_other_sizes(d: int, group: int, bits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [packed_head(head) for head in heads_of(bits, (277, 64), d=d, group=group)]
    q = rows(heads, 9, d=d) * (D / d) ** 0.5  # type: ignore[arg-type]
    poisoned(monkeypatch)
    close(fused.attend_quantized(q, heads, D**-0.5, q.dtype, 0.0, [None] * 2), q, heads, 0.0, [None] * 2)


def test_holes_are_not_seen_and_scores_are_bent(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [packed_head(head) for head in heads_of((4, 4), (130, 67))]
    masks = [noise(1, head.length, seed=3) > 0 for head in heads]
    masks[1][:] = False  # whoever reads this head sees nothing
    q = rows(heads, 2)  # type: ignore[arg-type]
    poisoned(monkeypatch)
    got = fused.attend_quantized(q, heads, D**-0.5, q.dtype, 5.0, masks)
    close(got, q, heads, 5.0, masks)
    assert not got[0][G:].any()
    assert (got[1][G:] == -torch.inf).all()


def test_rows_see_their_window(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = heads_of((8, 8), (130, 67))
    at, window = [140, 100, 20], 50
    held = [packed_head(head) for head in heads]
    masks = [head.pos[0] > torch.tensor(at).unsqueeze(1) - window for head in heads]
    q = rows(heads, 3)
    poisoned(monkeypatch)
    table = table_of(held, [head.pos[0] for head in heads], has_holes=False)
    part = attend_table(q, table, D**-0.5, at, window=window)
    close((part.out, part.lse), q, held, 0.0, masks)


def test_small_weights_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot outshines all others by 2^-20 each, which float16 would hold as 0: together they weigh in."""
    head = run_of(torch.float16, 8, 8)
    k, v = torch.zeros(600, D), torch.ones(600, D)
    k[0, 0], v[0] = 20 / fused.LOG2E, -(2.0**-10)
    BlockRun.take([head], k[None].half(), v[None].half(), torch.arange(600)[None])
    q = torch.zeros(1, 1, D)
    q[..., 0] = 1
    poisoned(monkeypatch)
    out, _ = fused.attend_quantized(q, [packed_head(head)], 1.0, torch.float16, 0.0, [None])
    want, _ = reference.attend_quantized(q.double(), [packed_head(head)], 1.0, torch.float64, 0.0, [None])
    torch.testing.assert_close(out.double(), want, rtol=5e-3, atol=1e-9)


# ---- rows alone and together ----


def differing(q: Tensor, heads: list[BlockRun], together: tuple[int, ...]) -> int:
    """Rows whose bits are others alone than in company."""
    table = table_of([packed_head(head) for head in heads], [head.pos[0] for head in heads], has_holes=False)
    alone = [attend_table(q[:, i : i + 1], table, D**-0.5, [0]) for i in range(q.shape[1])]
    count = 0
    for n in together:
        part = attend_table(q[:, :n], table, D**-0.5, [0] * n)
        same = [
            torch.equal(part.out[:, i], alone[i].out[:, 0]) and torch.equal(part.lse[:, i], alone[i].lse[:, 0])
            for i in range(n)
        ]
        count += same.count(False)
    return count


@pytest.mark.parametrize("bits", ALONE, ids=str)
def test_rows_do_not_depend_on_their_batch(bits: tuple[int, int]) -> None:
    heads = heads_of(bits, (300,))  # two spans, whole tiles and a rest
    assert differing(rows(heads, 9), heads, (9,)) == 0


@pytest.mark.parametrize("bits", [*ALONE, (2, 2)], ids=str)
@pytest.mark.parametrize("slots", [(1, 64), (255, 65), (256, 63), (257, 530)], ids=str)
@pytest.mark.slow
def test_rows_do_not_depend_on_their_batch_at_edges(bits: tuple[int, int], slots: tuple[int, ...]) -> None:
    heads = heads_of(bits, slots)
    assert differing(rows(heads, 9), heads, (8, 9)) == 0  # tiles of 16 rows and of 32


def test_a_partition_by_rows_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: spans that shrink as rows come along, as split-KV kernels have them."""
    heads, attend = heads_of((8, 8), (600,)), fused.attend

    def by_rows(q: Tensor, *given: object) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(fused, "UNIT", 256 if q.shape[1] == 1 else 128)
        return attend(q, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(fused, "attend", by_rows)
    assert differing(rows(heads, 3), heads, (3,)) > 0


@pytest.mark.parametrize("bits", [(4, 4), pytest.param((8, 8), marks=pytest.mark.slow)], ids=str)
def test_no_bit_depends_on_the_room(bits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans behind the slots of a head write nothing that is read."""
    heads = heads_of(bits, (280, 0))
    table = table_of([packed_head(head) for head in heads], [None, None], has_holes=False)
    q, found = rows(heads, 1), []
    poisoned(monkeypatch)
    for room in (280, ROOM, 5000):
        table.room = room
        found.append(fused.attend(q, table, D**-0.5, 0.0))
    assert all(torch.equal(a, b) for more in found[1:] for a, b in zip(more, found[0], strict=True))


def test_many_rows_go_through_one_span(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [packed_head(head) for head in heads_of((4, 4), (600,))]
    table, q = table_of(heads, [None], has_holes=False), rows(heads, 3)  # type: ignore[arg-type]
    few = fused.attend(q, table, D**-0.5, 0.0)
    monkeypatch.setattr(fused, "MANY", 2)
    empty, shapes = torch.empty, []
    monkeypatch.setattr(fused.torch, "empty", lambda *a, **k: (shapes.append(a), empty(*a, **k))[1])
    many = fused.attend(q, table, D**-0.5, 0.0)
    assert shapes[0][2] == 1 < 600 // fused.UNIT
    for got, want in zip(many, few, strict=True):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


# ---- what the interpreter does not run ----


def emulated(ptx: str, given: dict[str, int]) -> dict[str, int]:
    """Registers of 32 bits after these instructions."""
    held = dict(given)

    def value(word: str) -> int:
        return held[word] if word in held else int(word, 0)

    def halves(x: int) -> torch.Tensor:
        return torch.tensor([x & 0xFFFF, x >> 16], dtype=torch.int32).to(torch.int16).view(torch.float16).double()

    def packed_(x: torch.Tensor) -> int:  # float64 holds the product and the sum, so this is the one rounding
        low, high = (int(n) & 0xFFFF for n in x.half().view(torch.int16))
        return high << 16 | low

    for line in ptx.strip("{} ").split(";"):
        op, _, rest = line.strip().partition(" ")
        if not op or op == ".reg":
            continue
        to, *words = (word.strip() for word in rest.split(","))
        a = [value(word) for word in words]
        match op:
            case "mov.b32":
                held[to] = a[0]
            case "xor.b32":
                held[to] = a[0] ^ a[1]
            case "or.b32":
                held[to] = a[0] | a[1]
            case "prmt.b32":
                pool = (a[0] | a[1] << 32).to_bytes(8, "little")
                held[to] = int.from_bytes(bytes(pool[a[2] >> 4 * i & 7] for i in range(4)), "little")
            case "lop3.b32":
                assert a[3] == 0xEA
                held[to] = a[0] & a[1] | a[2]
            case "fma.rn.f16x2":
                held[to] = packed_(halves(a[0]) * halves(a[1]) + halves(a[2]))
            case "add.rn.f16x2":
                held[to] = packed_(halves(a[0]) + halves(a[1]))
            case _:
                raise AssertionError(op)
    return held


def float16s(*registers: int) -> list[float]:
    words = [half for x in registers for half in (x & 0xFFFF, x >> 16)]
    found: list[float] = torch.tensor(words, dtype=torch.int32).to(torch.int16).view(torch.float16).tolist()
    return found


@pytest.mark.parametrize(("bits", "first"), [(4, 0), (2, 0), (2, 2)])
def test_instructions_for_codes_give_their_numbers(bits: int, first: int) -> None:
    """Every byte, with a scale and a zero of its own for both numbers."""
    ptx = {(4, 0): fused.PTX_4, (2, 0): fused.PTX_2, (2, 2): fused.PTX_2_BEHIND}[bits, first].value
    scale, zero = torch.tensor([0.37, 1.9]).half(), torch.tensor([-3.3, 60.1]).half()
    pair = {name: int(fused._pair(t.tolist()), 16) for name, t in (("scale", scale), ("zero", zero))}
    for byte in range(0, 256, 4):
        of = [byte, byte + 1, byte + 2, byte + 3]
        given = {"$4": int.from_bytes(bytes(of), "little")}
        given |= {f"${5 + i}": pair["scale"] for i in range(4)} | {f"${9 + i}": pair["zero"] for i in range(4)}
        held = emulated(ptx, given)
        codes = torch.tensor([[b >> bits * (first + j) & (1 << bits) - 1 for j in range(2)] for b in of])
        want = (codes.double() * scale.double() + zero.double()).half()
        assert float16s(*(held[f"${i}"] for i in range(4))) == want.flatten().tolist()


def test_instructions_for_bytes_give_their_numbers() -> None:
    for byte in range(-128, 128, 4):
        of = list(range(byte, byte + 4))
        held = emulated(fused.PTX_8.value, {"$2": int.from_bytes(bytes(b & 0xFF for b in of), "little")})
        assert float16s(held["$0"], held["$1"]) == of


# ---- what is served, and the tier ----


@pytest.mark.parametrize(
    ("heads", "why"),
    [
        (heads_of((4, 4), (70,), d=80), "keys of 80"),
        (heads_of((4, 4), (70,), group=8), "groups of 8"),
        ([run_of(torch.bfloat16, 4, 4, halves=True)], "halves"),
    ],
)
def test_what_is_not_served_says_why(heads: list[BlockRun], why: str) -> None:
    assert why in why_not([packed_head(head) for head in heads])


def test_masks_of_rows_and_parts_of_heads_are_left_to_the_reference() -> None:
    (head,) = heads_of((8, 8), (70,))
    assert "single rows" in why_not([packed_head(head)], [torch.ones(2, 70, dtype=torch.bool)])
    of = packed_head(head)
    late = Rounded(8, of.keys.codes[3:], of.keys.scale[3:])
    assert "midst" in why_not([replace(of, keys=late, length=67)])


def filled(bits: tuple[int, int], n: int, rotate: str = "none") -> quantized.QuantizedTier:
    tier = make.quantized((1, 2, D), bits, torch.bfloat16, rotate=rotate)
    came(tier, 0, n)
    return tier


def came(tier: quantized.QuantizedTier, start: int, n: int) -> None:
    tier.append(0, noise(2, n, D, seed=start).bfloat16(), noise(2, n, D, seed=start + 1).bfloat16(), start)


def test_a_tier_reads_changed_heads_by_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives what it gives without the kernel, holes, windows and a Hadamard turn included. A table is made anew
    only where holes come, or slots beyond its room."""
    monkeypatch.setattr(quantized, "serves_packed", lambda *_: False)  # the CPU's own
    tier, layers = filled((4, 4), 130, "hadamard"), []
    q, sight, late = rows([None] * 2, 2), AttentionParams(D**-0.5), AttentionParams(D**-0.5, window=140)  # type: ignore[list-item]
    holes = torch.arange(194).expand(2, -1) % 64 > 5
    for change in (lambda: None, lambda: came(tier, 130, 64), lambda: tier.evict_except(0, holes)):
        change()
        for how in (sight, late):
            monkeypatch.setattr(triton_support, "why_not", lambda *_: "")
            (got,) = tier.attend(0, q, how, [230, 231])
            layers.append(tier.device_layer(0))
            monkeypatch.setattr(triton_support, "why_not", lambda *_: "none")
            (want,) = tier.attend(0, q, how, [230, 231])
            assert (got.out - want.out).norm() <= 1e-2 * want.out.norm()
            torch.testing.assert_close(got.lse, want.lse, atol=2e-2, rtol=1e-2)
    assert [one is layers[0] for one in layers] == [True] * 4 + [False] * 2
    assert layers[0].synced_length == 1


def test_a_captured_read_gives_what_single_operations_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is captured once, and then reads whatever came down to the tier."""
    monkeypatch.setattr(quantized, "serves_packed", lambda *_: False)
    monkeypatch.setattr(triton_support, "why_not", lambda *_: "")
    tier, graphs, attend = filled((8, 8), 70), FakeGraphs(), fused.attend
    q, pos, params = rows([None] * 2, 2), torch.tensor([300, 301], dtype=torch.int32), AttentionParams(D**-0.5)  # type: ignore[list-item]

    def launch(*given: object) -> tuple[Tensor, Tensor]:
        with _disable_current_modes():  # what the interpreter does with torch is no operation of the device
            return attend(*given)  # type: ignore[no-any-return]

    monkeypatch.setattr(fused, "attend", lambda *given: graphs.launch(launch, given, {}))
    layer = tier.device_layer(0)
    assert not isinstance(layer, str)
    part, replay = graphs.record(lambda: layer.attend(q, pos, params.scale, softcap=0.0, window=None))
    for n in (0, 60):
        came(tier, 70, n)
        came(other := filled((8, 8), 70), 70, n)
        assert tier.device_layer(0) is layer
        replay()
        (want,) = other.attend(0, q, params, pos.tolist())
        assert torch.equal(part.out, want.out)
        assert torch.equal(part.lse, want.lse)


def test_a_tiered_cache_gives_the_tables_of_its_quantized_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest first, of layers with slots there; with any other kind of level, why there are none."""
    monkeypatch.setattr(triton_support, "why_not", lambda *_: "")
    of, bf16 = (2, 2, D), torch.bfloat16
    levels = [TierLevel(make.quantized(of, (bits, bits), bf16), holds, 64) for bits, holds in ((8, 64), (4, None))]
    kv = make.tiered(of, *levels, dtype=bf16, holds=8, group=64)
    for n in (64, 128, 192):
        kv.append(0, *(noise(2, 64, D, seed=n).bfloat16() for _ in "kv"), n - 64)
        kv.compress(layers=[0])
    cache = kv.device_tables(1)
    assert [len(lower) for lower in cache.below] == [2, 0]
    assert [layer.table.k_bits for layer in cache.below[0]] == [4, 8]  # type: ignore[attr-defined]
    assert [*cache.tables()] == [*cache.layers, *cache.below[0]]
    assert all(a is b for a, b in zip(kv.device_tables(1).below[0], cache.below[0], strict=True))
    for tier in (HostTier(make.quantized(of, dtype=bf16), "cpu"), make.disk(of, bf16), make.dense(of, bf16)):
        assert make.tiered(of, TierLevel(tier), dtype=bf16).device_tables(1).why_not
