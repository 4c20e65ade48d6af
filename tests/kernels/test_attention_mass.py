"""Softmax mass per slot: that of a plain double loop, however the work is cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvcli.kernels.attention_mass import Over, attention_mass, reference

# K, G, w, S, D: primes and ones
SHAPES = [(1, 1, 1, 1, 4), (2, 3, 5, 31, 8), (3, 1, 1, 7, 4), (1, 7, 13, 3, 8)]


def inputs(kv: int, g: int, w: int, s: int, d: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Ragged and shuffled slots, queries in the midst of them."""
    r = torch.Generator().manual_seed(kv + s)
    q, k = torch.randn(kv * g, w, d, generator=r), torch.randn(kv, s, d, generator=r)
    pos = torch.stack([torch.randperm(2 * s, generator=r)[:s] for _ in range(kv)])
    for j in range(kv):
        pos[j, s - j :] = -1
    q_pos = torch.arange(s // 2, s // 2 + w)
    return (q * 2).to(dtype), q_pos, k.to(dtype), pos


def by_loops(
    q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, scale: float, softcap: float, window: int | None
) -> Tensor:
    """[K, G, w, S], the definition."""
    kv, s = pos.shape
    g = q.shape[0] // kv
    out = torch.zeros(kv, g, q.shape[1], s, dtype=torch.float64)
    for h in range(q.shape[0]):
        for i in range(q.shape[1]):
            weight = {}
            for j in range(s):
                p, at = int(pos[h // g, j]), int(q_pos[i])
                if 0 <= p <= at and (window is None or p > at - window):
                    score = float(q[h, i].double() @ k[h // g, j].double()) * scale
                    weight[j] = math.exp(softcap * math.tanh(score / softcap) if softcap else score)
            for j, one in weight.items():
                out[h // g, h % g, i, j] = one / sum(weight.values())
    return out


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("scores", [1, 40, reference.SCORES])
@pytest.mark.parametrize("shape", SHAPES)
def test_masses_are_those_of_two_loops(
    shape: tuple[int, ...], scores: int, softcap: float, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "SCORES", scores)
    monkeypatch.setattr(reference, "ROWS", 3 if scores == 40 else 256)
    given = inputs(*shape)
    want = by_loops(*given, 0.7, softcap, window)

    def got(over: Over) -> Tensor:
        return attention_mass(*given, 0.7, softcap=softcap, window=window, over=over)

    torch.testing.assert_close(got("none"), want)
    torch.testing.assert_close(got("mean"), want.mean((1, 2)))
    torch.testing.assert_close(got("sum"), want.sum(2).mean(1))
    torch.testing.assert_close(got("max"), want.amax((1, 2)))


@pytest.mark.parametrize("over", ["mean", "sum", "max", "none"])
def test_no_queries_and_no_slots_give_no_mass(over: Over) -> None:
    q, q_pos, k, pos = inputs(2, 3, 5, 31, 8)
    nobody = attention_mass(q[:, :0], q_pos[:0], k, pos, 1.0, over=over)
    nothing = attention_mass(q, q_pos, k[:, :0], pos[:, :0], 1.0, over=over)
    assert nobody.shape[-1] == 31
    assert not nobody.any()
    assert nothing.shape[-1] == 0
    blind = attention_mass(q, q_pos - 1000, k, pos, 1.0, over=over)
    assert not blind.any()


def test_half_precision_is_summed_in_float32() -> None:
    given = inputs(2, 3, 5, 31, 8, torch.bfloat16)
    got = attention_mass(*given, 0.7)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), by_loops(*given, 0.7, 0.0, None).mean((1, 2)), atol=1e-6, rtol=1e-5)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SCORES", 1000)
    largest = 0
    scores = reference._scores

    def watched(*args: object) -> Tensor:
        nonlocal largest
        found: Tensor = scores(*args)  # type: ignore[arg-type]
        largest = max(largest, found.numel())
        return found

    monkeypatch.setattr(reference, "_scores", watched)
    attention_mass(*inputs(2, 3, 5, 997, 8), 0.7)
    assert 0 < largest <= 1000
