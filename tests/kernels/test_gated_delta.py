"""The gated delta rule over rows in order: equal to its reference, and a row has the bits of a row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcli.kernels import native
from kvcli.kernels.gated_delta import reference
from kvcli.kernels.gated_delta.cpu import FUNCTIONS, causal_conv, gated_delta, numbers

pytestmark = pytest.mark.skipif(not native.levels(), reason=native.why_not())
LEVELS = native.levels() or ("none",)
DTYPES = (torch.float32, torch.bfloat16)
WITHIN = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
SIZES = [(1, 1, 1, 1, 1), (7, 2, 6, 13, 37), (5, 3, 3, 128, 64)]  # N, K, H, Dk, Dv


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def asked(n: int, k: int, h: int, dk: int, dv: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v side by side in one row, as a model cuts them; g, beta and a state."""
    noise = torch.Generator().manual_seed(0)
    row = torch.randn(n, 2 * k * dk + h * dv, generator=noise).to(dtype)
    q, key, v = row.split([k * dk, k * dk, h * dv], dim=1)
    g, beta = (torch.rand(n, h, generator=noise) for _ in range(2))
    made = [q.view(n, k, dk), key.view(n, k, dk), v.view(n, h, dv), -g, beta.to(dtype)]
    return [*made, torch.randn(h, dk, dv, generator=noise)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_normed", [True, False])
def test_it_is_its_reference(level: str, dtype: torch.dtype, sizes: tuple[int, ...], is_normed: bool):
    *rows, state = asked(*sizes, dtype)
    rows[1] = rows[1] * (1.0 if is_normed else 0.1)  # long keys would blow a state up
    for before in (state, None):
        ours = gated_delta(*rows, before, is_normed=is_normed, level=level)
        theirs = reference.gated_delta(*rows, before, is_normed=is_normed)
        assert ours[0].dtype == dtype
        assert apart(ours[0], theirs[0]) < WITHIN[dtype]
        assert apart(ours[1], theirs[1]) < 1e-6


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_in_one_call_have_the_bits_of_rows_alone(level: str, dtype: torch.dtype, sizes: tuple[int, ...]):
    *rows, state = asked(*sizes, dtype)
    out, behind = gated_delta(*rows, state, level=level)
    for i in range(sizes[0]):
        alone, state = gated_delta(*(t[i : i + 1] for t in rows), state, level=level)
        assert torch.equal(alone[0], out[i])
    assert torch.equal(state, behind)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_convolution_is_its_reference_and_a_row_knows_no_other(level: str, dtype: torch.dtype, has_bias: bool):
    noise = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*by, generator=noise).to(dtype) for by in ((67, 11), (67, 4), (67,)))
    made = causal_conv(x, w, bias if has_bias else None, 11, True, level=level)
    assert apart(made, reference.causal_conv(x, w, bias if has_bias else None, 11, True)) < WITHIN[dtype]
    for end in range(4, 12):
        alone = causal_conv(x[:, end - 4 : end], w, bias if has_bias else None, 1, True, level=level)
        assert torch.equal(alone[0], made[end - 1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_those_of_torch_wherever_they_lie(level: str, dtype: torch.dtype, name: str):
    x = torch.linspace(-80, 80, 4999).to(dtype)
    made = numbers(x, name, level=level)
    wanted = FUNCTIONS[name](x.double())
    assert torch.allclose(made.double(), wanted, rtol=WITHIN[dtype], atol=1e-30)
    assert all(torch.equal(numbers(x[i : i + 1], name, level=level), made[i : i + 1]) for i in range(0, 4999, 101))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_at_infinity_are_those_of_torch_or_as_little_a_number(level: str, name: str):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30])
    made, wanted = numbers(x, name, level=level), FUNCTIONS[name](x)
    assert torch.equal(made.isfinite(), wanted.isfinite())
    assert torch.equal(made.isnan() & (x > 0), wanted.isnan() & (x > 0))
    assert torch.allclose(made[wanted.isfinite()], wanted[wanted.isfinite()], atol=1e-7)


def test_a_state_is_float32_whatever_tensors_are_by_default():
    *rows, state = asked(*SIZES[1], torch.bfloat16)
    wanted = gated_delta(*rows, state)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = gated_delta(*rows, state)
    finally:
        torch.set_default_dtype(torch.float32)
    assert made[1].dtype == torch.float32
    assert all(map(torch.equal, made, wanted))


def test_other_numbers_and_states_are_refused():
    with pytest.raises(ValueError, match="float64 on cpu: only bf16 and float32"):
        numbers(torch.zeros(3, dtype=torch.float64), "silu")
    *rows, state = asked(*SIZES[1], torch.float32)
    with pytest.raises(ValueError, match=r"a state of \(6, 13, 36\): only \(6, 13, 37\)"):
        gated_delta(*rows, state[..., :-1])
