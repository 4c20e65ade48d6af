"""Ctrl-C while a model is loaded: heard, whatever swallows the first error."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvcli.__main__ import main
from kvcli.chat import model as model_module
from kvcli.commands.common import load_model as memory_check
from kvcli.commands.common.exits import Interrupt, insisting, interrupted, press_again
from kvcli.commands.common.load_model import load_model
from kvcli.errors import ExitStatus
from kvcli.render.turn import turn_view
from tests.fakes import Machine


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def swallow() -> None:
    with suppress(BaseException):
        press()


def swallow_and_stumble() -> None:
    """As an import continues half of a module."""
    swallow()
    raise AttributeError("a module that is there in part")


@pytest.mark.parametrize("load", [press, swallow, swallow_and_stumble])
def test_ctrl_c_while_loading_is_never_lost(load: Callable[[], None]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), insisting():
        load()
    assert signal.getsignal(signal.SIGINT) is before


def test_what_went_wrong_by_itself_stays_what_it_is() -> None:
    with pytest.raises(AttributeError), insisting():
        raise AttributeError("its own")
    with insisting():
        pass


def test_a_thread_that_loads_leaves_the_handler_alone() -> None:
    seen: list[object] = []

    def load() -> None:
        with insisting():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_where_a_shell_has_it_ignored_it_stays_so() -> None:
    """As behind `&` in a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with insisting(), Interrupt() as cancel:
            press()
        assert not cancel()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", ["chat -p hi", "bench --ctx 512", "spec doctor", "spec tune", "profile-heads"])
def test_every_command_that_loads_hears_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    real = model_module.load

    def load(*args: Any, **options: Any) -> Any:
        swallow()
        return real(*args, **options)

    monkeypatch.setattr(model_module, "load", load)
    done = Machine(tmp_path)(*command.split(), "-m", "demo")
    assert (done.exit, done.out) == (ExitStatus.INTERRUPTED, "")
    done = Machine(tmp_path)(*command.split(), "-m", "demo", "--json")
    assert done.exit == ExitStatus.INTERRUPTED
    said = json.loads(done.out)
    assert (said["schema"], said["code"], said["exit"], done.err) == ("kvcli.error/1", "interrupted", 130, "")


def test_ctrl_c_that_python_drops_comes_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Closes:
        def __del__(self) -> None:
            press()
            time.sleep(0.01)  # where it is heard

    monkeypatch.setattr("sys.unraisablehook", press_again)

    def load() -> None:
        Closes()
        for _ in range(500):  # a signal is heard between two of them
            time.sleep(0.01)

    for outer in (nullcontext, insisting):
        with pytest.raises(KeyboardInterrupt), outer():
            load()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("more", [["--json"], ["--json", "--stream"]])
def test_before_anything_is_imported_it_is_the_same_object(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvcli", *more])
    monkeypatch.setattr("kvcli.cli.main", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        main()
    world = Machine(tmp_path).world()
    interrupted(world, more)
    assert json.loads(capsys.readouterr().out) == json.loads(world.stdout.stream.text)


def test_one_object_and_no_other_is_printed(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for args in (["--json"], ["--json", "--stream"]):
        world = machine.world()
        assert interrupted(world, args) == ExitStatus.INTERRUPTED
        event = json.loads(world.stdout.stream.text)
        assert event["code" if len(args) == 1 else "event"] == ("interrupted" if len(args) == 1 else "error")
    world = machine.world()
    world.stdout.write("{}")
    assert (interrupted(world, ["--json"]), world.stdout.stream.text) == (130, "{}")


def test_what_is_looked_at_before_loading_hears_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_view, "busy_word", lambda *_: nullcontext())
    monkeypatch.setattr(memory_check, "prepare", lambda *_: swallow() or MagicMock())
    setup = MagicMock()
    setup.open_elsewhere.return_value = None
    with pytest.raises(KeyboardInterrupt):
        load_model(setup, MagicMock(), MagicMock(), MagicMock())
