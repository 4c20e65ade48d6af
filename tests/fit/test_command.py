"""`kvcli fit` as a user types it, on described machines, and the chat that looks before it loads."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter

from kvcli.calibrate.store import machine_fingerprint, save_calibration
from kvcli.commands.setup import Setup
from kvcli.demo import weights_dir
from kvcli.fit import room
from kvcli.schemas import DOCUMENTS
from tests.fakes import Machine
from tests.test_calibrate import made


@pytest.fixture
def machine(tmp_path, monkeypatch):
    found = Machine(tmp_path)
    monkeypatch.setattr(Setup, "load", lambda self, profile, tell=None: found.model)
    return found


def document(done):
    (line,) = done.out.splitlines()
    TypeAdapter(DOCUMENTS["fit"]).validate_json(line, strict=True)
    return json.loads(line)


def test_every_profile_in_one_table(machine):
    done = machine("fit", "demo", "--all", "--ram", "8GiB")
    assert (done.exit, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()[3:6]] == ["exact", "ngram", "streaming"]
    assert "kvcli bench --calibrate" in done.out
    assert max(map(len, done.out.splitlines())) < 80


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("args", [("--all",), ("--ctx", "1m"), ("--ram", "0.5GiB", "--ctx", "8k")])
def test_no_line_is_wider_than_the_terminal(machine, columns, args):
    machine.environ["COLUMNS"] = columns
    lines = machine("fit", "demo", *args).out.splitlines()
    assert lines
    assert max(map(len, lines)) < int(columns)


def test_json_is_the_schema_and_adds_up(machine):
    found = document(machine("fit", "demo", "--all", "--ctx", "512,4k", "--ram", "8GiB", "--json"))
    assert (found["model"], found["ctx"], found["free_bytes"]) == ("demo", 512, 8 << 30)
    assert [(p["profile"], p["ctx"]) for p in found["plans"][:3]] == [("exact", 512), ("exact", 4096), ("ngram", 512)]
    for plan in found["plans"]:
        running = sum(plan[part] for part in ("base", "weights", "kv", "draft", "working"))
        assert plan["total"] == max(running, plan["loading"])
        assert plan["kv"] == sum(plan["kv_tiers"].values())
        assert plan["fits"] == (plan["missing"] == 0) == (plan["binding"] is None)


def test_what_does_not_fit_exits_5_and_says_what_would(machine):
    done = machine("fit", "demo", "--ctx", "8k", "--ram", "560MiB", "-P", "exact")
    assert done.exit == 5
    assert "too much" in done.out
    assert "try: --set prefill.chunk=256" in done.out
    found = document(machine("fit", "demo", "--ctx", "8k", "--ram", "560MiB", "-P", "exact", "--json"))
    (plan,) = found["plans"]
    usable = found["free_bytes"] - found["kept_free"]
    assert plan["missing"] == plan["needed"] - usable > 0
    assert all(change["total"] <= usable for change in plan["changes"])


def test_one_that_fits_among_others_is_enough(machine):
    assert machine("fit", "demo", "--ctx", "512,1m", "--ram", "8GiB").exit == 0


def test_beyond_the_models_limit(machine):
    done = machine("fit", "demo", "--ctx", "1m", "--ram", "64GiB")
    assert done.exit == 5
    assert "the model was made for 8,192 tokens" in done.out


def test_a_card_that_is_described(machine):
    found = document(machine("fit", "demo", "--vram", "12GiB", "--json"))
    assert (found["device"], found["free_bytes"]) == ("cuda:0", (12 << 30) - room.CONTEXT)
    assert found["plans"][0]["base"] == 0
    assert any("CUDA itself" in note for note in found["notes"])
    small = machine("fit", "demo", "--vram", "0.1GiB", "--ram", "8GiB")
    assert small.exit == 5
    assert "--device cpu" in small.out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--vram", "12"), "unit"),
        (("--ctx", "many"), "tokens"),
        (("--all", "--profiles", "exact"), "exclude"),
        (("--device", "cuda:7"), "nothing is known"),
    ],
)
def test_wrong_options_are_usage_errors(machine, args, says):
    done = machine("fit", "demo", *args)
    assert (done.exit, done.out) == (2, "")
    assert says in done.err


def test_a_folder_with_its_config_alone_is_enough(machine):
    folder = machine.folder / "model"
    folder.mkdir()
    (folder / "config.json").write_text((weights_dir() / "config.json").read_text())
    found = document(machine("fit", str(folder), "--json", "--ram", "8GiB"))
    whole = document(machine("fit", "demo", "--json", "--ram", "8GiB"))
    assert found["plans"][0]["weights"] == pytest.approx(whole["plans"][0]["weights"], rel=0.02)
    assert "the weights are not here" in found["notes"][0]


def test_a_profile_that_cannot_have_the_settings_is_left_out_of_all_and_refused_by_name(machine):
    found = document(machine("fit", "demo", "--all", "--set", "policy.name=window", "--json"))
    assert [plan["profile"] for plan in found["plans"]] == ["streaming"]
    assert any(note.startswith("exact is left out") for note in found["notes"])
    assert machine("fit", "demo", "--profiles", "exact", "--set", "policy.name=window").exit == 9


def test_plain_is_bytes_and_tabs(machine):
    names, row = (line.split("\t") for line in machine("fit", "demo", "--plain").out.splitlines())
    assert dict(zip(names, row, strict=True))["weights"] == "10064000"


def test_times_come_with_a_calibration_and_its_age(machine):
    save_calibration(machine.world().paths.cache, made(machine_fingerprint("cpu")))
    done = machine("fit", "demo", "-P", "exact")
    assert "calibrated" in done.out
    assert "this machine's figures" in done.out
    found = document(machine("fit", "demo", "-P", "exact", "--json"))
    plan = found["plans"][0]
    read = plan["weights"] + plan["ctx"] * plan["kv_per_token"]
    assert plan["speed"]["tok_s"] == pytest.approx(1e9 / read)  # made() reads 1e9 bytes a second
    assert plan["base"] == 500 << 20


# ---- the chat ----


def small(monkeypatch, mib):
    monkeypatch.setattr(room, "container_room", lambda: mib << 20)


def test_a_chat_that_cannot_fit_is_refused_before_it_loads(machine, monkeypatch):
    small(monkeypatch, 300)
    monkeypatch.setattr(Setup, "load", None)
    done = machine("chat", "-p", "hi", "--json")
    found = json.loads(done.out)
    assert (done.exit, found["code"], found["exit"]) == (5, "does_not_fit", 5)
    assert found["detail"]["needed"] > found["detail"]["usable"]
    assert "kvcli fit demo --all" in found["try"]


def test_force_loads_all_the_same(machine, monkeypatch):
    small(monkeypatch, 300)
    assert machine("chat", "-p", "hi", "--force").exit == 0


def test_a_smaller_window_is_said_and_one_that_was_asked_for_is_refused(machine, monkeypatch):
    small(monkeypatch, 545)
    done = machine("chat", "-p", "hi", "-P", "exact")
    assert done.exit == 0
    assert "of 8,192 tokens: more does not fit" in done.err
    for asked in ("8192", "max"):
        assert machine("chat", "-p", "hi", "-P", "exact", "--ctx", asked).exit == 5


def test_a_dry_run_says_what_it_would_take(machine):
    found = json.loads(machine("chat", "--dry-run", "--json").out)
    assert found["estimate_bytes"] > 400 << 20
    assert found["fits"] is True
    assert "MiB at most" in machine("chat", "--dry-run").out
