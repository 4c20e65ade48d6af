"""page_scores: the numbers of its specification, and the same bits whichever rows are scored beside a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcli.kernels import native
from kvcli.kernels.page_scores import Box, QuantizedPages, log_masses, page_scores, reference, why_not
from kvcli.kernels.quantized_key_scores import pack2

pytestmark = pytest.mark.skipif(not native.levels(), reason=native.why_not() or "unknown")
LEVELS = native.levels()
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 5, 37, 4, 16),
    (3, 70, 131, 3, 8),
    (1, 4, 700, 4, 64),
    (2, 3, 90, 16, 50),
    (1, 9, 9, 100, 13),
]
KINDS = ["box", "int8", "two bits"]  # of (K, R, P, page, D)


def made(kind: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, QuantizedPages | Box]:
    k, r, p, page, d = shape
    rows = torch.randn(k, r, d).to(dtype)
    if kind == "box":
        a, b = torch.randn(2, k, p, d).to(dtype)
        return rows, Box(torch.minimum(a, b), torch.maximum(a, b))
    scale = torch.rand(k, p * page).bfloat16()
    if kind == "int8":
        codes = torch.randint(-127, 128, (k, p * page, d), dtype=torch.int8)
        return rows, QuantizedPages(codes, scale / 50, error=torch.rand(k, p * page).bfloat16())
    codes = pack2(torch.randint(0, 4, (k, p * page, d)))
    return rows, QuantizedPages(codes, scale, mean=torch.randn(k, d), spread=torch.rand(k, d))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_those_of_the_keys_that_pages_are_known_by(level: str, kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        rows, of = made(kind, shape, dtype)
        for softcap in (0.0, 7.0):
            got = page_scores(rows, of, shape[3], 0.3, softcap, level=level)
            if isinstance(of, Box):
                want = reference.of_box(rows.double(), of, 0.3, softcap)
            else:
                want = reference.of_codes(rows.double(), of, shape[3], 0.3, softcap)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_scores_alike_alone_and_among_others(level: str, kind: str) -> None:
    functions = native.native(level)
    assert functions is not None
    for shape in SHAPES:
        rows, of = made(kind, shape, torch.bfloat16)
        together = page_scores(rows, of, shape[3], 0.3, 5.0, level=level)
        for i in range(rows.shape[1]):
            alone = page_scores(rows[:, i : i + 1], of, shape[3], 0.3, 5.0, level=level)
            assert torch.equal(alone, together[:, i : i + 1])
        try:
            functions.use_threads(3)
            assert torch.equal(page_scores(rows, of, shape[3], 0.3, 5.0, level=level), together)
        finally:
            functions.use_threads(1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("p", [1, 15, 16, 333])
def test_masses_are_those_of_the_pages_that_a_mask_names(level: str, p: int) -> None:
    x, mine = torch.randn(2, 3, 5, p) * 30, torch.rand(2, 5, p) < 0.5
    mine[0, 1] = False
    for mask in (mine, mine[:, 0]):
        got = log_masses(x, mask, level=level)
        torch.testing.assert_close(got, reference.log_masses(x, mask), rtol=1e-6, atol=1e-6)
        for n in range(5):
            its = mask[:, n : n + 1] if mask.dim() == 3 else mask
            assert torch.equal(log_masses(x[:, :, n : n + 1], its, level=level), got[:, :, n : n + 1])


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_no_number_stays_none(level: str) -> None:
    """A certificate must refuse it."""
    for bad in (torch.nan, torch.inf):
        x = torch.zeros(1, 1, 1, 40)
        x[..., 7] = bad
        assert log_masses(x, torch.ones(1, 40, dtype=torch.bool), level=level).isnan().all()
        rows, of = made("box", (1, 2, 40, 1, 8), torch.float32)
        of.high[0, 3, 2] = torch.nan
        assert page_scores(rows.abs(), of, 1, 0.3, 0.0, level=level)[0, :, 3].isnan().all()


def test_what_is_not_served() -> None:
    assert why_not(torch.zeros(1, 1, 4)) == ""
    assert "float64" in why_not(torch.zeros(1, 1, 4, dtype=torch.float64))
