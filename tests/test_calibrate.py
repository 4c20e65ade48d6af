"""What a machine can do, kept and found again. Nothing here depends on how fast anything is."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from functools import partial

import pytest
import torch

from kvcli import load
from kvcli.commands.common.run_setup import Setup
from kvcli.engine.drafting.pass_timer import PassTimer
from kvcli.errors import KvcliError
from kvcli.fit import calibrate as run
from kvcli.fit.calibrate import (
    calibrate,
    contexts,
    fingerprint_of,
    model_fingerprint,
    pass_times,
    quick_costs,
    quick_times,
)
from kvcli.fit.run_log import age_days, file_of, load_calibration, machine_fingerprint, save_calibration
from kvcli.fit.speed import units
from kvcli.render.fit.plans import calibration_lines
from kvcli.schemas.fit import CalibrationDocument, PassTime
from kvcli.settings.profile import Profile
from tests.fakes import Machine


def made(fingerprint: str = "abc", **changes: object) -> CalibrationDocument:
    """A calibration nobody measured: 1e9 bytes and 1e12 FLOP a second."""
    facts = {
        "kvcli": "0", "date": datetime.now(UTC).isoformat(), "fingerprint": fingerprint, "cpu": "a cpu",
        "device": "cpu", "threads": 1, "torch": "2", "bandwidth": 1e9,
        "gemm": {"bfloat16": 1e12, "float32": 1e11}, "launch": 1e-6, "links": {}, "disk": None, "model": None,
    }  # fmt: skip
    return CalibrationDocument(**(facts | changes))


@pytest.fixture(scope="module")
def demo():
    with load("demo", "exact", set={"load.device": "cpu"}) as model:
        yield model


def test_contexts_go_by_fours_and_leave_room_for_the_longest_pass():
    assert contexts(4000) == [512, 2048]
    assert contexts(8192) == [512, 2048, 7936]  # the end is measured where it is far from the last step
    assert contexts(32768) == [512, 2048, 8192, 32512]
    assert contexts(1 << 20) == [512, 2048, 8192, 32768]  # no longer: what is stored for nothing fills the memory
    assert contexts(300) == [44]
    assert contexts(1) == [1]


def test_the_grid_has_a_time_for_each_row_count_and_context(demo, monkeypatch):
    monkeypatch.setattr(run, "GRID_ROWS", (1, 4, 8))
    monkeypatch.setattr(run, "PASS_REPS", 1)
    monkeypatch.setattr(run, "FIRST", 1024)
    told: list[str] = []
    found = pass_times(demo.lm, told.append)
    assert [(p.context, p.rows) for p in found] == [(n, rows) for n in (1024, 4096) for rows in (1, 4, 8)]
    assert all(0 < p.low <= p.seconds <= p.high for p in found)
    assert len(told) == 2


def test_no_timed_pass_follows_the_longest_one_directly(demo, monkeypatch):
    monkeypatch.setattr(run, "GRID_ROWS", (1, 4, 8))
    asked: list[int] = []
    monkeypatch.setattr(run, "once", lambda lm, kv, rows, context: asked.append(rows) or float(len(asked)))
    first = pass_times(demo.lm, lambda _: None)[0]
    assert asked[:8] == [1, 1, 4, 8, 1, 1, 4, 8]
    assert (first.low, first.seconds, first.high) == (
        6,
        10,
        14,
    )  # the second of each turn; the first turn is thrown away


def test_a_busy_machine_is_said():
    def lines(high):
        times = [PassTime(rows=r, context=512, seconds=1, low=0.9, high=high) for r in (1, 4)]
        model = {"id": "demo", "fingerprint": "f", "dtype": "bfloat16", "quant": "none", "device": "cpu"}
        return "\n".join(calibration_lines(made(model=model | {"passes": times}), 80))

    assert "other programs" not in lines(1.1)
    assert "2.0× its fastest" in lines(1.8)


def test_a_calibration_is_kept_for_the_machine_and_for_the_model(demo, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "SIZE", 1 << 16)
    monkeypatch.setattr(run, "EDGE", 16)
    monkeypatch.setattr(run, "CALLS", 2)
    monkeypatch.setattr(run, "GRID_ROWS", (1, 2))
    monkeypatch.setattr(run, "MACHINE_REPS", 1)
    monkeypatch.setattr(run, "PASS_REPS", 1)
    found = calibrate(demo, tmp_path)
    key = fingerprint_of(demo)
    at = machine_fingerprint("cpu")
    assert load_calibration(tmp_path, at, key) == found
    assert found.model is not None
    weights = demo.lm.hashes.of(demo.lm.files["weights"])
    assert found.model.fingerprint == key == model_fingerprint("bfloat16", "none", 6, 320, 1888, "demo", weights)
    alone = load_calibration(tmp_path, at)
    assert alone == found.model_copy(update={"model": None})
    assert file_of(tmp_path, at).stat().st_mode & 0o777 == 0o600
    for width in (40, 200):
        lines = calibration_lines(found, width)
        assert max(map(len, lines)) < width


def test_what_is_not_there_is_none_and_what_is_damaged_is_said(tmp_path):
    told: list[str] = []
    assert load_calibration(tmp_path, "abc", tell=told.append) is None
    assert told == []
    file = save_calibration(tmp_path, made())
    assert load_calibration(tmp_path, "abc", tell=told.append) == made(date=load_calibration(tmp_path, "abc").date)
    for damage in (b"{", b"\xff\xfe", b'{"schema": "kvcli.calibration/2"}'):
        file.write_bytes(damage)
        assert load_calibration(tmp_path, "abc", tell=told.append) is None
    assert len(told) == 3
    assert all("is not used" in note for note in told)


NOTHING = {"id": "demo", "fingerprint": "f", "dtype": "bfloat16", "quant": "none", "device": "cpu", "passes": []}


@pytest.mark.parametrize(
    "damage",
    [
        {"date": "rubbish"},
        {"date": "2026-01-01T00:00:00"},
        {"gemm": {}},
        {"bandwidth": 0},
        {"model": NOTHING},
        {"model": NOTHING | {"passes": [{"rows": 1, "context": 512, "seconds": 0, "low": 0, "high": 0}]}},
    ],
)
def test_figures_that_cannot_be_reckoned_with_are_damage_too(tmp_path, damage):
    file, told = save_calibration(tmp_path, made()), []
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    assert load_calibration(tmp_path, "abc", tell=told.append) is None
    assert "damaged" in told[0]


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_measured(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "bandwidth", None)
    (tmp_path / "calibration").write_text("a file where the folder should be")
    with pytest.raises(KvcliError) as caught:
        calibrate(demo, tmp_path)
    assert caught.value.code == "not_kept"


def test_the_threads_a_profile_will_load_with_are_part_of_the_machine():
    now = torch.get_num_threads()
    assert machine_fingerprint("cpu", now) == machine_fingerprint("cpu") != machine_fingerprint("cpu", now + 1)


def test_another_model_or_precision_is_another_file():
    one = model_fingerprint("bfloat16", "none", 6, 320, 1888, "demo", "a")
    assert one != model_fingerprint("bfloat16", "int8", 6, 320, 1888, "demo", "a")
    assert one != model_fingerprint("float32", "none", 6, 320, 1888, "demo", "a")
    assert one != model_fingerprint("bfloat16", "none", 6, 320, 1888, "demo", "b")


def test_age_is_in_whole_days():
    assert age_days("2026-01-01T00:00:00+00:00", datetime(2026, 1, 3, 5, tzinfo=UTC)) == 2
    assert age_days("2026-01-01T02:00:00+02:00", datetime(2026, 1, 1, tzinfo=UTC)) == 0


def test_a_drafter_starts_from_what_was_calibrated_until_it_has_timed_it_itself():
    clock = PassTimer()
    flat = clock.costs(17)
    clock.expect({1: 1.0, 2: 1.5, 16: 5.0})
    costs = clock.costs(17)
    assert (costs[0], costs[1], costs[15]) == (1.0, 1.5, 5.0)
    assert costs == sorted(costs)
    assert costs[-1] > flat[-1]
    assert not clock.knows(2)  # a prior is no measurement
    assert clock.reach == 2  # so passes grow a stair at a time, each timed before the next
    for _ in range(3):
        clock.time(2, 1.1)
    assert clock.costs(2)[1] == 1.1


def test_a_chat_starts_from_the_calibration_of_its_model_and_says_if_that_is_damaged(demo, tmp_path, monkeypatch):
    monkeypatch.setattr("kvcli.fit.calibrate.BUDGET", 600.0)  # however busy the machine is
    world, told = Machine(tmp_path).world(), []
    times = [PassTime(rows=r, context=512, seconds=s, low=s, high=s) for r, s in ((1, 1.0), (4, 1.5))]
    about = {"id": "demo", "fingerprint": fingerprint_of(demo), "dtype": "bfloat16", "quant": "none", "device": "cpu"}
    found = made(machine_fingerprint("cpu"), model=about | {"passes": times})
    file = save_calibration(world.paths.cache, found)
    profile = Profile.load("ngram").replace(load={"device": "cpu"})
    assert Setup(world, "demo").load(profile, told.append).costs(512) == {4: 1.5}
    assert told == []
    file.write_text("{")
    again = Setup(world, "demo")
    costs = again.load(profile, told.append).costs(512)
    assert set(costs) == {2, 4, 8, 16, 32, 256}  # a short look instead
    assert "damaged" in told[0]


def test_costs_are_those_of_the_context():
    grid = [(1, 512, 1.0), (4, 512, 2.0), (1, 2048, 2.0), (4, 2048, 5.0)]
    times = [PassTime(rows=r, context=c, seconds=9 * s, low=s, high=99 * s) for r, c, s in grid]  # the fastest counts
    assert units(times, 512) == {4: 2.0}
    assert units(times, 2048) == {4: 2.5}
    assert units(times, 0) == {4: 2.0}
    assert units(times[1:2], 512) == {}


def test_a_short_look_is_kept_and_a_damaged_one_remade(demo, tmp_path, monkeypatch):
    monkeypatch.setattr("kvcli.fit.calibrate.BUDGET", 600.0)  # however busy the machine is
    first = quick_costs(demo, tmp_path, lambda _: None)
    assert [p.rows for p in first if p.context == 512] == [1, 2, 4, 8, 16, 32, 256]
    told: list[str] = []
    assert quick_costs(demo, tmp_path, told.append) == first
    assert told == []
    (file,) = (tmp_path / "calibration").iterdir()
    file.write_text("{")
    assert quick_costs(demo, tmp_path, told.append)
    assert told == ["measuring a few forward passes"]


def test_a_short_look_that_saw_nothing_is_not_taken_at_each_start(demo, tmp_path, monkeypatch):
    monkeypatch.setattr("kvcli.fit.calibrate.BUDGET", 0.0)
    told: list[str] = []
    assert quick_costs(demo, tmp_path, told.append) == []
    assert quick_costs(demo, tmp_path, told.append) == []
    assert told == ["measuring a few forward passes"]
    (file,) = (tmp_path / "calibration").iterdir()
    os.utime(file, (0, 0))  # long ago
    assert quick_costs(demo, tmp_path, told.append) == []
    assert len(told) == 2


def test_a_short_look_ends_when_it_takes_too_long(demo):
    times = iter(range(1000))
    assert quick_times(demo.lm, lambda: next(times)) == []


def test_a_short_look_times_reading_only_where_the_budget_has_room(demo, monkeypatch):
    monkeypatch.setattr("kvcli.fit.calibrate.BUDGET", 1e9)
    assert {one.rows for one in quick_times(demo.lm, lambda: 0.0)} == {1, 2, 4, 8, 16, 32, 256}
    monkeypatch.setattr("kvcli.fit.calibrate.BUDGET", 1e-9)
    assert {one.rows for one in quick_times(demo.lm, lambda: 0.0)} == {1, 2, 4, 8, 16, 32}


def test_costs_stay_with_a_model_and_change_no_text(demo):
    prompt = demo.encode("List the words again: one two three one two three one two")
    texts = []
    for known in ({}, {2: 1.01, 16: 1.1}, {2: 5.0, 16: 40.0}):
        costs = partial(lambda known, context: known, known)
        model = demo.with_profile(Profile.load("ngram").replace(load={"device": "cpu"}))
        model.costs = costs
        texts.append(model.generate(prompt, 48, ignore_eos=True).ids)
        assert model.with_profile(model.profile).costs == costs
    assert texts[0] == texts[1] == texts[2]
