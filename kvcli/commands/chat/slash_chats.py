"""The slash commands that save a chat and continue saved chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.commands.chat.save_chat import FEW, about, choices, reopen

if TYPE_CHECKING:
    from kvcli.commands.chat.repl import Repl
    from kvcli.schemas.sessions import SessionEntry

RESUME = "continue a saved chat: its number, name, title or file; or list them"


def save(repl: Repl, argument: str) -> None:
    name = repl.chat.save(argument or None)
    repl.say(f"saved as {name}" + ("" if repl.keeps else "; from now on after each answer"))
    repl.keeps = True
    repl.say(f"wrote {repl.chat.sessions.save(name)}")


def resume(repl: Repl, argument: str) -> None:
    kept, wanted = repl.chat.sessions, argument.strip("\"'")
    if not wanted:
        _list(repl, kept.entries())
        return
    if repl.chat.kept is not None and kept.name_of(wanted, repl.world.cwd) == repl.chat.kept.name:
        repl.say("this chat is open already")
        return
    opened = reopen(kept, repl.world, wanted, holds=repl.keeps)
    repl.chat.take(opened)
    repl.last = None
    was = opened.saved.model
    under = f"; its model was {was}" if was != repl.chat.called else ""
    repl.say(f"continues {about(repl.chat)}{under}; it is read with the next question")


def chats(repl: Repl, argument: str) -> None:
    kept = repl.chat.sessions
    if not argument:
        _list(repl, kept.entries())
    elif found := kept.search(argument)[:FEW]:
        repl.listing([(entry.id, " ".join((entry.found or entry.title or "").split())) for entry in found])
    else:
        repl.say(f"no saved chat contains {argument}")


def fork(repl: Repl, argument: str) -> None:
    before = repl.chat.kept
    if before is None or not repl.chat.messages:
        repl.say("this chat is not saved yet, so it cannot be copied")
        return
    repl.chat.save()
    repl.chat.close()
    repl.say(f"continues as {repl.chat.save(argument or None)}; {before.name} does not change")


def _list(repl: Repl, entries: Sequence[SessionEntry]) -> None:
    if entries:
        repl.listing(choices(entries))
    else:
        repl.say("there are no saved chats yet")
