"""Stats: the identities that every report of acceptance must obey."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcli.engine.forward_request import Draft, LookaheadRows, Rows
from kvcli.engine.stats import FEW, Stats, Step


def step(drafted: int, accepted: int, seconds: float = 0.1) -> Step:
    rows = Rows.build(1, 5, Draft.chain([2] * drafted))
    return Step(rows, None, list(range(accepted + 1)), [3] * (accepted + 1), seconds)  # type: ignore[arg-type]


passes = st.integers(0, 8).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d)))


@given(st.lists(passes, max_size=30))
def test_identities_hold(history: list[tuple[int, int]]) -> None:
    stats = Stats()
    for drafted, accepted in history:
        stats.add_step(step(drafted, accepted))
    assert stats.accepted_tokens == sum(i * n for i, n in enumerate(stats.histogram))
    assert stats.drafted_passes == sum(stats.histogram)
    assert stats.new == stats.passes + stats.accepted_tokens
    assert stats.tokens_per_pass * stats.passes == pytest.approx(stats.new)
    if stats.drafted_passes:
        assert stats.mean_acceptance_length == pytest.approx(1 + stats.accepted_tokens / stats.drafted_passes)
        assert sum(stats.per_position) == pytest.approx(stats.mean_acceptance_length - 1)
        assert stats.per_position == sorted(stats.per_position, reverse=True)


def test_a_pass_with_lookahead_rows_is_not_taken_for_a_plain_one() -> None:
    scouts = LookaheadRows([4, 5], [1, 2], torch.eye(2, dtype=torch.bool), [1])
    stats = Stats()
    stats.add_step(Step(Rows.build(1, 5, Draft([], [], scouts)), None, [0], [3], 0.1))  # type: ignore[arg-type]
    assert (stats.plain, stats.lookahead_rows) == ([], 2)


def test_gain_over_plain_needs_passes_of_both_kinds() -> None:
    stats = Stats()
    stats.add_step(step(0, 0, 0.1))
    assert stats.vs_plain is None
    stats.add_step(step(3, 3, 0.1))
    assert stats.vs_plain is None  # of 5 tokens nothing is known yet
    for _ in range(FEW):
        stats.add_step(step(0, 0, 0.1))
    assert stats.vs_plain == pytest.approx((5 + FEW) / (2 + FEW))
