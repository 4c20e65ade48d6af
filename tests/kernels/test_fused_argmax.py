"""The likeliest token and the drawn one on a GPU: those of the reference, for a row alone as among others."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from kvcli.engine.sequence.sampler import Sampler, TokenFacts
from kvcli.kernels import argmax
from kvcli.kernels.argmax import Noise, reference

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before anything that is fused
fused = import_module("kvcli.kernels.argmax.fused")
torch.set_num_threads(1)

VOCAB = 2503  # three pieces, the last not full
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def logits(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(n)) * 3).to(dtype)


def noise(n: int, seed: int, heat: float) -> Noise:
    pos = torch.tensor([0, 17, 40_000, 131_071, 5])[:n]
    return Noise(torch.full((n,), seed), pos, torch.full((n,), heat))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_of_equals_the_lowest_wins(dtype: torch.dtype):
    x = logits(3, dtype)
    x[0, [2400, 1030, 1029]] = 60
    x[1] = -torch.inf
    x[1, VOCAB - 1] = 1
    assert fused.argmax(x).tolist() == [1029, VOCAB - 1, int(x[2].argmax())] == reference.argmax(x).tolist()


def test_what_is_no_number_is_said():
    x = logits(4)
    x[0, 7], x[1, 2000], x[2] = torch.nan, torch.inf, -torch.inf
    assert fused.argmax(x).tolist() == [-1, -1, -1, int(x[3].argmax())] == reference.argmax(x).tolist()
    by = noise(4, 3, 0.7)
    assert fused.argmax(x, by).tolist() == reference.argmax(x, by).tolist()


@pytest.mark.parametrize("seed", [0, 1, -2, 0x7FFF_FFFF_FFFF_FFFF])
@pytest.mark.parametrize("heat", [0.3, 1.0])
def test_what_is_drawn_is_what_the_sampler_draws(seed: int, heat: float):
    x = logits(5)
    by = noise(5, seed, heat)
    drawn = fused.argmax(x, by)
    assert drawn.tolist() == reference.argmax(x, by).tolist()
    assert drawn.tolist() == Sampler(temperature=heat, seed=seed)(x, by.pos).tolist()


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(),
        Sampler(repetition_penalty=1.3),
        Sampler(temperature=0.8, seed=1 << 63),
        Sampler(temperature=0.8, top_k=5),
    ],
)
def test_a_sampler_takes_it_where_it_is_served(sampler: Sampler, monkeypatch: pytest.MonkeyPatch):
    x, pos = logits(2), torch.tensor([3, 99])
    facts = TokenFacts(torch.arange(VOCAB) == x.argmax(-1, keepdim=True)) if sampler.penalties else None
    want = sampler(x, pos, facts).tolist()
    monkeypatch.setattr(argmax, "why_not", lambda logits: "")
    drawn = sampler.fused(x, pos, facts)
    assert (drawn is None) == bool(sampler.top_k)
    assert sampler(x, pos, facts).tolist() == want


def differing(by_place: bool) -> int:
    """Rows that draw otherwise alone than among others; `by_place`: with the noise of a place in the pass."""
    x, by = logits(5, torch.bfloat16), noise(5, 11, 0.9)

    def drawn(rows: slice) -> list[int]:
        pos = by.pos[: len(x[rows])] if by_place else by.pos[rows]
        return fused.argmax(x[rows], Noise(by.seed[rows], pos, by.heat[rows])).tolist()

    together = drawn(slice(5))
    return sum(drawn(slice(i, i + 1)) != together[i : i + 1] for i in range(5))


def test_a_row_draws_alone_as_among_others():
    assert differing(by_place=False) == 0


def test_noise_by_the_place_of_a_row_is_caught():
    assert differing(by_place=True) > 0
