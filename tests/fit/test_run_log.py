"""The log of what runs used."""

from __future__ import annotations

import json
from itertools import count

import pytest

from kvcli import load
from kvcli.engine.stats import Stats
from kvcli.fit import run_log
from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.plan import subject_of
from kvcli.fit.preflight import Preflight
from kvcli.models.source import find
from kvcli.schemas.fit import RunEntry
from kvcli.settings.profile import Profile

COUNT = count()


def entry(run="", **changes):
    facts = {
        "kvcli": "0", "date": "2026-01-01T00:00:00+00:00", "run": run or str(next(COUNT)), "model": "demo",
        "profile": "exact", "profile_hash": "a", "device": "cpu", "ctx": 5, "build": "b", "predicted": 100,
        "measured": 110,
    }  # fmt: skip
    return RunEntry(**(facts | changes))


LIKE = "demo", "cpu", "b"


def test_the_middle_of_the_last_six_of_the_same_kind_under_any_profile(tmp_path):
    for measured in (900, 90, 100, 110, 120, 104, 106):  # the first is the seventh last
        run_log.append(tmp_path, entry(measured=measured, profile=f"p{measured}"))
    for other in ({"model": "other"}, {"device": "cuda:0"}, {"build": "another torch"}):
        run_log.append(tmp_path, entry(measured=500, **other))
    assert run_log.measured_excess(run_log.read(tmp_path), *LIKE) == run_log.Beyond(5, -10, 20, 6)
    assert run_log.measured_excess(run_log.read(tmp_path), "none", *LIKE[1:]) == run_log.NOTHING


@pytest.mark.parametrize("odd", [3000, 20])
def test_one_odd_run_moves_nothing_and_two_that_agree_do(odd):
    assert run_log.measured_excess([entry(measured=odd)], *LIKE) == run_log.Beyond(0, odd - 100, odd - 100, 1)
    assert run_log.measured_excess([entry(measured=104), entry(measured=odd)], *LIKE).middle == (4 if odd > 100 else 0)
    assert run_log.measured_excess([entry(measured=104), entry(measured=106)], *LIKE).middle == 4
    assert run_log.measured_excess([entry(measured=104), entry(measured=106), entry(measured=odd)], *LIKE).middle in (
        4,
        6,
    )


def test_many_turns_of_one_chat_are_one_run():
    turns = [entry(measured=100 + i, run="long chat") for i in range(20)]
    assert run_log.measured_excess([entry(measured=90), *turns, entry(measured=105)], *LIKE) == run_log.Beyond(
        5, -10, 19, 3
    )


def test_the_log_is_private_bounded_and_survives_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "MOST", 2000)
    folder = tmp_path / "data"
    for _ in range(30):
        run_log.append(folder, entry())
    file = folder / run_log.NAME
    assert file.stat().st_size <= 2000
    assert file.stat().st_mode & 0o777 == 0o600
    whole = len(run_log.read(folder))
    assert whole > 2
    with file.open("a") as stream:
        stream.write('{"broken\n\x00\n')
    assert len(run_log.read(folder)) == whole


@pytest.fixture
def outlook(tmp_path):
    return Preflight(subject_of(find("demo")), "demo", tmp_path / "data", {"cpu": AvailableMemory("cpu", 1 << 40)})


def test_a_turn_is_noted_without_its_text_and_the_next_estimate_follows(outlook):
    profile = Profile.load("exact")
    first, available = outlook.estimate_peak(profile, 100)
    assert available == 1 << 40
    assert outlook.record(profile, Stats(peak=2 * first, context=100)) == ""
    (line,) = (outlook.data / run_log.NAME).read_text().splitlines()
    assert set(json.loads(line)) == {
        "schema", "kvcli", "date", "run", "model", "profile", "profile_hash", "device", "ctx", "build", "predicted",
        "measured",
    }  # fmt: skip
    again = Preflight(outlook.subject, "demo", outlook.data, outlook.found)
    assert again.estimate_peak(profile, 100)[0] == first
    assert again.record(profile, Stats(peak=2 * first, context=100)) == ""
    again = Preflight(outlook.subject, "demo", outlook.data, outlook.found)
    assert again.estimate_peak(profile, 100)[0] == pytest.approx(2 * first, rel=1e-6)
    assert again.foretold == first  # corrections do not pile up


def test_a_smaller_turn_does_not_lower_what_was_foretold_for_the_process(outlook):
    profile = Profile.load("exact")
    high, _ = outlook.estimate_peak(profile, 8000)
    assert outlook.estimate_peak(profile, 10)[0] == high


def test_a_log_that_cannot_be_written_is_a_note(outlook, tmp_path):
    (tmp_path / "data").write_text("a file where the folder should be")
    outlook.estimate_peak(Profile.load("exact"), 10)
    assert "could not be saved" in outlook.record(Profile.load("exact"), Stats(peak=1, context=10))


def test_a_turn_carries_its_estimate_and_a_changed_profile_its_own(outlook):
    with load("demo", "exact", set={"load.device": "cpu"}) as model:
        model.foretell = outlook.estimate_peak
        stats = model.generate("Hello", 4).stats
        assert (stats.estimate, stats.available) == (outlook.highest, 1 << 40)
        assert stats.estimate >= outlook.plan(model.profile, stats.context).total
        changed = model.with_profile(model.profile.replace(prefill={"chunk": 64}))
        assert changed.generate("Hello", 4).stats.estimate == outlook.highest
