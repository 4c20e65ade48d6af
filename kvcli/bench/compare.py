"""Statistics of benchmark samples: spread, paired ratio, verdict, acceptance."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from kvcli.engine.stats import Stats
from kvcli.schemas.bench import Accept, Figures, Ratio, Samples, Verdict

if TYPE_CHECKING:
    from kvcli.bench.side import TimedSample


def samples_of(runs: Sequence[TimedSample]) -> Samples:
    return Samples(
        tok_s=[run.tok_s for run in runs],
        read_tok_s=[run.read_tok_s for run in runs],
        first_token=[run.first_token for run in runs],
    )


def figures(samples: Samples, of: Callable[[list[float]], float], least: int = 1) -> Figures:
    """Compute one statistic of each list of samples; None for a list with fewer than `least` values."""
    lists = (timed(samples.tok_s), samples.read_tok_s, samples.first_token)
    tok_s, read_tok_s, first_token = (of(values) if len(values) >= least else None for values in lists)
    return Figures(tok_s=tok_s, read_tok_s=read_tok_s, first_token=first_token)


def timed(speeds: Sequence[float]) -> list[float]:
    """Speeds without zeros, which mark repetitions that got all tokens in the first pass, so that none was timed."""
    return [speed for speed in speeds if speed > 0]


def all_figures(samples: Samples) -> dict[str, Figures]:
    """median, low, high, mean and sd of the samples."""
    return {
        "median": figures(samples, statistics.median),
        "low": figures(samples, min),
        "high": figures(samples, max),
        "mean": figures(samples, statistics.fmean),
        "sd": figures(samples, statistics.stdev, least=2),
    }


def paired(side: Sequence[float], base: Sequence[float]) -> Ratio | None:
    """Ratios of each repetition to the baseline's same repetition. A slowdown that affects both cancels out."""
    ratios = [a / b for a, b in zip(side, base, strict=False) if a > 0 and b > 0]
    if not ratios:
        return None
    low, high = min(ratios), max(ratios)
    return Ratio(
        samples=ratios, median=statistics.median(ratios), low=low, high=high, verdict=verdict(low, high, len(ratios))
    )


def unpaired(side: Sequence[float], base: Sequence[float]) -> Ratio | None:
    """Ratio to samples of another run. The range covers every sample over every other."""
    side, base = timed(side), timed(base)
    if not side or not base:
        return None
    low, high = min(side) / max(base), max(side) / min(base)
    median = statistics.median(side) / statistics.median(base)
    n = min(len(side), len(base))
    return Ratio(samples=[], median=median, low=low, high=high, verdict=verdict(low, high, n))


def verdict(low: float, high: float, n: int) -> Verdict:
    """Verdict on a range of ratios: ≈ if it contains 1. A single repetition has no range, so its verdict is ≈ too."""
    if n < 2 or low <= 1 <= high:
        return "≈"
    return "faster" if low > 1 else "slower"


def acceptance(runs: Sequence[TimedSample], method: str) -> Accept | None:
    """Drafting statistics over all repetitions together; None for a side that does not draft."""
    known = [run.stats for run in runs if run.stats is not None]
    if not known:
        return None
    counts = ("new", "passes", "drafted_passes", "draft_tokens", "accepted_tokens")
    total = Stats(**{name: sum(getattr(stats, name) for stats in known) for name in counts})
    total.histogram = [sum(column) for column in zip_longest(*(stats.histogram for stats in known), fillvalue=0)]
    return Accept.from_attributes(total, method=method)
