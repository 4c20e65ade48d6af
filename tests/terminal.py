"""A terminal in memory with a program running in it: what it shows, what scrolled off, what was sent to it."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pexpect
import pyte

ROOT = Path(__file__).parents[1]


class Terminal:
    """`python -m tests.chat_driver WHAT FACTS` in a terminal of that size."""

    def __init__(self, what: str, facts: dict[str, Any], columns: int = 80, lines: int = 24, **env: str) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=2000)
        self.emulator = pyte.Stream(self.screen)
        self.raw = ""
        home = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
        driver = f"tests.{'summarize' if what == 'summarize' else 'chat'}_driver"
        args = ["-m", driver, what, json.dumps(facts)]
        if history := env.pop("history", ""):
            args.append(history)
        command = [sys.executable, *args]
        if through := env.pop("through", ""):  # a shell's pipe
            command = ["sh", "-c", f"{shlex.join(command)} | {through}"]
        self.child = pexpect.spawn(
            command[0],
            command[1:],
            cwd=str(ROOT),
            env=home | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"} | env,
            dimensions=(lines, columns),
            encoding="utf-8" if "iso" not in env.get("PYTHONIOENCODING", "") else "latin-1",
            timeout=20,
        )

    def read(self, seconds: float = 0.05) -> None:
        """Take in what the program wrote meanwhile."""
        try:
            text = self.child.read_nonblocking(1 << 16, timeout=seconds)
        except pexpect.TIMEOUT:
            return
        except pexpect.EOF:
            self.is_over = True
            return
        self.raw += text
        self.emulator.feed(text)

    is_over = False

    def wait(self, text: str, seconds: float = 20) -> None:
        """Until `text` is on the screen or has scrolled off it."""
        end = time.monotonic() + seconds
        while text not in self.text and not self.is_over:
            assert time.monotonic() < end, f"{text!r} did not come:\n{self.text}"
            self.read()
        assert text in self.text, f"ended without {text!r}:\n{self.text}"

    def finish(self) -> int:
        """Until the program ends; its exit status."""
        end = time.monotonic() + 20
        while not self.is_over:
            assert time.monotonic() < end, f"still running:\n{self.text}"
            self.read()
        self.child.close()
        return int(self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus)

    def send(self, text: str) -> None:
        self.child.send(text)

    def resize(self, columns: int) -> None:
        lines = self.screen.lines
        self.screen.resize(lines, columns)
        self.child.setwinsize(lines, columns)

    @property
    def lines(self) -> list[str]:
        """All lines, those that scrolled off first; trailing blank ones are left out."""
        off = ["".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top]
        shown = [line.rstrip() for line in [*off, *self.screen.display]]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def text(self) -> str:
        return "\n".join(self.lines)
