"""Keeping a chat, turn by turn, and how it is shown where one is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.chats import recent
from kvcli.errors import BadInput
from kvcli.render.figures import count
from kvcli.transcript import open_chat

if TYPE_CHECKING:
    from pathlib import Path

    from kvcli.conversation import Chat
    from kvcli.schemas.chat import ChatDocument
    from kvcli.transcript import Opened
    from kvcli.world import World


def folder(world: World) -> Path:
    return world.paths.data / "chats"


def reopen(path: Path, *, holds: bool) -> Opened:
    """The conversation in that file; with `holds` no other kvcli can have it meanwhile."""
    try:
        return open_chat(path, holds=holds)
    except BadInput as error:
        if error.code == "chat_in_use":
            error.try_ = ("close it there", "--no-save, for a copy that is not kept", "kvcli chat, for a new one")
        raise


def keep(chat: Chat) -> str:
    """Keep the conversation as it is now; why that did not work, if it did not. A lost file costs no turn."""
    if not chat.messages and chat.file is None:
        return ""
    try:
        chat.save()
    except BadInput as error:
        if error.code != "chat_changed":
            return f"this chat is not kept: {error.message}"
        chat.close()
        return keep(chat) or f"{error.message}; this chat goes on in {chat.save()}"
    return ""


def about(saved: ChatDocument | Chat) -> str:
    """One line: its title and how much there is."""
    files = [*(d for m in saved.messages for d in m.documents), *saved.pending]
    facts = [" ".join((saved.title or "").split()) or "untitled", _counted(len(saved.messages) // 2, "question")]
    return " · ".join([*facts, _counted(len(files), "document")] if files else facts)


def choices(world: World) -> list[tuple[str, str]]:
    """Names and contents of the latest conversations, numbered as /load takes them."""
    return [
        (f"{i}  {path.stem}", about(saved) if saved else "damaged")
        for i, (path, saved) in enumerate(recent(folder(world)), 1)
    ]


def _counted(n: int, noun: str) -> str:
    return f"{count(n)} {noun}{'' if n == 1 else 's'}"
