"""Is a difference more than luck: paired bootstrap intervals, and McNemar's exact test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb, inf
from statistics import fmean

ROUNDS = 2000  # resamples
LEVEL = 0.95


def bootstrap(
    groups: Mapping[str, Sequence[float]],
    seed: int,
    *,
    least: float = -inf,
    most: float = inf,
    rounds: int = ROUNDS,
) -> tuple[float, float] | None:
    """The 95 % interval of the mean over groups of the mean in each; samples are drawn anew within their group.

    One number per context (not per question: questions about one text are not independent). The spread of a group of
    n is widened by sqrt(n / (n - 1)), which is what resampling falls short of in small groups. None if a group has a
    single number, which tells nothing of its spread. Ends are cut at `least` and `most`, which no mean can pass.
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
    """Each group counts alike, however many numbers it has."""
    return fmean(fmean(values) for values in groups.values())


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p of so many samples right on one side alone, were both sides equally good.

    Under that hypothesis each such sample is a fair coin (McNemar 1947, in its binomial form).
    """
    n, k = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0
