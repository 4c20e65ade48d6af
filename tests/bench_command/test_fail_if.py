"""Conditions of --fail-if: what they read, what they refuse, and which rows they look at."""

from __future__ import annotations

import pytest

from kvcli.bench.fail_if import Condition, words
from kvcli.errors import UsageError
from tests.bench_command.sides import Paced, document

SIDES = (("exact", 20.0), ("slowed", 10.0), ("fast", 30.0))


def failed(*conditions: str) -> list[tuple[str, str]]:
    sides = [Paced(name, [speed], text=[8, *range(9 + i, 50)]) for i, (name, speed) in enumerate(SIDES)]
    found = document(sides, fail_if=list(conditions))
    return [(check.profile, check.expression) for check in found.checks if check.failed]


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("tok_s<-10%", ["slowed"]),
        ("tok_s<-60%", []),
        ("tok_s<+60%", ["slowed", "fast"]),
        ("tok_s < 15", ["slowed"]),
        ("tok_s<25/s", ["exact", "slowed"]),
        ("first_token>499ms", ["exact", "slowed", "fast"]),
        ("first_token>0.6s", []),
        ("same<100%", ["slowed", "fast"]),
        ("same<0.05", []),
        ("kv>=1000", ["exact", "slowed", "fast"]),
        ("kv>1KiB", []),
        ("peak>1MiB", ["exact", "slowed", "fast"]),  # it was not measured, and what is not known is not fine
        ("accept<9", []),  # none of them drafts
    ],
)
def test_conditions(condition: str, rows: list[str]):
    assert failed(condition) == [(row, condition) for row in rows]


@pytest.mark.parametrize(
    "text", ["", "tok_s", "tok_s=3", "tok_s<", "tok_s<10%", "same<-1", "peak>3s", "tok_s<-10", "tok_s<10 and same<1"]
)
def test_what_cannot_be_meant_is_refused(text: str):
    with pytest.raises(UsageError):
        Condition.of(text)


def test_an_unknown_figure_is_told_the_nearest():
    with pytest.raises(UsageError) as caught:
        Condition.of("toks<20")
    assert caught.value.try_ == ("--fail-if 'tok_s<20'",)


def test_a_change_without_its_percent_sign_is_said_to_lack_it():
    with pytest.raises(UsageError, match="in per cent, as in -10%"):
        Condition.of("tok_s<-10")


def test_a_row_that_the_earlier_result_lacks_does_not_pass_unseen():
    earlier = document([Paced("exact", [20])])
    found = document(
        [Paced("exact", [20]), Paced("ngram", [30])], earlier=earlier, earlier_name="old.json", fail_if=["tok_s<-10%"]
    )
    assert [(check.profile, check.value) for check in found.checks if check.failed] == [("ngram", None)]
    assert "no result to compare with" in words(next(check for check in found.checks if check.failed))
    assert "ngram, summary 64: old.json has no such result" in found.notes


def test_an_earlier_result_from_elsewhere_is_said_to_be_one():
    earlier = document([Paced("exact", [20])], reps=5)
    assert document([Paced("exact", [20])], reps=5, earlier=earlier, earlier_name="old.json").notes == []
    env = earlier.env.model_copy(update={"cpu": "Another CPU"})
    rows = [earlier.rows[0].model_copy(update={"prompt_hash": "0"})]
    earlier = earlier.model_copy(update={"env": env, "rows": rows})
    notes = document([Paced("exact", [20])], reps=5, earlier=earlier, earlier_name="old.json").notes
    assert "old.json was measured with processor Another CPU" in notes[0]
    assert notes[1].endswith("old.json was measured with another prompt")


def test_against_an_earlier_result_every_row_meets_its_own():
    earlier = document([Paced("exact", [20]), Paced("ngram", [40])])
    found = document(
        [Paced("exact", [20]), Paced("ngram", [30])], earlier=earlier, earlier_name="old.json", fail_if=["tok_s<-10%"]
    )
    assert [check.profile for check in found.checks if check.failed] == ["ngram"]
    assert found.baseline == "old.json"
    ratios = [row.ratio.tok_s for row in found.rows]
    assert [ratio.median for ratio in ratios if ratio] == pytest.approx([1.0, 0.75])
    assert [row.same.share for row in found.rows if row.same] == [1, 1]
