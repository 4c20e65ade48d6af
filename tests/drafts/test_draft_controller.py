"""Pacing against a pretend clock: it drafts where that pays, and costs next to nothing where it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from kvcli.drafts.pacing.draft_controller import DraftController, Mode
from kvcli.engine.drafting.pass_timer import Company, PassTimer
from kvcli.methods.drafts.ngram import Ngram

COSTS: dict[str, Callable[[int], float]] = {  # rows -> plain passes
    "cheap": lambda rows: 1 + 0.02 * (rows - 1),
    "cliff": lambda rows: 1.0 if rows == 1 else 1.1 if rows <= 8 else 2.5,
    "steep": lambda rows: 1 + 0.35 * (rows - 1),
    "awful": lambda rows: 1.0 if rows == 1 else 4.0,
}


def noise(seed: int) -> Callable[[int], float]:
    """A fifth up or down, and one pass in fifty stalls. A function of the pass alone, so no test disturbs another."""

    def slow(number: int) -> float:
        rng = Random(1000 * number + seed)
        return math.exp(rng.gauss(0, 0.2)) * (8 if rng.random() < 0.02 else 1)

    return slow


SLOW: dict[str, Callable[[int], float]] = {
    "steady": lambda number: 1.0,
    "noisy": noise(5),
    "slow start": lambda number: 10.0 if number < 5 else 1.0,
}


@pytest.mark.parametrize(("row", "chance", "rows"), [(1.0, 0.95, 0), (0.2, 0.95, 8), (0.2, 0.1, 0), (0.0, 0.1, 8)])
def test_among_others_a_draft_row_costs_what_it_delays_them_all(row: float, chance: float, rows: int):
    """Eight texts: a pass takes 8 s, and `row` seconds for each row beyond one of each."""
    timer, control = PassTimer(), DraftController()
    control.observe_beside(Company(8, timer), 0, 1, 1, 0.0)
    assert control.mode() is Mode.PLAIN  # of which all wait for the time
    for more in (0, 0, 8, 8):
        timer.add(more, 8 + more * row)
        control.observe_beside(Company(8, timer), 0, 1, 1, 0.0)
    assert control.mode() is Mode.DRAFT
    assert control.rows([chance] * 8, 8) == rows
    assert control.costs(9)[8] == pytest.approx(1 + 8 * row)
    control.observe(0, 1, 1.0)
    assert control.plain == 0.0  # alone nothing is known yet


def test_a_plain_time_that_drafts_undercut_is_measured_again():
    timer = PassTimer()
    for more, seconds in ((0, 8.0), (4, 3.0)):  # shorter texts have joined
        timer.add(more, seconds)
    assert not timer.plain


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("alphabet", [4, 20, 5000])
def test_text_without_copies_costs_two_percent_at_most(engine, random_ids, alphabet: int, cost: str, slow: str):
    """Small alphabets make chance matches, which is the hard case; noise like this hides two percent from anyone."""
    run = engine(Ngram().drafter(), random_ids(2900, alphabet, 3), 400, COSTS[cost], SLOW[slow]).run(2000)
    assert run.gain >= (0.97 if slow == "noisy" else 0.98)


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize(("cost", "gain"), [("cheap", 4.0), ("cliff", 3.5), ("steep", 1.4), ("awful", 1.5)])
def test_copied_text_is_faster_at_any_cost_of_rows(engine, copied_ids, cost: str, gain: float, slow: str):
    run = engine(Ngram().drafter(), copied_ids(3000, 1), 400, COSTS[cost], SLOW[slow]).finish()
    assert run.gain > gain


def test_copies_are_drafted_on_a_machine_whose_passes_never_agree(engine, copied_ids):
    def slow(number: int) -> float:
        return math.exp(Random(number).gauss(0, 0.8))  # one pass in ten takes three times as long, one in ten a third

    run = engine(Ngram().drafter(), copied_ids(3000, 1), 400, COSTS["cheap"], slow).finish()
    assert run.gain > 3
    short = engine(Ngram().drafter(), copied_ids(600, 1), 400, COSTS["cheap"], slow).finish()
    assert short.gain > 2


def test_cheap_rows_are_used_nearly_every_pass_and_in_full(engine, copied_ids):
    run = engine(Ngram().drafter(), copied_ids(4000, 1, slip=0.0), 400).finish()
    settled = slice(20, None)
    assert run.drafted(settled) > 0.9
    drafted = [s.n_drafted for s in run.steps[settled] if s.n_drafted]
    assert sum(drafted) / len(drafted) > 12
    assert run.drafter.report().paused_passes == 0


def test_dear_rows_are_used_sparingly(engine, copied_ids):
    text, mean = copied_ids(3000, 1), {}
    for name in ("cheap", "cliff", "steep"):
        steps = engine(Ngram().drafter(), text, 400, COSTS[name]).finish().steps
        mean[name] = sum(s.n_drafted for s in steps) / len(steps)
    assert mean["cheap"] > mean["cliff"] > mean["steep"]


def test_a_cliff_is_not_climbed(engine, copied_ids):
    steps = engine(Ngram().drafter(), copied_ids(4000, 1), 400, COSTS["cliff"]).finish().steps
    beyond = sum(s.n_drafted + 1 > 8 for s in steps)
    assert beyond < 0.05 * len(steps)


@pytest.mark.parametrize("slow", ["steady", "noisy"])
@pytest.mark.parametrize("alphabet", [4, 5000])
def test_drafting_resumes_within_64_passes_of_copies(engine, random_ids, copied_ids, alphabet: int, slow: str):
    text = random_ids(1400, alphabet, 3) + copied_ids(1200, 1)
    run = engine(Ngram().drafter(), text, 400, COSTS["steep"], SLOW[slow])
    while run.at < 1400 + 400:  # the source of the copies is read first
        run.step()
    before = len(run.steps)
    run.run(200)
    assert run.drafted(slice(before, before + 64)) > 0
    assert run.drafted(slice(before + 64, None)) > 0.25


def test_a_slow_start_does_not_spoil_the_baseline(engine, copied_ids):
    run = engine(Ngram().drafter(), copied_ids(2000, 1), 400, slow=SLOW["slow start"]).finish()
    assert run.drafter.report().plain_pass == pytest.approx(0.02)


def test_the_measured_gain_is_the_true_one(engine, copied_ids):
    run = engine(Ngram().drafter(), copied_ids(4000, 1), 400).finish()
    report = run.drafter.report()
    tail = run.steps[-64:]
    assert report.gain == pytest.approx(0.02 * sum(len(s.new) for s in tail) / sum(s.seconds for s in tail), rel=0.02)
    assert all(cost == pytest.approx(COSTS["cheap"](rows), rel=0.1) for rows, cost in report.row_cost.items())


def test_without_adapting_every_match_is_drafted(engine, copied_ids):
    run = engine(Ngram(adaptive=False).drafter(), copied_ids(2000, 1, slip=0.0), 400, COSTS["awful"]).finish()
    assert run.drafted(slice(0, None)) > 0.9


def passes(pace: DraftController, n: int, tokens: int, seconds: float) -> list[Mode]:
    """Let `n` passes go by that verify one draft wherever they may."""
    modes = []
    for _ in range(n):
        modes.append(pace.mode())
        drafts = modes[-1] is Mode.DRAFT
        pace.observe(int(drafts), tokens if drafts else 1, seconds if drafts else 0.01)
    return modes


def test_plain_passes_are_timed_at_first_and_now_and_then():
    modes = passes(DraftController(baseline_interval=64), 500, tokens=3, seconds=0.012)
    assert modes[:5] == [Mode.PLAIN] * 5
    assert 5 <= modes[5:].count(Mode.PLAIN) <= 9


def test_a_plain_time_that_was_doubted_long_ago_is_measured_anew():
    """Twice in 128 passes it is thrown away, where a plain pass takes three times as long; a third time is noise."""
    pace, known = DraftController(), []
    for seconds, n in ((0.01, 60), (0.03, 30), (0.01, 30), (0.03, 30), (0.03, 200), (0.1, 30)):
        for _ in range(n):
            drafts = pace.mode() is Mode.DRAFT
            pace.observe(int(drafts), 3 if drafts else 1, 1.1 * seconds if drafts else seconds)
        known.append(pace.plain)
    assert known[:3] == [0.01, 0.03, 0.01]
    assert known[3] < 0.03
    assert known[4:] == [0.03, 0.1]


def test_a_slow_window_pauses_and_pauses_grow():
    pace = DraftController()
    modes = passes(pace, 3000, tokens=1, seconds=0.015)
    starts = [i for i, mode in enumerate(modes) if mode is Mode.DRAFT and modes[i - 1] is not Mode.DRAFT]
    gaps = [b - a for a, b in pairwise(starts) if b - a > 64]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 8 * gaps[0]
    assert modes.count(Mode.DRAFT) < 0.1 * len(modes)


def test_what_drafts_cost_stays_known_while_lookahead_rows_go_along():
    pace, alone, chances = DraftController(), 0, [0.95**n for n in range(1, 16)]
    for _ in range(3000):
        guesses = 15 if pace.mode() is Mode.DRAFT else 0
        scouts = 16 if guesses and not pace.wants_alone(guesses) else 0
        alone += guesses > 0 and not scouts
        pace.observe(guesses, 4 if guesses else 1, 0.01 * (1 + 0.01 * (guesses + scouts)), scouts)
    assert pace.rows(chances, safe=4) == 15
    assert 2 < alone < 20


def test_cheap_rows_are_found_a_step_at_a_time():
    pace, sent, chances = DraftController(), [0], [0.95**n for n in range(1, 32)]
    pace.expect({16: 1.05, 32: 1.1})
    for _ in range(200):
        guesses = pace.rows(chances, safe=4) if pace.mode() is Mode.DRAFT else 0
        assert guesses <= 4 or guesses <= 2 * max(sent)
        sent.append(guesses)
        pace.observe(guesses, 1 + guesses // 2, 0.01 * (1 + 0.003 * guesses))
    assert max(sent) == 31


def test_passes_that_decided_nothing_count_in_full():
    pace, turn = DraftController(), 0
    for _ in range(60):
        if pace.mode() is not Mode.DRAFT:
            pace.observe(0, 1, 0.01)
        elif (turn := turn + 1) % 2:
            pace.observe(4, 0, 0.016)
        else:
            pace.observe(0, 1, 0.01)  # one token in the time of 2.6
    assert "0.38× plain speed" in pace.report().reason


def test_a_pause_says_why_and_for_how_long():
    pace = DraftController()
    passes(pace, 60, tokens=1, seconds=0.02)
    report = pace.report()
    assert report.paused
    assert "plain speed over 16 passes; next try in" in report.reason
    assert report.paused_passes > 0


def test_a_draft_on_paper_that_comes_true_ends_a_pause():
    pace = DraftController()
    passes(pace, 60, tokens=1, seconds=0.02)
    assert pace.report().paused
    pace.observe_dry_run(came_true=False)
    assert pace.report().paused
    pace.observe_dry_run(came_true=True)
    assert not pace.report().paused


def test_nothing_is_killed_at_zero():
    assert passes(DraftController(min_speedup=0.0), 300, tokens=1, seconds=0.04).count(Mode.DRAFT) > 200


def test_another_turn_keeps_what_rows_cost():
    pace = DraftController()
    passes(pace, 100, tokens=3, seconds=0.012)
    cost = pace.report().row_cost
    assert cost
    pace.restart()
    assert pace.mode() is Mode.PLAIN
    assert pace.report().row_cost == cost


def test_the_rows_that_pay_are_chosen():
    pace = DraftController()
    passes(pace, 20, tokens=2, seconds=0.015)  # a second row costs half a pass and always holds: 1.33 tokens a unit
    assert pace.rows([0.9], safe=9) == 1
    assert pace.rows([0.5], safe=9) == 0
    assert pace.rows([], safe=9) == 0


def test_a_clock_that_stands_still_breaks_nothing():
    pace = DraftController()
    for _ in range(200):
        pace.observe(pace.rows([0.5] * 200, safe=200) if pace.mode() is Mode.DRAFT else 0, 1, 0.0)
    assert not pace.report().paused
