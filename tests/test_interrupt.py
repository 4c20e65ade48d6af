"""Ctrl-C while a model is loaded: heard, whatever swallows the first error."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from unittest.mock import MagicMock

import pytest

from kvcli.commands import outlook
from kvcli.commands.interrupt import insisting
from kvcli.commands.loading import load_model
from kvcli.render import stream


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def swallow() -> None:
    with suppress(BaseException):
        press()


def swallow_and_stumble() -> None:
    """As an import goes on with half of a module."""
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


def test_a_command_that_loads_hears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "busy_word", lambda *_: nullcontext())
    monkeypatch.setattr(outlook, "prepare", lambda *_: swallow() or MagicMock())
    with pytest.raises(KeyboardInterrupt):
        load_model(MagicMock(), MagicMock(), MagicMock(), MagicMock())
