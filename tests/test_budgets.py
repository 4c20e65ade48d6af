"""Budgets: they sum to what they promise, protect floors, and never ask for what there is not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcli.errors import KvcliError
from kvcli.policies import budgets
from kvcli.policies.allocs import Ask, Global, HeadMap, Pyramid

INF = torch.inf


def drawn(kv: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores of shuffled positions."""
    r = torch.Generator().manual_seed(seed)
    pos = torch.stack([torch.randperm(n, generator=r) for _ in range(kv)])
    return torch.rand(kv, n, generator=r), pos


def test_the_best_are_taken_and_among_equals_the_newest() -> None:
    score = torch.tensor([[1.0, 3, 3, 3, -INF], [2, 2, 2, 2, 9]])
    pos = torch.tensor([[0, 4, 2, 3, 9], [3, 1, 0, 2, 4]])

    mask = budgets.top(score, pos, torch.tensor([2, 3]))

    assert [sorted(p[m].tolist()) for p, m in zip(pos, mask, strict=True)] == [[3, 4], [2, 3, 4]]
    assert budgets.top(score, pos, torch.tensor([5, 0])).sum(1).tolist() == [4, 0]


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.integers(0, 99))
@settings(deadline=None)
def test_heads_that_compete_keep_the_sum_and_the_floor(kv: int, n: int, each: int, floor: float, seed: int) -> None:
    score, pos = drawn(kv, n, seed)

    mask = budgets.ada(score, pos, each, floor)

    assert int(mask.sum()) == min(kv * each, kv * n)
    assert int(mask.sum(1).min()) >= min(n, int(floor * each))
    if floor == 0 and each < n:
        assert float(score[mask].min()) >= float(score[~mask].max())


@given(st.integers(1, 60), st.integers(1, 1000), st.floats(1, 50), st.integers(1, 1000))
def test_a_pyramid_sums_to_its_layers_and_never_rises(layers: int, each: int, beta: float, most: int) -> None:
    shares = budgets.pyramid(layers, each, beta, most)

    assert sum(shares) == layers * min(each, most)
    assert len(shares) == layers
    assert all(0 <= share <= most for share in shares)
    assert all(b <= a + 1 for a, b in pairwise(shares)), "but for rounding"


def test_a_pyramid_ends_at_its_tip() -> None:
    assert budgets.pyramid(3, 100, 20, 10_000) == [195, 100, 5]
    assert budgets.pyramid(3, 100, 20, 150) == [150, 100, 50]
    assert budgets.pyramid(3, 100, 1, 10_000) == [100, 100, 100]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 500), st.floats(0, 1), st.integers(1, 500))
def test_weights_share_the_whole_sum(weights: list[float], each: int, floor: float, most: int) -> None:
    counts = budgets.by_weight(weights, each, floor, most)

    assert sum(counts) == len(weights) * min(each, most)
    assert all(int(floor * min(each, most)) <= count <= most for count in counts)


def test_weights_are_followed_until_a_head_is_full() -> None:
    assert budgets.by_weight([3, 1, 0], 100, 0.0, 1000) == [225, 75, 0]
    assert budgets.by_weight([3, 1, 0], 100, 0.1, 1000) == [213, 77, 10]
    assert budgets.by_weight([9, 1, 1], 100, 0.0, 150) == [150, 75, 75]
    assert budgets.by_weight([0, 0], 10, 0.0, 100) == [10, 10]


def test_all_layers_together_keep_the_sum() -> None:
    alloc, held = Global(floor=0.5), [drawn(2, 30, seed) for seed in range(4)]
    for layer, (score, pos) in enumerate(held):
        alloc.see(layer, 4, score * (layer + 1), pos, Ask(8, 30))

    masks = [alloc.choose(layer, None, pos, Ask(8, 30)) for layer, (_, pos) in enumerate(held)]

    assert sum(int(mask.sum()) for mask in masks) == 4 * 2 * 8
    assert min(int(mask.sum(1).min()) for mask in masks) >= 4
    assert int(masks[3].sum()) > int(masks[0].sum()), "the last layer has higher scores"


def test_layers_that_keep_themselves_have_no_share() -> None:
    pyramid, headmap = Pyramid(beta=10), HeadMap([[1, 1], [9, 9], [3, 1], [9, 9], [0, 0]], 0.0, "map.tsv")
    for alloc in (pyramid, headmap):
        for _ in range(2):  # two boundaries
            kept = {}
            held = {layer: drawn(2, 400, layer) for layer in (0, 2, 4)}
            for layer, (_, pos) in held.items():
                alloc.see(layer, 5, None, pos, Ask(50, 400))
            for layer, (score, pos) in held.items():
                kept[layer] = alloc.choose(layer, score, pos, Ask(50, 400)).sum(1).tolist()
            assert sum(sum(counts) for counts in kept.values()) == 3 * 2 * 50
        if alloc is pyramid:
            assert kept == {0: [95, 95], 2: [50, 50], 4: [5, 5]}
        else:
            assert kept == {0: [50, 50], 2: [150, 50], 4: [0, 0]}


def test_a_map_of_another_model_is_refused() -> None:
    alloc = HeadMap([[1.0, 1.0], [1.0, 1.0]], 0.2, "map.tsv")
    with pytest.raises(KvcliError, match=r"map.tsv is not of this model"):
        alloc.see(0, 3, None, drawn(2, 9)[1], Ask(2, 9))
    with pytest.raises(KvcliError, match=r"map.tsv is not of this model"):
        alloc.see(0, 2, None, drawn(3, 9)[1], Ask(2, 9))
