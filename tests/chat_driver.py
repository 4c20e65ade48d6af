"""Runs in a terminal of the tests: one turn, or the whole chat, on a model that is told what to say.

python -m tests.chat_driver turn '{"answer": "Hello", "delay": 0.01}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvcli.chat.conversation import Chat
from kvcli.commands.common.exits import Interrupt
from kvcli.environment import Environment
from kvcli.errors import KvcliError
from kvcli.render.terminal.errors import print_error
from kvcli.render.terminal.screen import Screen
from kvcli.render.turn.status_row import ProcessMemory, RowOptions
from kvcli.render.turn.turn_summary import HeaderFacts, header
from kvcli.render.turn.turn_view import show_turn
from tests.fake_model import FakeModel, FakeProfile


class Profiles:
    """Three names, two keys."""

    def names(self):
        return ["exact", "fafo", "lean"]

    def keys(self):
        return ["kv.dtype", "sample.temperature"]

    def resolve(self, name, sets):
        return FakeProfile(name)


def memory():
    return ProcessMemory("ram", 431 << 20)


def main(what, facts, history=""):
    world = Environment.real()
    stats = facts.pop("stats", "live")
    world.options.quiet = facts.pop("quiet", False)
    is_markdown = facts.pop("markdown", False)
    model, screen = FakeModel(**facts), Screen.of(world, stats)
    screen.markdown = is_markdown
    if what == "repl":
        from kvcli.commands.chat.repl import Repl
        from kvcli.commands.chat.slash import SLASH

        for line in header(model.info, HeaderFacts("0.1.0", "fafo", "exact"), screen.err.width):
            screen.err.line((line, ""))
        options = {"profiles": Profiles(), "profile": "fafo", "memory": memory}
        options["history"] = Path(history) if history else None
        return int(Repl(Chat(model), screen, world, SLASH, **options).run())
    try:
        with Interrupt() as cancel:
            show_turn(model.stream("x" * 191, cancel=cancel), screen, RowOptions("fafo", memory, cancel))
    except KvcliError as error:
        print_error(screen.err, error)
        return int(error.exit)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:]))
