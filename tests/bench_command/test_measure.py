"""Which side runs when, what becomes of one that fails, and what the samples amount to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvcli.bench.compare import acceptance, paired, verdict
from kvcli.bench.measure import Case, RunSchedule, Series, measure
from kvcli.bench.profile_side import plain
from kvcli.bench.side import TimedSample
from kvcli.commands.bench.command import measure as measure_command
from kvcli.engine.stats import Stats
from kvcli.errors import ExitStatus
from kvcli.settings.config import builtin_files
from kvcli.settings.profile import Profile
from tests.bench_command.sides import Paced, document, measured


@pytest.mark.parametrize("name", [file.profile for file in builtin_files()])
def test_every_shipped_profile_can_be_held_against_plain_decoding(name):
    found = plain(Profile.load(name))
    assert (found.exactness, found.policy.method, found.sparse.method, found.spec.method) == (
        "exact",
        *["none"] * 2,
        "off",
    )
    assert found.load == Profile.load(name).load


def test_repetitions_take_turns_and_begin_with_another_side_each_time():
    log: list[str] = []
    sides = [Paced(name, [10], log=log) for name in "abc"]
    measured(sides, reps=3, warmup=1)
    rounds = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert [sorted(r) for r in rounds] == [["a", "b", "c"]] * 4
    assert [r[0] for r in rounds] == ["a", "a", "b", "c"]  # the warm-up, then the repetitions that count


def test_without_interleaving_sides_run_one_after_the_other():
    order = [side for _, side in RunSchedule(2, 1, interleave=False).order(2)]
    assert order == [0, 0, 0, 1, 1, 1]


def test_warm_ups_do_not_count():
    found = document([Paced("a", [1, 10, 10, 10])], reps=3, warmup=1)  # the first run is ten times slower
    assert found.rows[0].samples.tok_s == pytest.approx([10, 10, 10])


def test_a_side_twice_as_slow_is_called_slower():
    found = document([Paced("exact", [20, 21, 20, 22]), Paced("slowed", [10, 10.5, 10, 11])])
    ratio = found.rows[1].ratio.tok_s
    assert ratio is not None
    assert ratio.verdict == "slower"
    assert ratio.median == pytest.approx(0.5)
    assert found.rows[0].ratio.tok_s is None


def test_ratios_are_paired_so_that_a_machine_that_slows_down_slows_both():
    drift = [40, 40, 20, 10, 5]
    found = document([Paced("exact", drift), Paced("fast", [2 * s for s in drift])], reps=4)
    ratio = found.rows[1].ratio.tok_s
    assert ratio is not None
    assert (ratio.low, ratio.high) == (pytest.approx(2), pytest.approx(2))
    row = found.rows[1]
    assert row.high.tok_s is not None
    assert row.high.tok_s > 4 * (row.low.tok_s or 0)  # though the speeds themselves are far apart


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.1, 1.3, "faster"),
        (0.7, 0.9, "slower"),
        (0.9, 1.2, "≈"),
        (1.0, 1.2, "≈"),
        (0.8, 1.0, "≈"),
        (1.3, 1.3, "faster"),
    ],
)
def test_a_range_that_holds_one_has_no_verdict(low: float, high: float, said: str):
    assert verdict(low, high, 3) == said
    assert verdict(low, high, 1) == "≈"  # one repetition has no range


def test_pairs_end_with_the_shorter_side():
    ratio = paired([2.0, 4.0], [1.0, 1.0, 1.0])
    assert ratio is not None
    assert ratio.samples == [2.0, 4.0]
    assert paired([1.0], [0.0]) is None


def test_a_side_that_fails_says_why_and_the_others_go_on():
    broken = Paced("broken", [10], fails=2)
    found = document([Paced("exact", [10]), broken, Paced("third", [12])], reps=4)
    row = {row.profile: row for row in found.rows}
    assert row["broken"].error == "it broke; as told"
    assert len(row["broken"].samples.tok_s) == 1  # one warm-up, one that counts, then the failure
    assert broken.runs == 3  # it is not tried again
    assert len(row["third"].samples.tok_s) == 4
    assert any("it broke" in note for note in found.notes)


@pytest.mark.parametrize("error", [ValueError("zip() is shorter\nmore"), MemoryError(), OSError("gone")])
def test_no_failure_of_one_side_costs_the_others_figures(error: Exception):
    class Failing(Paced):
        def run(self, prompt: Sequence[int], new: int) -> TimedSample:
            raise error

    exact, failing = document([Paced("exact", [10]), Failing("hf", [10])]).rows
    assert (len(exact.samples.tok_s), failing.samples.tok_s) == (3, [])
    assert failing.error == f"{type(error).__name__}: {error}".split("\n")[0].removesuffix(": ")


def test_a_quality_suite_that_fails_does_not_cost_the_speeds():
    def suite(model: Any, profiles: Any) -> Any:
        raise OSError(28, "No space left on device")

    bench = measured([Paced("exact", [10])])
    bench.ask_questions(suite, SimpleNamespace(profile=Profile.load("exact")))  # type: ignore[arg-type]
    assert bench.quality is None
    assert bench.notes == ["no quality suite: OSError: [Errno 28] No space left on device"]


def test_ctrl_c_keeps_what_was_measured():
    series: list[Series] = []
    sides = [Paced("exact", [10]), Paced("ngram", [20], interrupted=5)]
    case = Case(64, "summary", tuple(range(53)), 11)
    with pytest.raises(KeyboardInterrupt):
        measure(sides, [case], RunSchedule(9, 1), series, lambda *_: None)
    assert [len(s.samples) for s in series] == [5, 4]  # exact began the repetition that was not finished


def test_ctrl_c_ends_what_the_sides_hold(monkeypatch: pytest.MonkeyPatch):
    bench, closed = measured([Paced("exact", [10])]), list[str]()
    bench.models = SimpleNamespace(close=lambda: closed.append("models"))  # type: ignore[assignment]
    side = Paced("kvpress", [10])
    monkeypatch.setattr(side, "close", lambda: closed.append("side"))
    bench.sides["kvpress"] = side

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", interrupted)
    assert measure_command(bench) == ExitStatus.INTERRUPTED
    assert closed == ["side", "models"]


def test_a_side_that_writes_too_little_is_an_error():
    found = document([Paced("exact", [10]), Paced("short", [10], text=range(8, 13))])
    assert found.rows[1].error == "wrote 5 of 11 tokens"
    assert found.rows[1].median.tok_s is None


def test_same_counts_up_to_the_first_difference():
    other = [*range(8, 14), 7, *range(15, 40)]  # one token differs, all after it are equal again
    found = document([Paced("exact", [10]), Paced("other", [10], text=other)])
    same = found.rows[1].same
    assert same is not None
    assert (same.tokens, same.of, same.first_difference) == (6, 11, 6)
    assert same.share == pytest.approx(6 / 11)
    assert same.near_tie is None  # nobody was asked


def test_identities_of_acceptance_over_all_repetitions():
    found = document([Paced("exact", [10]), Paced("ngram", [20], drafts=True)], reps=3, new=30, ctx=[64])
    accept = found.rows[1].accept
    assert accept is not None
    assert accept.new == 90
    assert accept.accepted_tokens == sum(i * n for i, n in enumerate(accept.histogram))
    assert accept.drafted_passes == sum(accept.histogram)
    assert accept.mean_acceptance_length == pytest.approx(1 + accept.accepted_tokens / accept.drafted_passes)
    assert accept.tokens_per_pass * accept.passes == pytest.approx(accept.new)
    assert found.rows[0].accept is None


def test_histograms_of_different_lengths_add_up():
    short, long = Stats(passes=2, histogram=[1, 1]), Stats(passes=3, histogram=[0, 1, 0, 2])
    accept = acceptance([TimedSample((1,), (1.0,), 1, None, stats) for stats in (short, long)], "ngram")
    assert accept is not None
    assert accept.histogram == [1, 2, 0, 2]


def test_an_answer_that_ends_early_is_said():
    found = document([Paced("exact", [10], text=[8, 9, 39, *range(8, 37)])])  # 39 is the stop token
    assert found.rows[0].ends == 2
    assert any("ends after 2 of 11" in note for note in found.notes)


class AllAtOnce(Paced):
    """Its drafts are right at once: every token comes with the first."""

    def run(self, prompt: Sequence[int], new: int) -> TimedSample:
        sample = super().run(prompt, new)
        return replace(sample, at=(sample.at[0],) * new)


def test_what_came_with_the_first_token_has_no_speed():
    found = document([Paced("exact", [20, 21, 22]), AllAtOnce("ngram", [20])], new=3, reps=2)
    ngram = found.rows[1]
    assert ngram.samples.tok_s == [0, 0]
    assert (ngram.median.tok_s, ngram.ratio.tok_s) == (None, None)
    assert ngram.median.read_tok_s is not None


@pytest.mark.parametrize(("reps", "said"), [(2, "1 of 2 equal"), (3, "1 of 4 equal"), (5, None)])
def test_few_repetitions_are_said_to_be_few(reps: int, said: str | None):
    notes = document([Paced("exact", [20]), Paced("same", [20])], reps=reps).notes
    assert [said in note for note in notes] == [True] if said else notes == []
