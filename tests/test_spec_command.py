"""`kvcli spec`: what drafting brings on the demo model, and a profile of the best settings. No speed is asserted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter

from kvcli.bench.drafting import candidates, laid_over
from kvcli.commands.spec.tuned_profile import profile_text
from kvcli.schemas.documents import DOCUMENTS
from kvcli.settings.profile import Profile, load_profile
from tests.fakes import Machine

SHORT = ("--ctx", "256", "-n", "16", "-r", "1")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def document(done, name):
    (line,) = done.out.splitlines()
    TypeAdapter(DOCUMENTS[name]).validate_json(line, strict=True)
    return json.loads(line)


def test_doctor_in_json(machine):
    found = document(machine("spec", "doctor", "demo", "-P", "fafo", *SHORT, "--json"), "spec")
    assert (found["model"], found["profile"], found["method"], found["new"]) == ("demo", "fafo", "mix", 16)
    assert set(found["sources"]) == {"prompt-lookup", "lookahead", "stand", "token-recycling"}
    assert 1 <= found["tokens_per_pass"] <= 16
    assert found["ratio"]["low"] <= found["ratio"]["median"] <= found["ratio"]["high"]
    assert sum(found["accepted_by"].values()) > 0
    assert found["lookahead"]["rows"] == 7


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_doctor_fits_the_terminal(machine, columns):
    machine.environ["COLUMNS"] = columns
    done = machine("spec", "doctor", "demo", *SHORT)
    assert (done.exit, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) < int(columns)
    assert "plain decoding" in " ".join(done.out.split())


def test_tune_writes_a_profile_that_can_be_used(machine, tmp_path):
    file = tmp_path / "mine.toml"
    done = machine("spec", "tune", "demo", "-w", "copy", *SHORT, "-o", str(file), "--json")
    found = document(done, "spec_tune")
    assert found["file"] == str(file)
    assert found["tried"][0]["name"] == found["best"]
    assert {"off", "ngram, 7 rows", "with lookahead, window 4"} <= {one["name"] for one in found["tried"]}
    ratios = [one["ratio"]["median"] for one in found["tried"]]
    assert ratios == sorted(ratios, reverse=True)
    assert len({one["tokens_per_pass"] for one in found["tried"]}) > 1
    checked = machine("profiles", "check", str(file))
    assert (checked.exit, checked.err) == (0, "")


def test_tune_keeps_what_the_command_line_set(machine, tmp_path):
    file = tmp_path / "mine.toml"
    sets = ("--set", "spec.branches=5", "--set", "context.reserve=7", "-P", "ngram")
    assert machine("spec", "tune", "demo", "-w", "copy", *SHORT, *sets, "-o", str(file)).exit == 0
    text = file.read_text()
    assert "reserve = 7" in text
    assert ("branches = 5" in text) is ('method = "ngram"' in text)


def test_what_is_tried_need_not_read_all_that_was_set(machine, tmp_path):
    file, base = tmp_path / "tuned.toml", load_profile("fafo", sets=["spec.window=5", "spec.branches=2"])
    assert base.spec.method == "mix"
    found = SimpleNamespace(model="demo", workloads=["copy"], context=256, profile="fafo")
    for name, spec in candidates(base).items():
        tried = base.replace(spec=laid_over(base, spec))
        assert {key: getattr(tried.spec, key) for key in spec} == spec | (
            {"sources": tuple(spec["sources"])} if "sources" in spec else {}
        )
        assert tried.spec.method != "mix" or tried.spec.branches == 2
        found.tried = [SimpleNamespace(name=name, spec=spec, score=1.0)]
        file.write_text(profile_text(base, found))
        checked = machine("profiles", "check", str(file))
        assert (checked.exit, checked.err) == (0, "")


def test_tune_saves_under_a_name(machine):
    assert machine("spec", "tune", "demo", "-w", "copy", *SHORT, "--save", "mine").exit == 0
    shown = machine("profiles", "show", "mine")
    assert shown.exit == 0
    again = machine("spec", "tune", "demo", *SHORT, "--save", "mine")
    assert again.exit == 3
    assert "already" in again.err


def test_tune_to_stdout_is_the_profile_alone(machine):
    done = machine("spec", "tune", "demo", "-w", "copy", *SHORT, "-o", "-")
    assert done.out.startswith("# Written by kvcli spec tune")
    assert "[spec]" in done.out


@pytest.mark.parametrize(
    ("args", "exit_", "words"),
    [
        (("doctor", "demo", "-P", "exact", *SHORT), 2, "does not draft"),
        (("doctor", "demo", "-w", "nonsense", *SHORT), 2, "no workload"),
        (("doctor", "demo", "--ctx", "99k"), 6, "exceed the context window"),
        (("doctor", "demo", "--ctx", "64", "-n", "60"), 2, "leaves no tokens"),
        (("doctor", "demo", "--ctx", "256", "-n", "1"), 2, "at least 2"),
        (("doctor", "demo", "--ctx", "256", "-n", "16", "-r", "0"), 2, "at least 1"),
        (("tune", "demo", *SHORT, "-o", "/dev/null/x.toml"), 3, "not a writable folder"),
        (("tune", "demo", *SHORT, "--save", "no good"), 2, "not a profile name"),
        (("tune", "no/such/folder", *SHORT), 4, "no/such/folder"),
    ],
)
def test_what_cannot_be_is_refused_in_words(machine, args, exit_, words):
    done = machine("spec", *args)
    assert done.exit == exit_
    assert words in done.err
    assert "Traceback" not in done.err


def test_a_profile_that_was_tuned_extends_the_one_it_was_tuned_under(machine, tmp_path):
    file = tmp_path / "t.toml"
    machine("spec", "tune", "demo", "-P", "ngram", "-w", "copy", *SHORT, "-o", str(file))
    assert 'extends = "ngram"' in file.read_text()
    assert Profile.load("ngram").exactness == "exact"


def test_a_profile_and_json_do_not_share_stdout(machine):
    done = machine("spec", "tune", "demo", *SHORT, "-o", "-", "--json")
    assert done.exit == 2
    assert "both go to stdout" in json.loads(done.out)["message"]
