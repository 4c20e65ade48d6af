"""What parses the files of strangers can do nothing else, and is gone when its parent is: tried from inside."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvcli import sandbox
from kvcli.commands.doctor import sandbox_words
from kvcli.documents import document_of
from kvcli.worker_process import Limits, TooSlow, WorkerProcess, means

ROOT = Path(__file__).parents[1]

# Takes the place of a parser, and runs with what the process that parses has left.
TAKEN_OVER = """
import ctypes, json, os, resource, signal, socket, subprocess, sys, threading

libc = ctypes.CDLL(None, use_errno=True)


def c(answer):
    if answer < 0:
        raise OSError(ctypes.get_errno(), "denied")


def write_to_any():
    for n in range(3, 30):
        try:
            return os.write(n, b"x")
        except OSError:
            continue
    raise OSError


TRIES = {
    "read a file": lambda: open("/etc/passwd").read(),
    "read a file of Python's": lambda: open(json.__file__).read(),
    "write a file": lambda: open(FOLDER + "/made", "w"),
    "write to what it was handed": write_to_any,
    "look at a file": lambda: os.stat("/etc/passwd"),
    "list a folder": lambda: os.listdir("/"),
    "make a folder": lambda: os.mkdir(FOLDER + "/made"),
    "remove a file": lambda: os.unlink(FOLDER + "/victim"),
    "rename a file": lambda: os.rename(FOLDER + "/victim", FOLDER + "/other"),
    "open a descriptor again": lambda: os.open("/proc/self/fd/0", os.O_RDONLY),
    "copy a descriptor": lambda: os.dup(0),
    "connect": lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
    "make a socket": lambda: socket.socket(socket.AF_UNIX),
    "make a pipe": os.pipe,
    "fork": lambda: os.fork() or os._exit(0),
    "start a thread": lambda: threading.Thread(target=print).start(),
    "run a program": lambda: subprocess.run(["/bin/true"]),
    "become a program": lambda: os.execv("/bin/true", ["true"]),
    "leave its session": os.setsid,
    "leave its group": lambda: os.setpgid(0, 0),
    "signal its parent": lambda: os.kill(os.getppid(), 0),
    "signal itself": lambda: os.kill(os.getpid(), 0),
    "trace its parent": lambda: c(libc.ptrace(16, os.getppid(), 0, 0)),
    "outlive its parent": lambda: c(libc.prctl(1, 0, 0, 0, 0)),
    "stop its clock": lambda: signal.setitimer(signal.ITIMER_REAL, 0),
    "ignore its clock": lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
    "block its clock": lambda: c(libc.sigprocmask(0, bytes([255] * 128), None)),
    "take more memory": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)),
    "call what is in no list": lambda: c(libc.syscall(425, 1, bytes(120))),  # io_uring_setup
    "import a module": lambda: __import__("ftplib"),
}


class MarkdownConverter:
    def __init__(self, **options):
        pass

    def convert_soup(self, soup):
        done = {}
        for name, attempt in TRIES.items():
            try:
                attempt()
            except BaseException as error:
                done[name] = type(error).__name__
            else:
                done[name] = "done"
        return json.dumps({"tries": done, "environment": dict(os.environ)})
"""
# two parents of a busy process
READS = """
from kvcli.documents import document_of
from tests.documents.bombs import forms
document_of(forms(10, 12), "a.pdf")
"""
WAITS = """
import signal
from kvcli.worker_process import Limits, WorkerProcess
process = WorkerProcess("tests.test_sandbox", Limits(cpu=1000, wall=1000.0))
signal.pause()
"""


@pytest.fixture
def inside(tmp_path, monkeypatch) -> Callable[[], dict]:
    """What code that took a parser over finds."""
    (tmp_path / "markdownify.py").write_text(f"FOLDER = {str(tmp_path)!r}\n{TAKEN_OVER}")
    (tmp_path / "victim").write_text("still here")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda: json.loads(document_of(b"<!doctype html><p>x", "a.html").text)


def test_a_parser_that_was_taken_over_can_do_nothing_but_answer(inside, tmp_path):
    tries = inside()["tries"]
    if "seccomp" not in means():
        pytest.skip("this system has no seccomp")
    others = {
        "write to what it was handed": "OSError",
        "start a thread": "RuntimeError",
        "stop its clock": "itimer_error",
        "take more memory": "ValueError",  # so Python words EPERM there
        "import a module": "ModuleNotFoundError",
    }
    assert tries == dict.fromkeys(tries, "PermissionError") | others
    assert len(tries) == 30
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["markdownify.py", "victim"]


def test_without_privileges_it_is_shut_in_as_well(tmp_path):
    """As root without its capabilities, which is what a user has."""
    code = """
import ctypes, os, sys
for capability in range(64):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, "-c", "from kvcli.worker_process import means; print(*means())"])
"""
    assert said(code).split() == means()


def test_no_secret_of_the_user_is_in_its_environment(inside, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert {*inside()["environment"]} <= {"LD_LIBRARY_PATH", "OPENBLAS_NUM_THREADS", "LC_CTYPE"}  # Python sets the last


def test_it_is_held_to_its_limits_and_leaves_no_core_file(monkeypatch):
    """Such a file of a parser that fell over would have all of a private document in it."""
    held = {}
    monkeypatch.setattr(sandbox.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    unheld = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unheld)
    monkeypatch.setattr(resource, "setrlimit", held.__setitem__)
    sandbox.set_limits(os.getppid(), {"memory": 1 << 30, "cpu": 5, "wall": None})
    assert held == {
        resource.RLIMIT_AS: (1 << 30, 1 << 30),
        resource.RLIMIT_CPU: (5, 6),
        resource.RLIMIT_CORE: (0, 0),
    }


@pytest.mark.parametrize("machine", sandbox.MACHINES)
def test_its_filter_lets_pass_what_is_listed_of_its_own_machine_and_nothing_else(machine, monkeypatch):
    """The program, run here over what the kernel would show it: a call's number, and that of the machine it is for."""
    steps = []

    def hand_over(_call, _what, _flags, given):
        count, at = struct.unpack("HP", given)
        steps.extend(struct.iter_unpack("=HBBI", ctypes.string_at(at, 8 * count)))
        return 0

    def answer(arch: int, number: int) -> int:
        word = at = 0
        while steps[at][0] != 0x06:  # the verdict
            what, met, missed, value = steps[at]
            if what == 0x20:  # a word
                word = {0: number, 4: arch}[value]
            at += 1 + (what == 0x15 and (met if word == value else missed))
        return steps[at][3]

    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert sandbox._seccomp(SimpleNamespace(syscall=hand_over))
    arch, column, _ = sandbox.MACHINES[machine]
    listed = {pair[column] for pair in sandbox.CALLS.values()} - {None}
    for number in (*range(512), 1 << 30, (1 << 30) + 1):  # the last two are x32's, on x86-64
        assert answer(arch, number) == (sandbox.ALLOW if number in listed else sandbox.DENY), number
    for other in (0, 0x40000003, *(its for its, *_ in sandbox.MACHINES.values() if its != arch)):
        assert {answer(other, number) for number in range(512)} == {sandbox.DENY}


@pytest.mark.parametrize(
    ("without", "denied"),
    [("MACHINES.clear()", "remove"), ("MACHINES.clear(); sandbox.LANDLOCK = -1", "open")],
    ids=["landlock", "limits"],
)
def test_each_means_holds_by_itself(tmp_path, without, denied):
    victim = tmp_path / "victim"
    victim.write_text("still here")
    done = json.loads(
        said(f"""
import json, os, socket
from kvcli import sandbox
sandbox.{without}
line = socket.socket()
means = sandbox.enter_sandbox()
tries = dict(open=lambda: open({str(victim)!r}), remove=lambda: os.unlink({str(victim)!r}))
done = []
for name, attempt in tries.items():
    try:
        attempt()
    except OSError:
        done.append(name)
number = line.connect_ex(("127.0.0.1", 9))
print(json.dumps([means, done, number]))
""")
    )
    if denied == "remove" and "landlock" not in done[0]:
        pytest.skip("this system has no landlock")
    assert "seccomp" not in done[0]
    assert denied in done[1]
    version = ctypes.CDLL(None).syscall(sandbox.LANDLOCK, None, ctypes.c_size_t(0), 1)
    assert (done[2] == errno.EACCES) == (denied == "remove" and version >= 4)  # from then on it denies TCP


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (["seccomp", "landlock", "limits"], "seccomp + landlock + limits"),
        (["limits"], "limits only (no seccomp on this system)"),
        ([], "MISSING"),
    ],
)
def test_the_doctor_says_how_it_is_shut_in(found, words):
    assert sandbox_words(found).startswith(words)


def test_what_cannot_be_started_has_no_means(monkeypatch):
    monkeypatch.setattr("kvcli.worker_process.BOOT", "nonsense")
    assert means() == []


# --- its end


@pytest.mark.parametrize("code", [READS, WAITS], ids=["reads", "waits"])
@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_gone_with_its_parent(signal_, code):
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    worker = until(lambda: next(iter(psutil.Process(parent.pid).children()), None))
    parent.send_signal(signal_)
    parent.wait()
    assert until(lambda: is_gone(worker), 5)


def test_it_is_gone_with_its_parent_though_others_hold_its_pipes():
    parent = subprocess.Popen([sys.executable, "-c", WAITS], cwd=ROOT, stderr=subprocess.DEVNULL)
    worker = until(lambda: next(iter(psutil.Process(parent.pid).children()), None))
    with Path(f"/proc/{worker.pid}/fd/0").open("wb"), Path(f"/proc/{worker.pid}/fd/1").open("rb"):
        until(lambda: worker.cpu_times().user > 0.5)
        parent.kill()
        parent.wait()
        assert until(lambda: is_gone(worker), 5)


def test_a_parent_that_was_gone_before_it_began(monkeypatch):
    monkeypatch.setattr("kvcli.worker_process.os.getpid", lambda: 1)
    process = WorkerProcess("kvcli.sandbox", Limits())
    assert list(process.ask(b"", 30)) == []
    assert process.end() == 1


def test_it_ends_by_its_own_clock(tmp_path):
    """Started by hand: nobody watches."""
    process = WorkerProcess("tests.test_sandbox", Limits(wall=0.2, cpu=20))
    assert list(process.ask(b"", 20)) == []
    assert process.end() == -signal.SIGALRM


@pytest.mark.parametrize("wait", ["time.sleep(.1)", "pass"], ids=["drops", "a flood"])
def test_an_answer_without_end_does_not_stop_the_clock(monkeypatch, wait):
    code = "import time\nend = time.monotonic() + 8\nwhile time.monotonic() < end: print('x', end='', flush=True)"
    code += f"; {wait}"
    monkeypatch.setattr("kvcli.worker_process.BOOT", code)
    process = WorkerProcess("", Limits(output=1 << 40))
    with pytest.raises(TooSlow):
        list(process.ask(b"", 0.7))
    process.end()


def test_what_does_not_listen_does_not_hold_its_parent_up(monkeypatch):
    monkeypatch.setattr("kvcli.worker_process.BOOT", "import os, time; os.read(0, 9000); time.sleep(10)")
    process = WorkerProcess("", Limits())
    with pytest.raises(TooSlow):
        list(process.ask(b"x" * 1_000_000, 0.7))
    assert process._process.poll() is None  # so nobody waited for it to end
    process.end()


def test_it_leads_a_session_of_its_own(monkeypatch):
    """A terminal's Ctrl-C goes to the parent alone, and what ends its group ends nobody else."""
    monkeypatch.setattr("kvcli.worker_process.BOOT", "import time; time.sleep(60)")
    process = WorkerProcess("", Limits())
    pid = process._process.pid
    sessions = os.getsid(pid), os.getpgid(pid)
    os.kill(pid, signal.SIGKILL)
    process.end()
    assert sessions == (pid, pid)


def test_it_is_killed_when_nobody_holds_it(monkeypatch):
    monkeypatch.setattr("kvcli.worker_process.BOOT", "import time; time.sleep(60)")
    process = WorkerProcess("", Limits())
    worker = psutil.Process(process._process.pid)
    del process
    assert is_gone(worker)


# --- what the tests stand on


def main(parent: int, limits: dict, file: None) -> int:
    """Run by `WorkerProcess`: busy for ever."""
    from kvcli.sandbox import enter_sandbox, set_limits

    set_limits(parent, limits)
    enter_sandbox()
    while True:
        pass


def said(code: str) -> str:
    run = [sys.executable, "-c", code]
    return subprocess.run(run, cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8", timeout=60).stdout


def until(found: Callable[[], object], seconds: float = 20.0):
    """What `found` returns once that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(psutil.NoSuchProcess):
            if result := found():
                return result
        time.sleep(0.01)
    raise AssertionError("it did not come true")


def is_gone(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True
