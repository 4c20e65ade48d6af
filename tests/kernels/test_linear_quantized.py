"""Packed linear layers: the CPU path equals the reference, odd shapes are refused, and rounding is what it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kvcli.kernels import linear_quantized as panels
from kvcli.kernels import native as built
from kvcli.kernels.linear_quantized import (
    Bits,
    PackedLinear,
    QuantizedWeight,
    cpu,
    group_of,
    linear_quantized,
    pack,
    quantize_,
    reference,
    why_not,
)

torch.set_num_threads(1)

# N outputs, K inputs. int8 takes any N and K in sixteens; int4 takes N in sixteens and K in thirty-twos.
SHAPES: dict[Bits, list[tuple[int, int]]] = {
    8: [(1, 16), (7, 48), (31, 112), (64, 128), (131, 208)],
    4: [(16, 32), (48, 96), (64, 128), (112, 160), (176, 64), (208, 384), (16, 2880)],
}
ROWS = (1, 2, 3, 7, 17, *(m + d for m in cpu.MANY.values() for d in (-1, 0, 5)))
WITHIN = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # of the largest result


def weight(n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of different sizes, so that a scale on the wrong row shows."""
    noise = torch.Generator().manual_seed(n * k)
    return (torch.randn(n, k, generator=noise) * torch.linspace(0.1, 3.0, n).unsqueeze(1)).to(dtype)


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the library is, and where it is not."""
    if request.param == "native" and not panels.serves(torch.bfloat16):
        pytest.skip(built.why_not())
    if request.param == "torch":
        monkeypatch.setattr(panels, "serves", lambda dtype: False)
    return str(request.param)


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize(("bits", "shape"), [(b, s) for b, shapes in SHAPES.items() for s in shapes], ids=str)
def test_cpu_equals_reference(bits: Bits, shape: tuple[int, int], dtype: torch.dtype, way: str):
    w = weight(*shape, dtype)
    native, plain = pack(w, bits), pack(w, bits, native=False)
    if shape[0] % panels.PANEL == 0 or way == "torch":
        assert native.nbytes == plain.nbytes
    for rows in ROWS:
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        want = linear_quantized(x, plain)
        torch.testing.assert_close(
            linear_quantized(x, native), want, rtol=0, atol=WITHIN[dtype] * float(want.abs().max()), msg=f"{rows} rows"
        )


@pytest.mark.parametrize("bits", SHAPES)
def test_a_cpu_that_does_not_multiply_bf16_takes_float32(bits: Bits, monkeypatch: pytest.MonkeyPatch):
    w, rows = weight(112, 160, torch.bfloat16), cpu.MANY[bits] + 3
    x = torch.randn(rows, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = linear_quantized(x, pack(w, bits, native=False))
    monkeypatch.setattr(cpu, "multiplies", lambda dtype: False)
    monkeypatch.setattr(panels, "serves", lambda dtype: False)
    got = linear_quantized(x, pack(w, bits))
    torch.testing.assert_close(got, want, rtol=0, atol=WITHIN[torch.bfloat16] * float(want.abs().max()))


def test_results_do_not_lean_on_what_memory_held(way: str):
    """Poison the allocator with NaN, then compute: unwritten output would show."""
    for bits in (8, 4):
        w = pack(weight(112, 160, torch.float32), bits)
        for rows in (1, 200):
            del (poison := [torch.full((rows, 112), torch.nan) for _ in range(8)])[:]
            del poison
            assert linear_quantized(torch.ones(rows, 160), w).isfinite().all()


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_no_number_gives_none_and_no_other_row_knows(
    bits: Bits, dtype: torch.dtype, bad: float, way: str
):
    w = pack(weight(112, 160, dtype), bits)
    for rows in (2, cpu.MANY[bits] + 5):
        x = torch.randn(rows, 160, generator=torch.Generator().manual_seed(rows)).to(dtype)
        want = linear_quantized(x, w)
        others = [row for row in range(rows) if row != 1]
        for places in (slice(37, 38), slice(None)):  # integers of many such numbers add up to 0
            x[1, places] = bad
            got = linear_quantized(x, w)
            assert not got[1].isfinite().any(), f"{rows} rows"
            assert torch.equal(got[others], want[others]), f"{rows} rows"


def test_int8_rounds_by_half_a_step_at_most():
    w = weight(7, 48, torch.float32)
    p = pack(w, 8, native=False)
    step = w.abs().amax(1, keepdim=True) / 127
    assert ((reference.weight(8, 0, p.data, p.scale) - w).abs() <= step * 0.501).all()


def test_int4_rounds_by_half_a_step_at_most():
    w = weight(48, 96, torch.float32)
    p = pack(w, 4, native=False)
    groups = w.view(48, -1, p.group)
    step = (groups.amax(2) - groups.amin(2)) / 15
    off = (reference.weight(4, p.group, reference.unpack4(p.data), p.scale) - w).view_as(groups).abs()
    assert (off <= step.unsqueeze(2) * 0.501).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_of_zeros_stays_zero(bits: Bits):
    assert linear_quantized(torch.ones(3, 64), pack(torch.zeros(16, 64), bits)).abs().max() == 0


@pytest.mark.parametrize("size", [16, 32, 48, 64, 112, 176])
def test_unpacking_inverts_packing(size: int):
    q = torch.randint(0, 16, (size, 34), generator=torch.Generator().manual_seed(size), dtype=torch.uint8)
    assert cpu._block() > 0, "the packing order of this CPU is not known: prefill of int4 weights is slow here"
    assert torch.equal(cpu.unpack4(cpu.pack4(q), cpu._block()).T + 8, q.to(torch.int8))
    assert torch.equal(reference.unpack4(reference.pack4(q)), q)


@pytest.mark.parametrize(
    ("shape", "bits", "why"),
    [
        ((16, 13), 8, "13 inputs are not a multiple of 16"),
        ((1, 1), 8, "1 inputs are not a multiple of 16"),
        ((16, 48), 4, "48 inputs are not a multiple of 32"),
        ((17, 64), 4, "17 outputs are not a multiple of 16"),
    ],
)
def test_shapes_torch_would_run_over_are_refused(shape: tuple[int, int], bits: Bits, why: str):
    assert why_not(shape, bits) == why
    with pytest.raises(ValueError, match=why):
        pack(torch.zeros(shape), bits)


@pytest.mark.parametrize(("inputs", "group"), [(4096, 128), (192, 64), (96, 32), (2880, 64), (31, 0)])
def test_groups_are_as_wide_as_the_inputs_allow(inputs: int, group: int):
    assert group_of(inputs) == group


def test_wrong_inputs_are_refused():
    w = pack(torch.zeros(16, 64), 8)
    with pytest.raises(ValueError, match="32 inputs for a weight of 64"):
        linear_quantized(torch.zeros(1, 32), w)
    with pytest.raises(ValueError, match=r"inputs are torch\.float64"):
        linear_quantized(torch.zeros(1, 64, dtype=torch.float64), w)


def test_batches_keep_their_shape_and_may_be_empty(way: str):
    w = pack(weight(16, 64, torch.float32), 4)
    assert linear_quantized(torch.ones(2, 3, 64), w).shape == (2, 3, 16)
    assert linear_quantized(torch.ones(1, 0, 64), w).shape == (1, 0, 16)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantize_replaces_layers_one_for_one(bits: Bits):
    class Quiet(nn.Linear):
        pass

    root = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 16, bias=False)), nn.Linear(16, 5), Quiet(5, 5))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    before = root[0](x)
    swap = quantize_(root, bits)
    assert type(root[0]) is type(root[1][0]) is PackedLinear
    assert type(root[3]) is Quiet  # a subclass may do more than multiply
    assert swap.packed == (3 if bits == 8 else 2)
    assert swap.kept == ({} if bits == 8 else {"16 inputs are not a multiple of 32": 1})
    assert swap.nbytes == sum(m.data.nbytes + m.scale.nbytes for m in root.modules() if isinstance(m, PackedLinear))
    off = (root[0](x) - before).square().mean().sqrt() / before.square().mean().sqrt()
    assert off < (0.02 if bits == 8 else 0.15)


def test_a_quantized_layer_keeps_its_bias_and_its_size():
    layer = nn.Linear(64, 32)
    packed = PackedLinear.of(layer, 8)
    x = torch.randn(2, 64)
    torch.testing.assert_close(
        packed(x) - PackedLinear(pack(layer.weight.detach(), 8), None)(x), layer.bias.expand(2, -1)
    )
    assert (packed.in_features, packed.out_features) == (64, 32)
    assert isinstance(pack(layer.weight.detach(), 8), QuantizedWeight)
