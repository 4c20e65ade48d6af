"""Disks that are full, broken or slow, runs that are killed, users who may write nowhere, clocks that go back."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvcli.chat.saved_chats import SavedChats
from kvcli.kv.out_of_memory import CacheFull
from tests import make
from tests.bench import stress_faults

ROOT = Path(__file__).parents[1]


def storm(name: str, *args: str) -> dict[str, object]:
    """The short form of a stress test; its last line."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "bench" / name, *args], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])["rows"][-1]
    assert found["bad"] == 0, done.stdout
    return found


@pytest.mark.parametrize("cases", [",".join(case for case in stress_faults.CASES if case != "disk tier"), "disk tier"])
def test_every_call_that_writes_may_fail(cases: str, tmp_path: Path):
    """The long form is the same command without --step."""
    if stress_faults.built(tmp_path) is None:
        pytest.skip("no C compiler, or no Linux: the calls of libc cannot be made to fail")
    assert storm("stress_faults.py", "--cases", cases, "--step", "40")["tried"] >= 25


def test_a_stress_test_that_sees_no_fault_is_none(tmp_path: Path):
    """What the stress test calls bad: the check itself is tried on a writer that leaves a half."""
    usual = stress_faults.Ended(0, "", "", {"a.json": b"{}"})
    case = stress_faults.Case(lambda folder: (0, "", ""), (1,), same=("a.json",))
    before = {"b.txt": b"mine"}

    def said(code: int = 0, err: str = "", **files: bytes) -> list[str]:
        held = {name.replace("_", "."): data for name, data in files.items()}
        return list(stress_faults.wrong(case, before, usual, stress_faults.Ended(code, "", err, held), is_rerun=False))

    assert said(b_txt=b"mine", a_json=b"{}") == []
    assert said(1, "error: full", b_txt=b"mine") == []
    for bad in (said(b_txt=b"mine", a_json=b"{"), said(a_json=b"{}"), said(2, "error: x", b_txt=b"mine")):
        assert bad
    assert said(1, "", b_txt=b"mine")
    assert said(1, "error: Traceback", b_txt=b"mine")


# --- the tier on disk


@pytest.mark.parametrize("call", ["pwrite", "mmap"])
def test_room_whose_use_failed_is_there_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    """A file of one extent for each layer: a claim that came to nothing must not keep the room from the next one."""
    from kvcli.kv.tiers import disk

    size = 1 << 16
    tier = make.disk((1, 1, 16), torch.float32, most=size, writes=100 * size, folder=tmp_path)
    k = torch.randn(1, 500, 16)

    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(*((os, "pwrite") if call == "pwrite" else (disk.mmap, "mmap")), fails)
            with pytest.raises(CacheFull, match="the disk is full"):
                tier.append(0, k, k, 0)
    tier.append(0, k, k, 0)
    assert torch.equal(tier.slots(0).k, k)


def test_what_is_killed_leaves_nothing_and_the_next_run_is_fine():
    assert storm("stress_kills.py", "--kills", "8", "--commands", "0")["tried"] == 16


# --- somebody who is not root

NOBODY = 65534


def as_nobody(work: Callable[[Path], list[list[object]]]) -> list[list[object]]:
    """What `work` finds in a folder of its own, as a user who owns that folder and nothing else.

    It runs twice: the interpreter's own files may be closed to that user, so all is imported by the first time.
    """
    folders = [Path(tempfile.mkdtemp(prefix="kvcli-user-")) for _ in range(2)]
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            work(folders[0])
            if os.geteuid() == 0:
                os.chown(folders[1], NOBODY, NOBODY)
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writer, json.dumps(work(folders[1])).encode())
        except BaseException as error:
            os.write(writer, json.dumps([[repr(error)]]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        found: list[list[object]] = json.loads(answer.read())
    os.waitpid(child, 0)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("closed", ["to writing", "altogether"])
def test_a_user_who_may_write_nowhere(closed: str):
    """Answers come, with a word on what is not kept; what was to be written is refused by its path."""
    if os.geteuid() == 0 and not all(p.stat().st_mode & 1 for p in Path(sys.prefix).resolve().parents):
        pytest.skip("run by root, whose Python is closed to other users")

    def work(folder: Path) -> list[list[object]]:
        stress_faults.furnish(folder)
        home = folder / "home"
        for path in [p for p in home.rglob("*") if p.is_dir()] + [home]:
            path.chmod(0o500 if closed == "to writing" else 0o000)
            if closed == "altogether" and path != home:
                path.chmod(0o700)
        os.chdir(folder)
        cases = {
            "chat": stress_faults._talk,
            "chat -p": lambda f: stress_faults._patched(f, "chat", "-f", "b.txt", "-p", "How deep?"),
            "summarize": stress_faults._summarize,
            "profiles new": lambda f: stress_faults._patched(f, "profiles", "new", "fresh"),
            "calibrate": stress_faults._calibrate,
            "config": lambda f: stress_faults._patched(f, "config", "path"),
        }
        found = [[name, *run(folder)] for name, run in cases.items()]
        for path in [home, *home.rglob("*")]:
            path.chmod(0o700)
        return found

    found = {name: (code, out, err) for name, code, out, err in as_nobody(work)}
    for name, (_, out, err) in found.items():
        assert "Traceback" not in err + out, (name, err)
        assert "internal" not in err, (name, err)
    codes = {name: code for name, (code, _, _) in found.items()}
    if closed == "altogether":
        assert set(codes.values()) == {3}
        assert all("[no_permission]" in str(err) for _, _, err in found.values())
        return
    assert codes == {"chat": 0, "chat -p": 0, "summarize": 0, "profiles new": 3, "calibrate": 1, "config": 0}
    assert "972" in str(found["chat -p"][1])
    assert "Permission denied" in str(found["profiles new"][2])
    assert "the calibration cannot be saved" in str(found["calibrate"][2])
    assert "cannot" in str(found["chat"][2])


# --- a clock that goes back


def test_a_clock_that_goes_back_shows_nothing_negative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As after a correction by the network, between two turns and within one."""
    from kvcli.commands.common.run_setup import Setup
    from kvcli.environment import Environment
    from tests.fakes import Loaded, Machine

    machine = Machine(tmp_path, Loaded(answer="It is 972 metres."), {"TERM": "dumb"})
    ticks = iter(range(10_000_000, 0, -7))
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: float(next(ticks)))
    monkeypatch.setattr(Setup, "load", lambda self, profile, tell=None: machine.model)
    made = Environment.__post_init__

    def backwards(world: Environment) -> None:
        made(world)
        world.clock = lambda: float(next(ticks))

    monkeypatch.setattr(Environment, "__post_init__", backwards)
    typed = b"one\ntwo\n/stats last\n/save\nthree\n"
    done = machine("chat", stdin=typed, tty=("stdin", "stdout", "stderr"))
    assert done.exit == 0, done.err
    assert not re.search(r"(?<![\w.])-\d", done.out + done.err), done.err
    assert "internal" not in done.err
    saved = SavedChats(tmp_path / "home" / "data").open().saved
    asked = [m.text for m in saved.messages if m.role == "user"]
    assert asked == ["one", "two", "three"]


FULL = ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "EBADF")


@pytest.mark.parametrize(
    ("number", "said"), [*((name, "cannot write") for name in FULL), ("EACCES", "no permission for")]
)
def test_a_disk_that_fails_is_no_bug_of_ours(number: str, said: str):
    from kvcli.commands.common.exits import machine_gave_out

    code = getattr(errno, number)
    error = OSError(code, os.strerror(code), "/old", None, "/new")
    known = machine_gave_out(error)
    assert known is not None
    assert said in known.message
    assert (known.code == "cannot_write") == (number in FULL)
    assert "/new" in known.message
    assert "/old" not in known.message
