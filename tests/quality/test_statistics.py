"""Intervals and tests against numbers worked out by hand."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import numpy as np
import pytest

from kvcli.quality.statistics import bootstrap, mcnemar, mean_of_means


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 * 1/2
        (5, 0, 0.0625),  # 2 / 2**5
        (6, 0, 0.03125),
        (8, 2, 0.109375),  # 2 * (1 + 10 + 45) / 1024
        (3, 3, 1.0),  # 2 * 42/64, cut at 1
    ],
)
def test_mcnemar_counts_coins(a: int, b: int, p: float) -> None:
    assert mcnemar(a, b) == mcnemar(b, a) == p


def test_groups_count_alike() -> None:
    assert mean_of_means({"a": [1.0, 0.0], "b": [1.0] * 8}) == 0.75


def test_an_interval_is_that_of_all_resamples() -> None:
    """Three numbers have 27 resamples; the widening for small groups is sqrt(3 / 2)."""
    values = [0.0, -0.25, -1.0]
    means = [fmean(c) for c in product(values, repeat=3)]
    wide = [fmean(values) + (m - fmean(values)) * 1.5**0.5 for m in means]
    low, high = bootstrap({"only": values}, seed=1, rounds=40_000) or (0, 0)
    assert (low, high) == pytest.approx(tuple(np.quantile(wide, [0.025, 0.975], method="inverted_cdf")))


def test_the_spread_is_that_of_the_mean() -> None:
    values = list(np.random.default_rng(1).normal(size=400))
    low, high = bootstrap({"only": values}, seed=1) or (0, 0)
    expected = 1.96 * float(np.std(values, ddof=1)) / 20
    assert (high - low) / 2 == pytest.approx(expected, rel=0.1)


def test_groups_are_resampled_apart() -> None:
    """A group that is the same throughout adds nothing to the interval, however far it is from the others."""
    assert bootstrap({"a": [-1.0, -1.0], "b": [0.0, 0.0]}, seed=1) == (-0.5, -0.5)
    low, high = bootstrap({"a": [-1.0] * 9, "b": [0.0, 0.2] * 30}, seed=1) or (0, 0)
    assert -0.47 < low < -0.45 < high < -0.43


def test_no_interval_passes_what_is_possible() -> None:
    groups = {"a": [-1.0, -1.0, 0.0]}
    low, high = bootstrap(groups, seed=1) or (0, 0)
    assert low < -1
    assert bootstrap(groups, seed=1, least=-1, most=high) == (-1, high)


def test_a_seed_gives_one_interval_and_a_single_number_none() -> None:
    groups = {"a": [0.1, 0.7, 0.2, 0.35, 0.91], "b": [0.0, 1.0, 0.3]}
    assert bootstrap(groups, seed=3) == bootstrap(dict(reversed(groups.items())), seed=3)
    assert bootstrap(groups, seed=3) != bootstrap(groups, seed=4)
    assert bootstrap({"a": [0.1, 0.7], "b": [1.0]}, seed=3) is None
    assert bootstrap({}, seed=3) is None
