"""`kvcli cache`: what it counts, and that it removes nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.fakes import Machine

DAY = 86_400


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    home = tmp_path / "home"
    for name, days in {
        "cache/summaries/old.json": 40,
        "cache/summaries/new.json": 1,
        "cache/gguf/model.gguf": 40,
        "cache/kvpress/bin/python": 40,
        "cache/mine/notes.txt": 40,  # not of kvcli's kinds
        "data/chats/chat.json": 40,
        "data/runs.jsonl": 40,
    }.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
        os.utime(path, (time.time() - days * DAY,) * 2)
    return made


def left(machine: Machine) -> set[str]:
    home = machine.folder / "home"
    files = {p.relative_to(home).as_posix() for p in home.rglob("*") if p.is_file()}
    return {name for name in files if not name.startswith("cache/calibration/")}  # the stand-in world keeps one there


def test_info_counts_by_kind(machine: Machine):
    done = machine("cache", "info")
    assert done.exit == 0
    assert done.out.splitlines()[1].split()[:4] == ["summaries", "2", "2", "KiB"]
    found = {k["kind"]: (k["entries"], k["bytes"]) for k in json.loads(machine("cache", "info", "--json").out)["kinds"]}
    assert found["summaries"] == (2, 2000)
    assert found["quality"] == (0, 0)
    assert found["kvpress"] == (1, 1000)
    assert "mine" not in found


def test_prune_removes_what_is_old_and_says_what_that_frees(machine: Machine):
    before = left(machine)
    dry = json.loads(machine("cache", "prune", "--dry-run", "--json").out)
    assert left(machine) == before
    assert dry["removed"] is False
    done = json.loads(machine("cache", "prune", "--json").out)
    assert done["kinds"] == dry["kinds"]
    assert {k["kind"]: k["freed_entries"] for k in done["kinds"] if k["freed_entries"]} == {
        "summaries": 1,
        "gguf": 1,
        "kvpress": 1,
    }
    gone = {"cache/summaries/old.json", "cache/gguf/model.gguf", "cache/kvpress/bin/python"}
    assert left(machine) == before - gone


def test_prune_takes_kinds_and_an_age(machine: Machine):
    before = left(machine)
    assert "removed" in machine("cache", "prune", "summaries", "--older-than", "0").out
    assert left(machine) == before - {"cache/summaries/old.json", "cache/summaries/new.json"}
    done = machine("cache", "prune", "benchmarks")
    assert done.exit == 2
    assert "the cache has no kind 'benchmarks'" in done.err


def test_chats_go_only_if_named(machine: Machine):
    before = left(machine)
    new = machine.folder / "home" / "data" / "chats" / "new.json"
    new.write_text("x")
    os.utime(new, (time.time() + 5,) * 2)  # by a clock that went back since
    machine("cache", "prune", "--older-than", "0")
    assert left(machine) >= {"data/chats/chat.json", "data/chats/new.json", "data/runs.jsonl"}
    found = json.loads(machine("cache", "prune", "chats", "--json").out)["kinds"]
    assert [(k["kind"], k["entries"], k["freed_entries"]) for k in found] == [("chats", 2, 1)]
    assert "data/chats/chat.json" in before - left(machine)
    assert new.exists()
    machine("cache", "prune", "chats", "--older-than", "0")
    assert not new.exists()


def test_an_empty_home_has_an_empty_cache(tmp_path: Path):
    done = Machine(tmp_path)("cache", "info")
    assert (done.exit, done.err) == (0, "")


def test_paths_name_everything_that_is_kept(machine: Machine):
    paths = json.loads(machine("config", "path", "--json").out)["paths"]
    assert {"chats", "runs", "benchmarks", "models", "cache", "history", "log"} <= set(paths)
    assert Path(paths["runs"]).is_file()
