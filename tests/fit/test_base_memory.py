"""What the program takes before any model."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from kvcli.errors import KvcliError
from kvcli.fit import memory


def test_it_is_measured_once_for_each_build_of_torch(tmp_path, monkeypatch):
    measured = iter([700, 400])
    monkeypatch.setattr(memory, "measured", lambda: next(measured))
    assert [memory.elsewhere(tmp_path), memory.elsewhere(tmp_path)] == [700, 700]
    monkeypatch.setattr(memory, "build", lambda: "another")
    assert [memory.elsewhere(tmp_path), memory.elsewhere(tmp_path)] == [400, 400]
    (kept,) = (tmp_path / "calibration").glob("program-another")
    kept.write_text("damaged")
    with pytest.raises(StopIteration):
        memory.elsewhere(tmp_path)


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "measured", lambda: 700)
    (tmp_path / "file").write_text("")
    assert memory.elsewhere(tmp_path / "file") == 700


def test_this_process_counts_as_it_is():
    held = psutil.Process().memory_info().rss
    assert memory.here() == pytest.approx(held + memory.AFTER, rel=0.2)


def test_a_process_of_its_own_holds_what_this_build_of_torch_maps():
    code = "import torch, psutil; print(psutil.Process().memory_info().rss)"
    torch_alone = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert torch_alone + memory.AFTER < memory.measured() < 8 * torch_alone


def test_a_process_that_fails_is_an_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(memory, "CODE", "raise SystemExit('no such thing')")
    with pytest.raises(KvcliError) as caught:
        memory.measured()
    assert caught.value.lines == ("no such thing",)
