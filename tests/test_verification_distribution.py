"""The law of what verification emits, enumerated on a toy vocabulary: no Monte Carlo, no tolerance for error.

The engine samples first and matches afterwards, whatever was drafted. Four rules that look alike and are wrong must be
found out by the same measure, or the measure is worth nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvcli.engine.forward_request import Draft, Rows
from kvcli.engine.sequence.commit import accepted_path
from kvcli.engine.sequence.sampler import Sampler

V, LENGTH = 4, 3
Law = dict[tuple[int, ...], float]


def distributions(seed: int) -> np.ndarray:
    """[V, V]: row = the token before, as a model with a memory of one token."""
    rng = np.random.default_rng(seed)
    p = rng.gamma(0.6, size=(V, V)) + 1e-3
    return p / p.sum(1, keepdims=True)


def target_law(p: np.ndarray, pending: int) -> Law:
    """Of the next LENGTH tokens."""
    return {text: chance(p, pending, text) for text in itertools.product(range(V), repeat=LENGTH)}


def chance(p: np.ndarray, before: int, text: Sequence[int]) -> float:
    found = 1.0
    for token in text:
        found *= p[before, token]
        before = token
    return found


def completed(outcomes: Iterator[tuple[tuple[int, ...], float]], p: np.ndarray, pending: int) -> Law:
    """What a pass emitted, continued by the model itself to LENGTH tokens."""
    law: Law = Counter()
    for text, weight in outcomes:
        if len(text) >= LENGTH:
            law[text[:LENGTH]] += weight
            continue
        for rest in itertools.product(range(V), repeat=LENGTH - len(text)):
            law[text + rest] += weight * chance(p, text[-1] if text else pending, rest)
    return law


def variation(a: Law, b: Law) -> float:
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in {*a, *b})


# ---- the engine's rule ----


def engine_law(p: np.ndarray, pending: int, draft: Draft) -> Law:
    """Each row is drawn from its distribution, all draws in turn."""
    rows = Rows.build(pending, 7, draft)

    def outcomes() -> Iterator[tuple[tuple[int, ...], float]]:
        for drawn in itertools.product(range(V), repeat=rows.tree):
            weight = float(np.prod([p[i, t] for i, t in zip(rows.ids, drawn, strict=True)]))
            _, new = accepted_path(rows, drawn.__getitem__)
            yield tuple(new), weight

    return completed(outcomes(), p, pending)


DRAFTS = {
    "none": Draft([], []),
    "chain": Draft.chain([1, 2]),
    "likely": Draft.chain([0, 0, 0]),
    "fork": Draft([1, 2, 3, 0], [-1, -1, 0, 1]),
    "bush": Draft([0, 1, 2, 3, 1], [-1, -1, -1, -1, 0]),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("seed", range(5))
def test_any_draft_leaves_the_distribution_alone(draft: str, seed: int) -> None:
    p = distributions(seed)
    for pending in range(V):
        assert variation(engine_law(p, pending, DRAFTS[draft]), target_law(p, pending)) < 1e-12


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.8}])
def test_the_warp_is_the_distribution_it_stands_for(settings: dict[str, Any]) -> None:
    """Filters in transformers' order, by hand."""
    temperature = 0.8
    for seed in range(5):
        logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ids, logp = Sampler(temperature=temperature, **settings).warp(logits)
        got = np.zeros(6)
        got[ids[0].numpy()] = logp[0].exp().numpy()
        want = np.exp(logits[0].numpy() / temperature)
        if k := settings.get("top_k"):
            want[want < np.sort(want)[-k]] = 0
        want /= want.sum()
        if top_p := settings.get("top_p"):
            order = np.argsort(-want)
            ahead = np.cumsum(want[order]) - want[order]
            want[order[ahead >= top_p]] = 0
        if min_p := settings.get("min_p"):
            want[want < min_p * want.max()] = 0
        assert 0.5 * np.abs(got - want / want.sum()).sum() < 1e-12


# ---- rules that are wrong ----

Rule = Callable[[np.ndarray, np.ndarray, int], Iterator[tuple[tuple[int, ...], float]]]


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    left = np.clip(p - q, 0, None)
    return left / left.sum() if left.sum() > 1e-15 else p


def rejection(p: np.ndarray, q: np.ndarray, drawn: np.ndarray, token: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Leviathan et al.: `token` was drawn from `drawn`, is judged by `q`."""
    weight = drawn[token]
    keep = min(1.0, p[token] / q[token]) if q[token] else 1.0
    yield (token,), weight * keep
    for other, share in enumerate(residual(p, q)):
        yield (other,), weight * (1 - keep) * share


def leviathan(p: np.ndarray, q: np.ndarray, pending: int) -> Iterator[tuple[tuple[int, ...], float]]:
    for token in range(V):
        yield from rejection(p[pending], q[pending], q[pending], token)


def drops_the_unlikely(p: np.ndarray, q: np.ndarray, pending: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """A drawn draft is not submitted because its own probability was low."""
    for token in range(V):
        if q[pending, token] < 0.3:
            yield (), q[pending, token]
        else:
            yield from rejection(p[pending], q[pending], q[pending], token)


def judges_the_best_as_drawn(p: np.ndarray, q: np.ndarray, pending: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """The likeliest draft is submitted, and judged as if it had been drawn."""
    best = int(q[pending].argmax())
    yield from rejection(p[pending], q[pending], np.eye(V)[best], best)


def forgets_to_renormalise(p: np.ndarray, q: np.ndarray, pending: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Two drafts without replacement, the second judged by the first one's distribution."""
    yield from two_guesses(p[pending], q[pending], renormalise=False)


def two_guesses(p: np.ndarray, q: np.ndarray, *, renormalise: bool) -> Iterator[tuple[tuple[int, ...], float]]:
    """SpecInfer's rule for siblings drawn without replacement."""
    for first in range(V):
        keep = min(1.0, p[first] / q[first])
        yield (first,), q[first] * keep
        left, without = residual(p, q), np.where(np.arange(V) == first, 0, q)
        without = without / without.sum()
        judged = without if renormalise else q
        for second in (t for t in range(V) if t != first):
            weight = q[first] * (1 - keep) * without[second]
            again = min(1.0, left[second] / judged[second])
            yield (second,), weight * again
            for other, share in enumerate(residual(left, judged)):
                yield (other,), weight * (1 - again) * share


def records_before_top_p(p: np.ndarray, q: np.ndarray, pending: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Drafts are drawn from the filtered distribution and judged by the unfiltered one."""
    filtered = np.where(q[pending] >= np.sort(q[pending])[-2], q[pending], 0)
    for token in range(V):
        yield from rejection(p[pending], q[pending], filtered / filtered.sum(), token)


def law_of(rule: Rule, p: np.ndarray, q: np.ndarray, pending: int) -> float:
    return variation(completed(rule(p, q, pending), p, pending), target_law(p, pending))


def test_the_measure_knows_a_right_rule() -> None:
    for seed in range(5):
        p, q = distributions(seed), distributions(seed + 100)
        for pending in range(V):
            assert law_of(leviathan, p, q, pending) < 1e-12
            assert law_of(lambda p, q, b: two_guesses(p[b], q[b], renormalise=True), p, q, pending) < 1e-12


@pytest.mark.parametrize(
    "rule", [drops_the_unlikely, judges_the_best_as_drawn, forgets_to_renormalise, records_before_top_p]
)
def test_the_measure_finds_out_a_wrong_rule(rule: Rule) -> None:
    worst = max(law_of(rule, distributions(s), distributions(s + 100), b) for s in range(5) for b in range(V))
    assert worst > 0.05
