"""Significance of differences: paired bootstrap intervals, and McNemar's exact test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb, inf
from statistics import fmean

ROUNDS = 2000  # resamples
LEVEL = 0.95


def bootstrap(
    groups: Mapping[str, Sequence[float]], seed: int, *, least: float = -inf, most: float = inf, rounds: int = ROUNDS
) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean over groups of group means; samples are redrawn within their group.

    Samples are contexts, not questions, because questions about one text are not independent. The spread of a group of
    n is widened by sqrt(n / (n - 1)), because resampling underestimates it in small groups. None if a group has a
    single number, because its spread is unknown. The ends are clipped to `least` and `most`, the bounds of a mean.
    """
    import numpy as np

    if not groups or min(len(values) for values in groups.values()) < 2:
        return None
    dice = np.random.default_rng(seed)
    total = np.zeros(rounds)
    for _, values in sorted(groups.items()):
        array, n = np.asarray(values, dtype=float), len(values)
        drawn = array[dice.integers(0, n, size=(rounds, n))].mean(axis=1)
        total += array.mean() + (drawn - array.mean()) * (n / (n - 1)) ** 0.5
    low, high = np.quantile(total / len(groups), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return max(least, float(low)), min(most, float(high))


def mean_of_means(groups: Mapping[str, Sequence[float]]) -> float:
    """Return the mean of group means: each group has the same weight, regardless of its size."""
    return fmean(fmean(values) for values in groups.values())


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value for the counts of samples right on one side only, if both are equally good.

    Under that hypothesis each such sample is a fair coin toss (McNemar 1947, in its binomial form).
    """
    n, k = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0
