"""A model that stays loaded: commands in forks of its process end, print and fail as those that load it themselves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch

from kvcli.commands.resident.share import can_share
from kvcli.demo import weights_dir
from kvcli.engine.loading import weights
from kvcli.environment import Paths
from kvcli.errors import ExitStatus
from kvcli.resident_client import connect, facts, folder_of, residents
from kvcli.settings.config import Sources
from kvcli.settings.profile import load_profile
from kvcli.version import __version__
from tests.fakes import Machine

ROOT = Path(__file__).parents[1]
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
QUESTION = "-f", "demo:report", "-p", "What is the stock of depot Gimness?"
ANSWER = "The stock of depot Gimness is 59 boxes of oil.\n"


class Resident:
    """`kvcli serve` of a copy of the demo model, and commands that use it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.home, self.model = folder / ("long" * 30), folder / "model"  # a socket's path may have 108 bytes
        shutil.copytree(weights_dir(), self.model)
        self.env = {**os.environ, "KVCLI_HOME": str(self.home), "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
        self.env |= {"OPENBLAS_NUM_THREADS": "1"}  # its threads end before a fork
        self.process = self.start(
            "serve", str(self.model), "-P", "exact", "--port", "0", "--set", "load.threads=2", *options
        )
        assert self.process.stdout is not None
        assert "http://127.0.0.1:" in self.process.stdout.readline()
        (file,) = (self.home / "state" / "resident").glob("*.json")
        self.parent = int(file.stem)

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-m", "kvcli", *args]
        return subprocess.Popen(command, env=self.env, text=True, cwd=self.home.parent, **pipes, **options)

    def __call__(self, *args: str, **env: str) -> tuple[int, str, str]:
        command, env = [sys.executable, "-m", "kvcli", *args], self.env | env
        done = subprocess.run(command, env=env, text=True, cwd=self.home.parent, capture_output=True, input="")
        return done.returncode, done.stdout, done.stderr

    @property
    def running(self) -> list[str]:
        """The processes of commands."""
        return Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text().split()

    @staticmethod
    def wait(until: Any) -> None:
        end = time.monotonic() + 60
        while not until():
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resident]:
    found = Resident(tmp_path_factory.mktemp("resident"))
    yield found
    with suppress(ProcessLookupError):
        os.kill(found.parent, signal.SIGKILL)
    found.process.kill()
    found.process.communicate()


@linux
def test_a_command_prints_the_same_and_ends_the_same(resident: Resident) -> None:
    status, said, notes = resident("chat", str(resident.model), "-v", "--no-save", *QUESTION)
    assert (status, said) == (0, ANSWER)
    assert "kvcli.server" not in notes  # it did not load the model itself
    found = json.loads(resident("chat", str(resident.model), "--json", "--no-save", "-p", "hello")[1])
    assert (found["model"]["id"], found["finish"]) == (str(resident.model), "stop")
    assert resident("chat", str(resident.model), "-f", "none.pdf", "-p", "?")[0] == ExitStatus.BAD_INPUT
    (server,) = json.loads(resident("ps", "--json")[1])["servers"]
    assert (server["pid"], server["running"], server["load"]) == (resident.process.pid, 0, ["threads = 2"])


@linux
def test_the_parent_has_one_thread_of_all_libraries(resident: Resident) -> None:
    """A fork waits for ever for threads of OpenMP that its parent had."""
    assert os.listdir(f"/proc/{resident.parent}/task") == [str(resident.parent)]


@linux
@pytest.mark.parametrize("name", ["TERM", *(pytest.param(n, marks=pytest.mark.slow) for n in ("INT", "KILL"))])
def test_signals_reach_the_command_and_its_status_comes_back(resident: Resident, name: str) -> None:
    client = resident.start("chat", str(resident.model), "--no-save", *QUESTION)
    resident.wait(lambda: resident.running)
    time.sleep(0.3)  # before that, the process is not yet the command
    number = signal.Signals[f"SIG{name}"]
    client.send_signal(number)
    client.communicate(timeout=60)
    assert client.returncode == (130 if name == "INT" else -number)
    resident.wait(lambda: not resident.running)


@linux
def test_a_chat_in_a_terminal_stops_and_continues_with_the_shell(resident: Resident) -> None:
    shell = pexpect.spawn("bash", ["--norc", "-i"], env={**resident.env, "PS1": "shell$ ", "TERM": "xterm"}, timeout=60)
    shell.sendline(f"{sys.executable} -m kvcli chat {resident.model}")
    shell.expect("> ")
    shell.send("hello\r")
    shell.expect("> ")
    shell.send("\x1a")
    shell.expect("Stopped")
    shell.sendline("bg; echo $((40 + 2)); sleep 0.3")  # typed for the shell, although the chat continues
    shell.expect("42")
    shell.sendline("fg")
    shell.expect("> ")
    shell.send("\x04")
    shell.expect(r"shell\$ ")
    shell.sendline("echo ends with $?")
    shell.expect("ends with 0")
    shell.close(force=True)


@linux
@pytest.mark.slow
def test_a_command_that_needs_something_else_loads_it_and_says_why(resident: Resident) -> None:
    asks = "chat", str(resident.model), "-v", "-p"
    said = resident(*asks, "", OMP_NUM_THREADS="3")[2]
    assert "this command loads the model itself: OMP_NUM_THREADS differ" in said
    assert "the server has another load.quant" in resident(*asks, "hello", "--quant", "int8")[2]
    weights = next(resident.model.glob("*.safetensors"))
    os.utime(weights)
    assert "its files changed since" in resident(*asks, "hello")[2]


@linux
def test_a_command_outlives_its_server_and_its_client_reports_that_it_was_killed(resident: Resident) -> None:
    resident.wait(lambda: not resident.running)
    client = resident.start("chat", str(resident.model), "--no-save")  # which waits for a question
    resident.wait(lambda: resident.running)
    (process,) = resident.running
    time.sleep(0.3)
    assert "; still running: 1 command" in " ".join(resident("stop", str(resident.model))[2].split())
    assert resident.process.wait(60) == -signal.SIGTERM  # after its running answers
    resident.wait(lambda: not list((resident.home / "state" / "resident").iterdir()))
    resident.wait(lambda: not Path("/proc", str(resident.parent)).exists())
    os.kill(int(process), signal.SIGKILL)
    _, said = client.communicate(timeout=60)
    assert (client.returncode, "of this command" in said) == (ExitStatus.ENGINE_UNREACHABLE, True)
    resident.wait(lambda: not Path("/proc", process).exists())


@linux
@pytest.mark.slow
def test_a_server_ends_after_a_time_without_requests_and_commands(tmp_path: Path) -> None:
    found = Resident(tmp_path, "--keep", "2")
    client = found.start("chat", str(found.model), "--no-save")  # which waits for a question
    found.wait(lambda: found.running)
    time.sleep(4)
    assert found.process.poll() is None
    client.communicate("hello")
    assert found.process.wait(60) == 0


@pytest.mark.parametrize("environ", [{"KVCLI_HOME": "/a"}, {"XDG_STATE_HOME": "/b"}, {"XDG_STATE_HOME": "b"}, {}])
def test_the_client_finds_the_folder_of_sockets_without_imports(environ: dict[str, str]) -> None:
    if sys.platform == "linux":
        assert folder_of(environ) == Paths.of(environ).state / "resident"


@linux
def test_only_what_is_read_once_must_be_the_same() -> None:
    mine = facts([], {"LANG": "C", "TERM": "xterm"})
    assert mine == facts([], {"LANG": "C", "TERM": "dumb", "KVCLI_SPEC__METHOD": "off"})
    assert mine != facts([], {"LANG": "de"})
    assert mine != facts(["--offline"], {"LANG": "C"})
    code = "import json; from kvcli.resident_client import facts; print(json.dumps(facts([], {})))"
    nice = [subprocess.check_output([*nice, sys.executable, "-c", code], text=True) for nice in ([], ["nice", "-n1"])]
    assert nice[0] != nice[1]  # a command at low priority must not run at that of the resident process


@linux
def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    about = tmp_path / "1.json"
    about.write_text(json.dumps({"version": __version__}))
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError):
        next(residents(tmp_path))
    tmp_path.chmod(0o700)
    (found,) = residents(tmp_path)
    assert connect(found) is None
    assert not about.exists()


def test_ps_and_stop_without_a_server(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert json.loads(machine("stop", "demo", "--json").out)["code"] == "not_running"
    assert "no server has a model" in machine("stop").err
    if sys.platform != "win32":
        folder_of(machine.world().environ).mkdir(parents=True, mode=0o755)
        assert json.loads(machine("ps", "--json").out)["code"] == "folder_unusable"


def test_a_model_is_shared_where_a_process_can_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_profile("exact", sources=Sources(), sets=("load.device=cpu",))
    assert can_share(profile) == (sys.platform == "linux")
    monkeypatch.setattr(weights, "find_device", lambda name: torch.device("cuda", 0))
    assert not can_share(profile)
