"""Recycled logits: what is kept, how it is ranked, and that noise is the sampler's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvcli.drafts.sources.logit_recycling import PART, TOP, WIDE, RecycledLogits, likeliest, top
from kvcli.drafts.tree.tree import grow
from kvcli.engine.sequence.sampler import Sampler
from kvcli.kernels.gumbel_noise import gumbel
from kvcli.kernels.gumbel_noise.host import gumbel_host


class Elsewhere(torch.Tensor):
    """As on a device that is not the host's."""

    is_cpu = False


def logs(*shares: float) -> list[float]:
    return [math.log(p) for p in shares]


def test_the_host_noise_is_the_reference():
    ids = torch.tensor([0, 1, 7, 50_000, 262_143])
    for seed in (0, 3, 2**63 + 5, -1):
        for pos in (0, 1, 4097, 10**6):
            want = gumbel(seed, torch.tensor([pos]), ids)[0]
            np.testing.assert_allclose(gumbel_host(seed, pos, ids.tolist()), want.numpy(), rtol=1e-12)


def test_the_newest_successors_of_a_token_replace_the_old():
    source = RecycledLogits("token-recycling", 1, 1)
    source.add([1], [2, 3], logs(0.6, 0.3))
    source.add([1], [4, 2], logs(0.7, 0.2))
    source.start([9, 1])
    assert [o.id for o in source.offers(source.root(3), 0, 4)] == [4, 2]


def test_longer_keys_keep_a_mean():
    source = RecycledLogits("stand", 2, 4)
    source.add([0, 1], [2, 3], logs(0.9, 0.1))
    source.add([0, 1], [3, 2], logs(0.6, 0.4))
    source.start([0, 1])
    first, second = source.offers(source.root(3), 0, 4)
    assert (first.id, second.id) == (2, 3)  # 0.65 against 0.35
    assert first.about[0] == 2  # log(0.65 / 0.35) = 0.62, between a half and one


def test_the_longest_known_key_decides():
    source = RecycledLogits("stand", 2, 3)
    source.add([5, 1, 2], [7], logs(0.9))
    source.add([6, 1, 2], [8], logs(0.9))
    source.start([5, 1, 2])
    assert source.offers(source.root(1), 0, 1)[0].id == 7
    source.start([4, 1, 2])
    assert source.offers(source.root(1), 0, 1)[0].id in (7, 8)  # the mean of both


def test_a_path_follows_its_own_drafts():
    source = RecycledLogits("token-recycling", 1, 1)
    for token in range(5):
        source.add([token], [token + 1], logs(0.99))
    source.start([0])
    assert [g.id for g in grow([source], 4, 9, 2)] == [1, 2, 3, 4]


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.4}, {"top_k": 4, "top_p": 0.9}])
def test_what_is_drafted_first_is_what_the_sampler_draws(settings: dict[str, float]):
    """With all of the distribution known, the coupled draft is the sample."""
    sampler = Sampler(temperature=0.8, seed=5, **settings)
    source = RecycledLogits("stand", 2, 2)
    source.sampler = sampler
    logits = torch.randn(1, TOP, generator=torch.Generator().manual_seed(1))
    ids, logp = likeliest(top(logits)[0].tolist())
    source.add([3, 4], ids, logp)
    for n in range(40):
        text = [0] * n + [3, 4]
        source.start(text)
        drawn = int(sampler(logits, torch.tensor([len(text) - 1]))[0])
        assert source.offers(source.root(1), 0, 1)[0].id == drawn


def test_keys_are_limited(monkeypatch):
    monkeypatch.setattr("kvcli.drafts.sources.logit_recycling.KEYS", 3)
    source = RecycledLogits("token-recycling", 1, 1)
    for token in range(9):
        source.add([token], [0], [0.0])
    source.start([5])
    assert not source.offers(source.root(1), 0, 1)
    source.start([8])
    assert source.offers(source.root(1), 0, 1)


def test_top_is_in_order_and_normalised():
    ids, logp = likeliest(top(torch.tensor([[0.0, 2.0, 1.0]]))[0].tolist())
    assert ids == [1, 2, 0]
    assert math.isclose(sum(map(math.exp, logp)), 1, rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [97 * PART, 97 * PART + 1])
@pytest.mark.parametrize("device", ["cpu", "another"])
def test_the_likeliest_are_found_by_columns(device: str, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, 5 :: vocab // PART] = 9.0 + torch.arange(PART).flip(0) / 8  # more in one than are asked for
    if device != "cpu":
        logits = logits.as_subclass(Elsewhere)
    ids, values = top(logits).split(WIDE, 1)
    assert torch.equal(values, logits.topk(WIDE).values.double())
    assert torch.equal(logits.gather(1, ids.long()).double(), values)
    assert all(len(set(row)) == WIDE for row in ids.tolist())
