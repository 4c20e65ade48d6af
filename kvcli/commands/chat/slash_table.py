"""The table of slash commands: name, usage, help and handler of each. slash.py has the one of the chat."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcli.errors import KvcliError, UsageError
from kvcli.settings.renamed import FORMER

Handler = Callable[[Any, str], None]  # takes the chat (repl.py) and the argument
Register = Callable[[Handler], Handler]


@dataclass(frozen=True, slots=True)
class Slash:
    """A slash command. `completes`: kind of its argument, for completion with the Tab key."""

    name: str
    usage: str  # its argument, as shown in /help
    help: str
    run: Handler
    also: tuple[str, ...] = ()
    completes: str = ""  # path | profile | model | key | stats | command | document | chat

    @property
    def call(self) -> str:
        return f"/{self.name} {self.usage}".rstrip()


class SlashTable(dict[str, Slash]):
    """Slash commands by name, in order of registration."""

    def add(self, name: str, usage: str, help: str, also: tuple[str, ...] = (), completes: str = "") -> Register:
        """Register a function as a slash command."""

        def register(run: Handler) -> Handler:
            self[name] = Slash(name, usage, help, run, also, completes)
            return run

        return register

    def find(self, name: str) -> Slash:
        """Return the command of that name or alias. Raises an error that suggests a similar name."""
        names = {n: command for command in self.values() for n in (command.name, *command.also)}
        if name in names:
            return names[name]
        near = difflib.get_close_matches(name, names, 1) or [n for n in names if name and n.startswith(name)][:1]
        near = [FORMER[f"/{name}"][1:]] if f"/{name}" in FORMER else near
        raise UsageError(
            f"there is no command /{name}",
            code="unknown_command",
            try_=[f"did you mean /{near[0]}?"] if near else ["/help", f"//{name} sends it as text"],
        )

    def reworded(self, error: KvcliError) -> KvcliError:
        """Return the error with `/think on` for `--think on`, so that its advice can be typed in a chat."""
        typed = "|".join(name for name, command in self.items() if command.usage)

        def in_chat(text: str) -> str:
            return text if text.startswith("kvcli ") else re.sub(rf"(?<!\S)--({typed})(?![\w-])", r"/\1", text)

        error.message, error.try_ = in_chat(error.message), tuple(map(in_chat, error.try_))
        return error

    def rows(self) -> list[tuple[str, str]]:
        """Return usage and help of every command."""
        return [(c.call, c.help + f" ({', '.join('/' + n for n in c.also)})" * bool(c.also)) for c in self.values()]
