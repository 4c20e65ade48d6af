"""Lookahead rows run while they bring more than they cost, and rest otherwise."""

from __future__ import annotations

from kvcli.drafts.pacing.draft_controller import SourcePayoff


def sent(passes: int, brought: float, cost: float, speed: float = 1.0) -> SourcePayoff:
    """So many passes, lookahead rows bringing a token every 1 / `brought` passes."""
    credit, owed = SourcePayoff(wait=16), 0.0
    for _ in range(passes):
        if credit.due(cost, speed):
            owed += brought
            credit.observe(int(owed), cost, speed)
            owed -= int(owed)
    return credit


def test_lookahead_rows_that_pay_never_rest():
    assert sent(2000, brought=0.5, cost=0.2).rested_passes == 0


def test_lookahead_rows_that_do_not_pay_rest_longer_and_longer():
    credit = sent(3000, brought=0.1, cost=0.4)
    assert credit.rested_passes > 2800
    assert "tokens per pass and cost the time of 0.40" in credit.why


def test_once_they_paid_a_rest_is_short_again():
    credit, rests = SourcePayoff(wait=0), [0]
    for brought, passes in ((0, 400), (1, 600), (0, 300), (1, 600), (0, 100)):  # tokens a pass; each is half one longer
        for _ in range(passes):
            if credit.due(0.1, 1.0):
                credit.observe(brought, 0.5, 1.0)
                rests += [0] * bool(rests[-1])
            else:
                rests[-1] += 1
    assert rests[:-1] == [128, 256, 128, 256]
    assert 0 < rests[-1] < 128


def test_hopeless_lookahead_rows_are_stopped_at_once():
    credit = sent(143, brought=1.0, cost=2.0)
    assert credit.rested_passes == 127
    assert "cost the time of 2.00 tokens" in credit.why


def test_where_plain_passes_yield_more_a_pass_is_dearer():
    assert sent(400, brought=0.5, cost=0.3, speed=1.0).rested_passes == 0
    assert sent(400, brought=0.5, cost=0.3, speed=3.0).rested_passes > 300


def test_free_lookahead_rows_run_whatever_they_bring():
    assert sent(400, brought=0.0, cost=0.0).rested_passes == 0


def test_a_dear_moment_does_not_forbid_lookahead_rows_for_good():
    credit = SourcePayoff(wait=16)
    for _ in range(16 + 2 + 128):  # they wait, two passes take far too long, and they rest
        if credit.due(cost=0.1, speed=1.0):
            credit.observe(1, 5.0, 1.0)
    assert credit.rested_passes == 128
    for _ in range(300):
        if credit.due(cost=0.1, speed=1.0):
            credit.observe(1, 0.1, 1.0)
    assert credit.rested_passes == 128


def test_a_reason_is_given_while_they_rest_and_no_longer():
    credit = sent(16 + 3 + 20, brought=0.0, cost=0.5, speed=2.0)
    assert credit.why
    while not credit.due(0.1, 1.0):
        pass
    assert not credit.why
