"""Rounding of keys and values: bounds of the error, round trips, layouts and bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcli.kernels.quantize_kv import (
    LANES,
    Rounded,
    hadamard,
    pack_keys,
    pack_values,
    spread,
    squeeze,
    unpack_keys,
    unpack_values,
)
from kvcli.kernels.quantize_kv.reference import width_of

# slots, channels, numbers in a group: primes and ones
SHAPES = [(1, 8, 1), (7, 16, 7), (13, 12, 5), (130, 64, 13), (64, 80, 64)]
TYPES = [torch.float64, torch.float32, torch.bfloat16]


def numbers(s: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Channels of different size and place, as keys have them, slots of different size, as values have."""
    noise = torch.Generator().manual_seed(s * d)
    x = torch.randn(s, d, generator=noise, dtype=torch.float64) * torch.linspace(0.1, 4, d) + torch.linspace(-9, 9, d)
    return (x * torch.linspace(0.5, 2, s).unsqueeze(1)).to(dtype)


def steps(x: Tensor, bits: int, dim: int) -> Tensor:
    """The distance of neighbouring codes of each group along `dim`."""
    if bits == 8:
        return x.abs().amax(dim, keepdim=True) / 127
    return (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)) / ((1 << bits) - 1)


def within(got: Tensor, x: Tensor, step: Tensor, bits: int) -> None:
    """Half a step, and what rounding of scale and zero to 11 bits adds at the ends of the range."""
    levels = 127 if bits == 8 else (1 << bits) - 1
    slack = step * levels * 2**-11 + x.abs().amax() * 2**-11 * (bits < 8)
    assert ((got - x).abs() <= step / 2 + slack + 1e-7).all()
    assert ((got - x).abs().amax() >= step.amax() / 8) | (step.amax() < 1e-6), "nothing was rounded"


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_are_off_by_half_a_step_of_their_group(shape: tuple[int, int, int], bits: int) -> None:
    s, d, group = shape
    x = numbers(s // group * group, d)
    got = unpack_keys(pack_keys(x, bits, group), x)
    grouped = x if bits == 8 else x.view(-1, group, d)
    within(got.view_as(grouped), grouped, steps(grouped, bits, 1), bits)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_off_by_half_a_step_of_their_slot(shape: tuple[int, int, int], bits: int) -> None:
    s, d, group = shape
    x = numbers(s, d)
    got = unpack_values(pack_values(x, bits, group), x, s)
    grouped = x if bits == 8 else x.view(s, -1, width_of(d, group))
    within(got.view_as(grouped), grouped, steps(grouped, bits, -1), bits)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_what_was_rounded_once_is_rounded_no_further(bits: int, dtype: torch.dtype) -> None:
    x = numbers(130, 64, dtype)
    for once in (unpack_keys(pack_keys(x, bits, 13), x), unpack_values(pack_values(x, bits, 13), x, 130)):
        assert once.dtype == dtype
        assert once.isfinite().all()
    exact = x.double()
    k = unpack_keys(pack_keys(exact, bits, 13), exact)
    torch.testing.assert_close(unpack_keys(pack_keys(k, bits, 13), k), k, atol=2e-2, rtol=2e-3)


def test_sixteen_bits_are_the_numbers_themselves() -> None:
    x = numbers(7, 16, torch.bfloat16)
    assert torch.equal(unpack_keys(pack_keys(x, 16, 3), x), x)
    assert torch.equal(unpack_values(pack_values(x, 16, 3), x, 7), x)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("value", [0.0, 1e-9, -3.5, 6e4])
def test_numbers_that_are_all_the_same_stay_finite_and_near(value: float, bits: int) -> None:
    x = torch.full((32, 16), value)
    for got in (unpack_keys(pack_keys(x, bits, 32), x), unpack_values(pack_values(x, bits, 16), x, 32)):
        torch.testing.assert_close(got, x, atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("bits", [4, 2])
def test_spreading_inverts_squeezing(bits: int) -> None:
    q = torch.randint(0, 1 << bits, (13, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(spread(squeeze(q, bits), bits), q)
    assert squeeze(q, bits).shape == (13, 24 * bits // 8)
    assert int(squeeze(q[:1, : 8 // bits], bits)) & (1 << bits) - 1 == int(q[0, 0]), "the first is in the lowest bits"


@pytest.mark.parametrize("s", [0, 1, 15, 16, 17])
def test_values_of_eight_bits_lie_transposed_with_zeros_behind(s: int) -> None:
    x = numbers(s, 16)
    r = pack_values(x, 8, 64)
    assert r.scale is not None
    assert r.codes.shape == (16, -(-s // LANES) * LANES)
    assert r.codes.is_contiguous()
    assert not r.codes[:, s:].any()
    assert not r.scale[s:].any()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.53), (4, 0.30), (2, 0.18)])
def test_bytes_with_scales(bits: int, most: float) -> None:
    x = numbers(256, 64, torch.bfloat16)
    held: list[Rounded] = [pack_keys(x, bits, 64), pack_values(x, bits, 64)]
    assert sum(t.untyped_storage().nbytes() for r in held for t in r.tensors) <= most * 2 * x.nbytes


@pytest.mark.parametrize(
    ("channels", "group", "width"), [(64, 64, 64), (128, 64, 64), (80, 64, 40), (64, 7, 4), (8, 1, 1)]
)
def test_groups_of_channels_divide_them(channels: int, group: int, width: int) -> None:
    assert width_of(channels, group) == width


@pytest.mark.parametrize("n", [1, 2, 16, 64])
def test_a_hadamard_matrix_is_its_own_inverse_and_keeps_products(n: int) -> None:
    x = numbers(7, n)
    h = hadamard(n, x)
    torch.testing.assert_close(x @ h @ h, x)
    torch.testing.assert_close((x @ h) @ (x @ h).T, x @ x.T)
    if n > 1:
        one = torch.eye(n, dtype=torch.float64)[0] * 100  # an outlier
        assert (one @ h).abs().max() < 100 / n**0.5 + 1e-9
