"""page_bounds and code_scores: bounds are bounds, products are their specification, two bits pack and unpack."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcli.kernels.page_bounds import page_bounds
from kvcli.kernels.page_bounds.reference import page_bounds as specified
from kvcli.kernels.quantized_key_scores import code_scores, pack2, reference, unpack2

SHAPES = [(1, 1, 1, 1), (2, 5, 7, 16), (3, 13, 131, 8), (1, 3, 5003, 64), (2, 1, 11, 48)]  # K, R, P or S, D
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}  # products are summed in float32 at least


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_two_products_are_the_bound_channel_by_channel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    k, r, p, d = shape
    rows, a, b = randn(k, r, d, dtype=dtype), randn(k, p, d, seed=1, dtype=dtype), randn(k, p, d, seed=2, dtype=dtype)
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    got, want = page_bounds(rows, low, high), specified(rows, low, high)
    assert got.dtype == want.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got, want, rtol=DTYPES[dtype], atol=DTYPES[dtype] * d)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), page=st.integers(1, 9), pages=st.integers(1, 5), d=st.integers(1, 20))
def test_no_key_of_a_page_scores_above_its_bound(seed: int, page: int, pages: int, d: int) -> None:
    keys = randn(2, pages, page, d, seed=seed) * 10.0 ** (seed % 5 - 2)
    rows = randn(2, 3, d, seed=seed + 1)
    score = torch.einsum("krd,kpsd->krps", rows, keys)
    bound = page_bounds(rows, keys.amin(2), keys.amax(2))
    assert bool((bound >= score.amax(3) - 1e-9 * score.abs().max()).all())
    if page == 1:
        torch.testing.assert_close(bound, score[..., 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_codes_are_those_of_the_keys_they_stand_for(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    k, r, s, d = shape
    codes = torch.randint(-127, 128, (k, s, d), dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    rows, scale = randn(k, r, d, dtype=dtype), randn(k, s, seed=4, dtype=dtype)
    want = torch.einsum("krd,ksd->krs", rows.double(), codes.double() * scale.double().unsqueeze(2))
    for score in (code_scores, reference.code_scores):
        got = score(rows, codes, scale)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=DTYPES[dtype] * float(want.abs().max() + 1))


@pytest.mark.parametrize("d", [1, 3, 4, 8, 13, 64])
def test_two_bits_come_back(d: int) -> None:
    codes = torch.randint(0, 4, (2, 5, 3, d), generator=torch.Generator().manual_seed(d))
    packed = pack2(codes)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 5, 3, -(-d // 4))
    assert torch.equal(unpack2(packed, d), (codes * 2 - 3).to(torch.int8))
