"""The log of what runs used."""

from __future__ import annotations

import json

import pytest

from kvcli.fit import runs
from kvcli.fit.before import Outlook
from kvcli.fit.plan import subject_of
from kvcli.fit.room import Room
from kvcli.local import load
from kvcli.profile import Profile
from kvcli.schemas.fit import RunEntry
from kvcli.source import find
from kvcli.stats import Stats


def entry(**changes):
    facts = {
        "kvcli": "0", "date": "2026-01-01T00:00:00+00:00", "model": "demo", "profile": "exact", "profile_hash": "a",
        "device": "cpu", "ctx": 5, "predicted": 100, "measured": 110,
    }  # fmt: skip
    return RunEntry(**(facts | changes))


def test_the_middle_of_the_last_six_of_the_same_kind(tmp_path):
    for measured in (900, 90, 100, 110, 120, 104, 106):  # the first is the seventh last
        runs.append(tmp_path, entry(measured=measured))
    runs.append(tmp_path, entry(model="other", measured=500))
    runs.append(tmp_path, entry(device="cuda:0", measured=500))
    found = runs.ratios(runs.read(tmp_path), "demo", "exact", "cpu")
    assert found == runs.Ratios(1.05, 0.9, 1.2, 6)
    assert runs.ratios(runs.read(tmp_path), "demo", "ngram", "cpu") is None


def test_the_log_is_private_bounded_and_survives_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "MOST", 2000)
    folder = tmp_path / "data"
    for _ in range(30):
        runs.append(folder, entry())
    file = folder / runs.NAME
    assert file.stat().st_size <= 2000
    assert file.stat().st_mode & 0o777 == 0o600
    whole = len(runs.read(folder))
    assert whole > 2
    with file.open("a") as stream:
        stream.write('{"broken\n\x00\n')
    assert len(runs.read(folder)) == whole


@pytest.fixture
def outlook(tmp_path):
    return Outlook(
        subject_of(find("demo")), "demo", tmp_path / "cache", tmp_path / "data", {"cpu": Room("cpu", 1 << 40)}
    )


def test_a_turn_is_noted_without_its_text_and_the_next_estimate_follows(outlook):
    profile = Profile.load("exact")
    first, available = outlook.foretell(profile, 100)
    assert available == 1 << 40
    assert outlook.record(profile, Stats(peak=2 * first, context=100)) == ""
    (line,) = (outlook.data / runs.NAME).read_text().splitlines()
    assert set(json.loads(line)) == {
        "schema", "kvcli", "date", "model", "profile", "profile_hash", "device", "ctx", "predicted", "measured",
    }  # fmt: skip
    again = Outlook(outlook.subject, "demo", outlook.cache, outlook.data, outlook.found)
    assert again.foretell(profile, 100)[0] == pytest.approx(2 * first, rel=1e-6)
    assert again.foretold == first  # ratios do not multiply each other


def test_a_smaller_turn_does_not_lower_what_was_foretold_for_the_process(outlook):
    profile = Profile.load("exact")
    high, _ = outlook.foretell(profile, 8000)
    assert outlook.foretell(profile, 10)[0] == high


def test_a_log_that_cannot_be_written_is_a_note(outlook, tmp_path):
    (tmp_path / "data").write_text("a file where the folder should be")
    outlook.foretell(Profile.load("exact"), 10)
    assert "could not be noted" in outlook.record(Profile.load("exact"), Stats(peak=1, context=10))


def test_a_turn_carries_its_estimate_and_a_changed_profile_its_own(outlook):
    with load("demo", "exact", set={"load.device": "cpu"}) as model:
        model.foretell = outlook.foretell
        stats = model.generate("Hello", 4).stats
        assert (stats.estimate, stats.available) == (outlook.highest, 1 << 40)
        assert stats.estimate >= outlook.plan(model.profile, stats.context).total
        changed = model.with_profile(model.profile.replace(prefill={"chunk": 64}))
        assert changed.generate("Hello", 4).stats.estimate == outlook.highest
