"""The gated delta rule and its convolution in Triton: numbers of float64, bits of a row alone, states by a count."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels import triton_support
from kvcli.kernels.gated_delta import implementation, reference

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before anything that is fused
fused = import_module("kvcli.kernels.gated_delta.fused")
torch.set_num_threads(1)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WITHIN = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SIZES = [(1, 1, 1, 1, 1), (5, 2, 6, 13, 37), (3, 1, 1, 128, 32)]  # N, K, H, Dk, Dv


def off(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def given(n: int, k: int, h: int, dk: int, dv: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """q, k and v side by side in one row, as a model cuts them, g and beta; and a state."""
    noise = torch.Generator().manual_seed(0)
    row = torch.randn(n, 2 * k * dk + h * dv, generator=noise).to(dtype)
    q, key, v = row.split([k * dk, k * dk, h * dv], dim=1)
    g, beta = (torch.rand(n, h, generator=noise) for _ in range(2))
    made = [q.view(n, k, dk), key.view(n, k, dk), v.view(n, h, dv), -g, beta.to(dtype)]
    return made, torch.randn(h, dk, dv, generator=noise)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_normed", [True, False])
def test_numbers_are_those_of_float64(dtype: torch.dtype, sizes: tuple[int, ...], is_normed: bool):
    rows, state = given(*sizes, dtype)
    rows[1] = rows[1] * (1.0 if is_normed else 0.1)  # long keys would blow a state up
    for before in (state, None):
        wide = [t.double() for t in (*rows, torch.zeros_like(state) if before is None else before)]
        want = reference.gated_delta(*wide, is_normed=is_normed)
        out, behind = fused.gated_delta(*rows, before, is_normed=is_normed)
        assert (out.dtype, behind.dtype) == (dtype, torch.float32)
        assert off(out, want[0]) < WITHIN[dtype]
        assert off(behind, want[1]) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_in_one_call_have_the_bits_of_rows_alone(dtype: torch.dtype, sizes: tuple[int, ...]):
    rows, state = given(*sizes, dtype)
    out, behind = fused.gated_delta(*rows, state)
    for i in range(sizes[0]):
        alone, state = fused.gated_delta(*(t[i : i + 1] for t in rows), state)
        assert torch.equal(alone[0], out[i])
    assert torch.equal(state, behind)


@pytest.mark.parametrize("of", [fused, reference])
@pytest.mark.parametrize("count", range(6))
def test_a_state_is_updated_in_place_by_as_many_rows_as_the_device_counts(of, count: int):
    """Rows behind them may be no numbers: a pass that was captured has not run."""
    rows, state = given(*SIZES[1], torch.float32)
    want = state.clone() if not count else of.gated_delta(*(t[:count] for t in rows), state)[1]
    rows = [torch.where((torch.arange(5) < count).view(-1, *[1] * (t.dim() - 1)), t, torch.nan) for t in rows]
    of.advance_(*rows, state, torch.tensor([count], dtype=torch.int32))
    assert torch.equal(state, want)


def test_a_captured_pass_leaves_the_state_to_the_update():
    rows, state = given(*SIZES[1], torch.bfloat16)
    before, (want, _) = state.clone(), fused.gated_delta(*rows, state)
    out, same = fused.gated_delta(*rows, state, is_captured=True)
    assert torch.equal(out, want)
    assert same is state
    assert torch.equal(state, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_silu", [True, False])
def test_the_convolution_is_torchs_and_a_row_knows_no_other(dtype: torch.dtype, has_bias: bool, has_silu: bool):
    noise = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*by, generator=noise).to(dtype) for by in ((67, 43), (67, 4), (67,)))
    bias = bias if has_bias else None
    for n in (1, 40, 43):  # the first positions of a sequence have no inputs before them
        made = fused.causal_conv(x, w, bias, n, has_silu)
        want = functional.conv1d(
            x.double()[None], w.double()[:, None], None if bias is None else bias.double(), padding=3, groups=67
        )
        want = (functional.silu(want) if has_silu else want)[0, :, :43][:, -n:].T
        assert off(made, want) < 2 * WITHIN[dtype]
        for end in range(max(4, 43 - n + 1), 44, 7):
            assert torch.equal(fused.causal_conv(x[:, end - 4 : end], w, bias, 1, has_silu)[0], made[end - 44])


def test_what_computes_is_chosen_by_the_device(monkeypatch: pytest.MonkeyPatch):
    at = torch.zeros(1)
    assert implementation(at, is_captured=True) is reference
    assert implementation(at.double()) is None
    monkeypatch.setattr(triton_support, "why_not", lambda *_: "")
    assert implementation(at) is implementation(at.half()) is implementation(at, is_captured=True) is fused
