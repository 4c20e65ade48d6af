"""Keeping a chat, turn by turn, and how it is shown where one is chosen."""

from __future__ import annotations

import shlex
from contextlib import suppress
from os.path import samefile
from typing import TYPE_CHECKING

from kvcli.chat.chats import recent
from kvcli.chat.transcript import open_chat
from kvcli.commands.interrupt import Interrupt
from kvcli.errors import BadInput, BadModel
from kvcli.render.figures import long_size, plural

if TYPE_CHECKING:
    from pathlib import Path

    from kvcli.chat.conversation import Chat
    from kvcli.chat.transcript import Opened
    from kvcli.schemas.chat import ChatDocument
    from kvcli.world import World


def reopen(path: Path, *, holds: bool) -> Opened:
    """The conversation in that file; with `holds` no other kvcli can have it meanwhile."""
    try:
        return open_chat(path, holds=holds)
    except BadInput as error:
        if error.code == "chat_in_use":
            error.try_ = ("close it there", "--no-save, for a copy that is not kept", "kvcli chat, for a new one")
        raise


def model_of(world: World, opened: Opened) -> str:
    """The model that a chat was held with. A file from elsewhere may name only what is known and whole here."""
    name, path = opened.saved.model, opened.file.path
    with suppress(FileNotFoundError):
        if samefile(world.paths.chats / path.name, path):
            return name
    return known_here(world, name, path.name, "chats")


def known_here(world: World, name: str, file: str, own: str) -> str:
    """The model that a file from elsewhere names. Raises BadInput for one that is not known and complete here."""
    from kvcli.commands.models import known
    from kvcli.commands.setup import config_of, find

    if name == config_of(world).default_model:
        return name
    try:
        if name in dict(known(world)):
            find(world, name, allow_pickle=False)
            return name
    except BadModel:
        pass
    raise BadInput(
        f"{file} asks for the model {name}, and is none of your own {own}",
        code="foreign_model",
        lines=["a file from elsewhere may name only a model that is known and complete here"],
        try_=[f"-m {shlex.quote(name)}, if you agree", "-m MODEL, for another"],
    )


def keep(chat: Chat) -> str:
    """Keep the conversation as it is now; why that did not work, if it did not. A lost file costs no turn.

    Nor does Ctrl-C: the first is not heard, and one a second later, on a disk that hangs, gives up.
    """
    if not chat.messages and chat.file is None:
        return ""
    try:
        with Interrupt():
            chat.save()
    except KeyboardInterrupt:
        return "this chat is not kept: stopped"
    except BadInput as error:
        if error.code != "chat_changed":
            return f"this chat is not kept: {error.message}"
        chat.close()
        return keep(chat) or f"{error.message}; this chat goes on in {chat.save()}"
    return ""


def keep_read(talk: Chat) -> str:
    """Keep what the model has read, for later runs; what there is to say of it."""
    from kvcli.kept.shelf import STOPPED

    try:
        with Interrupt() as cancel:
            kept = talk.model.keep(cancel)
    except KeyboardInterrupt:
        return STOPPED
    if kept.why_not or kept.shelf is None:
        return kept.why_not
    return f"keys and values of what is read are kept in {kept.shelf.folder}, up to {long_size(kept.shelf.most)}"


def about(saved: ChatDocument | Chat) -> str:
    """One line: its title and how much there is."""
    files = [*(d for m in saved.messages for d in m.documents), *saved.pending]
    facts = [" ".join((saved.title or "").split()) or "untitled", plural(len(saved.messages) // 2, "question")]
    return " · ".join([*facts, plural(len(files), "document")] if files else facts)


def choices(world: World) -> list[tuple[str, str]]:
    """Names and contents of the latest conversations, numbered as /load takes them."""
    return [
        (f"{i}  {path.stem}", about(saved) if saved else "damaged")
        for i, (path, saved) in enumerate(recent(world.paths.chats), 1)
    ]
