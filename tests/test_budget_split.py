"""Budgets: they sum to what they promise, protect floors, and never ask for what there is not."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcli.policies.scoring import budget_split, selection

INF = torch.inf


def drawn(kv: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores of shuffled positions."""
    r = torch.Generator().manual_seed(seed)
    pos = torch.stack([torch.randperm(n, generator=r) for _ in range(kv)])
    return torch.rand(kv, n, generator=r), pos


def test_the_best_are_taken_and_among_equals_the_newest() -> None:
    score = torch.tensor([[1.0, 3, 3, 3, -INF], [2, 2, 2, 2, 9]])
    pos = torch.tensor([[0, 4, 2, 3, 9], [3, 1, 0, 2, 4]])

    mask = selection.top(score, pos, torch.tensor([2, 3]))

    assert [sorted(p[m].tolist()) for p, m in zip(pos, mask, strict=True)] == [[3, 4], [2, 3, 4]]
    assert selection.top(score, pos, torch.tensor([5, 0])).sum(1).tolist() == [4, 0]


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.integers(0, 99))
@settings(deadline=None)
def test_heads_that_compete_keep_the_sum_and_the_floor(kv: int, n: int, each: int, floor: float, seed: int) -> None:
    score, pos = drawn(kv, n, seed)

    mask = selection.ada(score, pos, each, floor)

    assert int(mask.sum()) == min(kv * each, kv * n)
    assert int(mask.sum(1).min()) >= min(n, int(floor * each))
    if floor == 0 and each < n:
        assert float(score[mask].min()) >= float(score[~mask].max())


@given(st.integers(1, 60), st.integers(1, 1000), st.floats(1, 50), st.integers(1, 1000))
def test_a_pyramid_sums_to_its_layers_and_never_rises(layers: int, each: int, beta: float, most: int) -> None:
    shares = selection.pyramid(layers, each, beta, most)

    assert sum(shares) == layers * min(each, most)
    assert len(shares) == layers
    assert all(0 <= share <= most for share in shares)
    assert all(b <= a + 1 for a, b in pairwise(shares)), "but for rounding"


def test_a_pyramid_ends_at_its_tip() -> None:
    assert selection.pyramid(3, 100, 20, 10_000) == [195, 100, 5]
    assert selection.pyramid(3, 100, 20, 150) == [150, 100, 50]
    assert selection.pyramid(3, 100, 1, 10_000) == [100, 100, 100]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 500), st.floats(0, 1), st.integers(1, 500))
def test_weights_share_the_whole_sum(weights: list[float], each: int, floor: float, most: int) -> None:
    counts = selection.by_weight(weights, each, floor, most)

    assert sum(counts) == len(weights) * min(each, most)
    assert all(int(floor * min(each, most)) <= count <= most for count in counts)


def test_weights_are_followed_until_a_head_is_full() -> None:
    assert selection.by_weight([3, 1, 0], 100, 0.0, 1000) == [225, 75, 0]
    assert selection.by_weight([3, 1, 0], 100, 0.1, 1000) == [213, 77, 10]
    assert selection.by_weight([9, 1, 1], 100, 0.0, 150) == [150, 75, 75]
    assert selection.by_weight([0, 0], 10, 0.0, 100) == [10, 10]


def test_all_layers_together_keep_the_sum() -> None:
    held = [drawn(2, 30, seed) for seed in range(4)]
    layers = [(score * (i + 1), pos) for i, (score, pos) in enumerate(held)]

    masks = list(budget_split.all_layers(layers, 8, 30, floor=0.5))

    assert sum(int(mask.sum()) for mask in masks) == 4 * 2 * 8
    assert min(int(mask.sum(1).min()) for mask in masks) >= 4
    assert int(masks[3].sum()) > int(masks[0].sum()), "the last layer has higher scores"


def test_layers_and_heads_get_what_they_deserve() -> None:
    held = [drawn(2, 400, seed) for seed in range(3)]
    pyramid = partial(budget_split.pyramid, beta=10, n_layers=3)
    headmap = partial(budget_split.headmap, heads=[[1, 1], [3, 1], [0, 0]], floor=0.0)
    counts = [[mask.sum(1).tolist() for mask in share(held, 50, 400)] for share in (pyramid, headmap)]
    assert counts == [[[95, 95], [50, 50], [5, 5]], [[50, 50], [150, 50], [0, 0]]]
