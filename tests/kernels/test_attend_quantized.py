"""attend_quantized: attention over what the codes say, by the reference and by the CPU's integer products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcli.kernels import dispatch
from kvcli.kernels.attend.reference import attend as specified
from kvcli.kernels.attend_quantized import PackedHead, attend_quantized, cpu, probe
from kvcli.kernels.quantize_kv import pack_keys, pack_values, spread, unpack_keys, unpack_values

torch.set_num_threads(1)

GROUP = 5
# G, N, D, slots of each head: ones, primes, an empty head, rows on both sides of every threshold
SHAPES = [
    (1, 1, 16, (1,)),
    (4, 1, 64, (131, 15, 0)),
    (3, 5, 16, (7, 40)),
    (3, 13, 16, (7, 40)),
    (1, 17, 48, (33, 5, 2)),
    (7, 11, 16, (67,)),
    (2, 1, 12, (29, 30)),
    (4, 1, 64, (1040,)),
    (4, 8, 64, (1040,)),
]
BITS = [(8, 8), (4, 4), (4, 2), (2, 2), (16, 8), (8, 16), (8, 4), (2, 8), (16, 4)]
# of the largest value, against attention over what the codes say: 8 bits of bfloat16 in q, probabilities and output
WITHIN = {torch.bfloat16: 3e-2, torch.float16: 3e-2}


def inputs(shape: tuple[int, int, int, tuple[int, ...]], bits: tuple[int, int], dtype: torch.dtype):  # type: ignore[no-untyped-def]
    g, n, d, slots = shape
    noise = torch.Generator().manual_seed(sum(slots) * d)
    q = torch.randn(g * len(slots), n, d, generator=noise, dtype=torch.float64).to(dtype)
    return q, [head(s, d, bits, dtype, noise) for s in slots]


def head(s: int, d: int, bits: tuple[int, int], dtype: torch.dtype, noise: torch.Generator) -> PackedHead:
    k, v = (torch.randn(s, d, generator=noise, dtype=torch.float64).to(dtype) for _ in "kv")
    full = s // GROUP * GROUP if bits[0] < 8 else s
    return PackedHead(pack_keys(k[:full], bits[0], GROUP), k[full:], pack_values(v, bits[1], GROUP), s)


def definition(
    q: Tensor, heads: list[PackedHead], scale: float, softcap: float, masks: list[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Attention in float64 over what each head's codes say."""
    like, outs, lses = torch.empty(0, dtype=torch.float64), [], []
    for rows, one, mask in zip(q.double().unflatten(0, (len(heads), -1)), heads, masks, strict=True):
        k = torch.cat([unpack_keys(one.keys, like), one.rest.double()])
        v = unpack_values(one.values, like, one.length)
        mask = None if mask is None else mask.expand(q.shape[1], -1)
        out, lse = specified(rows, k[None], v[None], scale, softcap, mask, one.length)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def masks_of(kind: str, heads: list[PackedHead], n: int) -> list[Tensor | None]:
    if kind == "none":
        return [None] * len(heads)
    noise = torch.Generator().manual_seed(7)
    masks: list[Tensor | None] = []
    for one in heads:
        mask = torch.rand(1 if kind == "holes" else n, one.length, generator=noise) < 0.6
        if kind == "rows":
            mask[0] = False  # a row that sees nothing
        masks.append(mask)
    return masks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", ["none", "holes", "rows"])
def test_full_precision_is_held_to(
    shape: tuple[int, int, int, tuple[int, ...]], bits: tuple[int, int], dtype: torch.dtype, masked: str
) -> None:
    q, heads = inputs(shape, bits, dtype)
    masks = masks_of(masked, heads, shape[1])
    part = attend_quantized(q, heads, 0.3, dtype, masks=masks)
    out, lse = definition(q, heads, 0.3, 0.0, masks)
    close = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 2e-5, "rtol": 2e-5}
    assert part.out.dtype == dtype
    torch.testing.assert_close(part.out.double(), out, **close)
    torch.testing.assert_close(part.lse.double(), lse, **close)


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("masked", "softcap"), [("none", 0.0), ("holes", 0.0), ("rows", 0.0), ("none", 3.0)])
def test_the_cpu_gives_what_the_codes_say(
    shape: tuple[int, int, int, tuple[int, ...]], bits: tuple[int, int], dtype: torch.dtype, masked: str, softcap: float
) -> None:
    q, heads = inputs(shape, bits, dtype)
    masks = masks_of(masked, heads, shape[1])
    out, lse = cpu.attend_quantized(q, heads, 0.3, dtype, softcap, masks)
    want, mass = definition(q, heads, 0.3, softcap, masks)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, atol=WITHIN[dtype] * float(want.abs().max()), rtol=0)
    torch.testing.assert_close(lse.double(), mass, atol=3e-2, rtol=1e-2)


def test_scores_of_eight_bits_are_far_finer_than_sixteen_bit_floats() -> None:
    q, (one,) = inputs((4, 1, 64, (131,)), (8, 8), torch.bfloat16)
    rows = q.view(4, 64).float()
    want = rows.double() @ unpack_keys(one.keys, rows.double()).T
    off = (cpu.scores_in_bytes(*cpu.in_digits(rows), one.keys).double() - want).abs().max() / want.abs().max()
    assert off < 2**-13


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_do_not_depend_on_their_batch(rows: int) -> None:
    """While they are few: a draft is scored as plain decoding scores it."""
    q, heads = inputs((4, 3, 64, (131, 77)), (8, 8), torch.bfloat16)
    assert cpu.BYTES >= 4 * 3
    out, lse = cpu.attend_quantized(q, heads, 0.3, torch.bfloat16, 0.0, [None, None])
    alone = cpu.attend_quantized(q[:, :rows].contiguous(), heads, 0.3, torch.bfloat16, 0.0, [None, None])
    torch.testing.assert_close(alone[0], out[:, :rows], atol=0, rtol=0)
    torch.testing.assert_close(alone[1], lse[:, :rows], atol=0, rtol=0)


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_results_do_not_lean_on_what_memory_held(bits: tuple[int, int]) -> None:
    q, heads = inputs((4, 1, 64, (131, 15)), bits, torch.bfloat16)
    del (poison := [torch.full((8, 160), torch.nan) for _ in range(64)])[:]
    del poison
    out, lse = cpu.attend_quantized(q, heads, 0.3, torch.bfloat16, 0.0, [None, None])
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("bits", [4, 2])
def test_bytes_are_spread_as_the_reference_spreads_them(bits: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(64, 4)
    assert torch.equal(cpu._spread(codes, bits), spread(codes, bits).to(torch.int8) - (1 << bits - 1))


def test_every_path_is_taken() -> None:
    """The thresholds are such that the shapes above lie on both sides of them."""
    rows = [g * n for g, n, _, _ in SHAPES]
    assert any(m <= cpu.BYTES for m in rows)
    assert any(cpu.BYTES < m <= cpu.FEW for m in rows)
    assert any(m > cpu.FEW for m in rows)


def test_the_choice_is_explained() -> None:
    op, what, why = dispatch.explain("cpu", torch.bfloat16)[2]
    assert (op, what) == ("attend_quantized", "cpu"), why
    assert dispatch.explain("cpu", torch.float32)[2][1] == "reference"


@pytest.mark.parametrize("broken", ["missing", "wrong", "raises"])
def test_a_product_that_is_missing_or_wrong_is_not_used(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(*_: object) -> Tensor:
        if broken == "raises":
            raise RuntimeError("not compiled in\nat line 1")
        return torch.zeros(4, 64)

    if broken == "missing":
        monkeypatch.setattr(probe, "_has_product", lambda: False)
    else:
        monkeypatch.setattr(probe, "weigh_in_bytes", product)
    why = probe.why_not.__wrapped__()
    assert why, "an empty reason is a yes"
    assert "\n" not in why


def test_the_product_works_here() -> None:
    assert probe.why_not() == "", "8-bit slots are read slowly on this machine"
