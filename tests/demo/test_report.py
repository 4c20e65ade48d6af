"""The generator: the same for the same seed, and true to what it says."""

import subprocess
import sys
from random import Random

import pytest

from kvcli import demo
from kvcli.demo import report_path
from kvcli.demo.report import write_report
from tests.demo_model.example import example_report, example_text
from tests.demo_model.turns import rewrite, summary, swapped, turns


def test_same_seed_same_report():
    first, again, other = (write_report(Random(seed), 700, 0.5) for seed in (11, 11, 13))
    assert first == again
    assert first.text != other.text


@pytest.mark.parametrize("seed", range(5))
def test_everything_askable_stands_in_the_text(seed: int):
    report = write_report(Random(seed), 1_300, 0.6, near=0.4)
    assert report.facts
    assert len(report.findings) == report.n_sections
    for sentence in [f.sentence for f in report.facts + report.findings] + [n.paragraph for n in report.notes]:
        assert report.text.count(sentence) == 1, sentence


def test_a_question_has_one_answer():
    report = write_report(Random(3), 3_000, 0.9, near=0.5)
    keys = [(fact.attribute, fact.entity) for fact in report.facts]
    assert len(keys) == len(set(keys))


def test_findings_name_the_page_they_stand_on():
    report = write_report(Random(5), 2_000, 0.4)
    assert len(report.findings) > 2
    for finding in report.findings:
        before = report.text[: report.text.index(finding.sentence)]
        assert before.rpartition("\n[p. ")[2].partition("]")[0] == str(finding.page)


def test_summary_is_the_findings():
    report = write_report(Random(7), 1_500, 0.4)
    answer = summary(Random(7), report).answer
    assert answer.split("\n") == [f"- {finding.sentence}" for finding in report.findings]


def test_rewrite_swaps_every_mention():
    text = "The gate at Varholt failed. Mira Hansen left Varholt at noon."
    assert "".join(part for part, _ in swapped(text, "Varholt", "Brunmar")) == text.replace("Varholt", "Brunmar")
    report = next(r for seed in range(9) if (r := write_report(Random(seed), 900, 0.3)).notes)
    turn = rewrite(Random(1), report.notes[0])
    assert report.notes[0].place not in turn.answer


def test_turns_do_not_end_and_cover_all_skills():
    report = write_report(Random(2), 1_200, 0.5)
    stream = turns(Random(2), report)
    assert {next(stream).skill for _ in range(300)} == {
        "lookup",
        "summary",
        "finding",
        "rewrite",
        "repeat",
        "pasted",
        "hello",
    }


def test_names_are_drawn_from_the_lists():
    rng = Random(17)
    assert all(demo.place(rng).endswith(tuple(demo.PLACE_ENDINGS)) for _ in range(100))
    assert sorted(demo.shuffled(rng, range(31))) == list(range(31))


def test_example_is_the_generators():
    assert report_path().read_text(encoding="utf-8") == example_text()
    assert 15 <= example_report().text.count("\n[p. ") <= 25


def test_report_needs_no_torch():
    code = (
        "import sys, tests.demo_model.example, tests.demo_model.turns\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
