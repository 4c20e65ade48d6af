"""Slash commands that save the chat and continue saved chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.commands.chat.save_chat import FEW, about, choices, reopen

if TYPE_CHECKING:
    from kvcli.commands.chat.repl import Repl
    from kvcli.schemas.sessions import SessionEntry

RESUME = "go on with a kept one: its number, name, title or file; or list them"


def save(repl: Repl, argument: str) -> None:
    name = repl.chat.save(argument or None)
    repl.say(f"kept as {name}" + ("" if repl.keeps else ", from now on with each turn"))
    repl.keeps = True
    repl.say(f"wrote {repl.chat.sessions.save(name)}")


def resume(repl: Repl, argument: str) -> None:
    kept, wanted = repl.chat.sessions, argument.strip("\"'")
    if not wanted:
        _list(repl, kept.entries())
        return
    if repl.chat.kept is not None and kept.name_of(wanted, repl.world.cwd) == repl.chat.kept.name:
        repl.say("that is this conversation")
        return
    opened = reopen(kept, repl.world, wanted, holds=repl.keeps)
    repl.chat.take(opened)
    repl.last = None
    was = opened.saved.model
    under = f"; it was held with {was}" if was != repl.chat.called else ""
    repl.say(f"goes on with {about(repl.chat)}{under}; it is read with the next question")


def sessions(repl: Repl, argument: str) -> None:
    kept = repl.chat.sessions
    if not argument:
        _list(repl, kept.entries())
    elif found := kept.search(argument)[:FEW]:
        repl.listing([(entry.id, " ".join((entry.found or entry.title or "").split())) for entry in found])
    else:
        repl.say(f"no conversation has {argument}")


def fork(repl: Repl, argument: str) -> None:
    before = repl.chat.kept
    if before is None or not repl.chat.messages:
        repl.say("nothing is kept yet, so there is nothing to stay as it is")
        return
    repl.chat.save()
    repl.chat.close()
    repl.say(f"goes on as {repl.chat.save(argument or None)}; {before.name} stays as it is")


def _list(repl: Repl, entries: Sequence[SessionEntry]) -> None:
    if entries:
        repl.listing(choices(entries))
    else:
        repl.say("no conversation is kept yet")
