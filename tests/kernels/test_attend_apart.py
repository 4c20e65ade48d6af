"""attend_apart: attention over heads that lie end to end is attention over each of them."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from kvcli.kernels.attend.reference import attend as specified
from kvcli.kernels.attend_apart import attend_apart
from kvcli.kernels.attend_apart.cpu import FEW

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# G, N, D, slots of each head: ones, primes, one head, heads without slots, more rows than FEW
SHAPES = [
    (1, 1, 8, (1,)),
    (4, 1, 64, (131, 1024, 7, 40)),
    (3, 5, 16, (7, 2053)),
    (2, 1, 8, (5, 0, 3)),
    (7, 11, 16, (67, 3)),
]


def laid(shape: tuple[int, int, int, tuple[int, ...]], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list]:
    """q, k, v and spans; heads lie in reverse order, and what lies between them is not a number."""
    g, n, d, lengths = shape
    noise = torch.Generator().manual_seed(sum(lengths))
    q = torch.randn(g * len(lengths), n, d, generator=noise).to(dtype)
    k, v = (torch.full((sum(lengths) + 2 * len(lengths), d), torch.nan, dtype=dtype) for _ in "kv")
    spans, end = [], k.shape[0]
    for length in lengths:
        end -= length + 2
        k[end : end + length], v[end : end + length] = (torch.randn(length, d, generator=noise) for _ in "kv")
        spans.append((end, length))
    return q, k, v, spans


def wanted(q: Tensor, k: Tensor, v: Tensor, spans: list, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    found = []
    for rows, (a, n) in zip(q.double().unflatten(0, (len(spans), -1)), spans, strict=True):
        one, other = (t[None, a : a + n].double() for t in (k, v))
        found.append(specified(rows, one, other, scale, softcap, None, n))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_each_head_sees_its_own_slots(name: str, shape: tuple, dtype: torch.dtype) -> None:
    q, k, v, spans = laid(shape, dtype)
    run = import_module(f"kvcli.kernels.attend_apart.{name}").attend_apart
    out, lse = run(q, k, v, spans, 0.3, 0.0)
    want, mass = wanted(q, k, v, spans, 0.3, 0.0)
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), mass, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_shapes_lie_on_both_sides_of_the_threshold() -> None:
    assert {g * n > FEW for g, n, _, _ in SHAPES} == {True, False}


def test_bent_scores() -> None:
    q, k, v, spans = laid(SHAPES[2], torch.float32)
    part = attend_apart(q, k, v, spans, 2.0, softcap=1.5)
    want, mass = wanted(q, k, v, spans, 2.0, 1.5)
    torch.testing.assert_close(part.out.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(part.lse.double(), mass, atol=1e-5, rtol=1e-5)


def test_scores_beyond_float16_stay_finite() -> None:
    q, k, v, spans = laid(SHAPES[1], torch.float16)
    q, k = q * 100, k * 100
    assert (q[0].double() @ k[spans[0][0] : sum(spans[0])].double().T).abs().max() > 65504
    assert bool(attend_apart(q, k, v, spans, 64**-0.5).out.isfinite().all())
