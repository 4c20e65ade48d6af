"""Saving of a chat after each turn, and its line in lists of saved chats."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from kvcli.chat.saved_chats import SavedChat, SavedChats
from kvcli.commands.common.exits import Interrupt
from kvcli.commands.common.run_setup import config_of, find
from kvcli.commands.models.model_names import known
from kvcli.errors import BadInput, BadModel
from kvcli.render.terminal.errors import print_warning
from kvcli.render.terminal.terminal import Terminal, long_size, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcli.chat.conversation import Chat
    from kvcli.chat.text_session import TextSession
    from kvcli.environment import Environment
    from kvcli.prefix_cache.prefix_cache import SaveResult as Read
    from kvcli.schemas.chats import ChatEntry

FEW = 10  # entries of a list to choose from


def saved_chats_of(world: Environment) -> SavedChats:
    """Return the user's saved chats."""

    def warn(text: str) -> None:
        print_warning(Terminal.of(world, "stderr"), text)

    return SavedChats(world.paths.data, warn)


def reopen(saved_chats: SavedChats, world: Environment, wanted: str | None, *, is_locked: bool) -> SavedChat:
    """Open the saved chat of this name. `is_locked`: lock it against other kvcli processes."""
    try:
        return saved_chats.open(wanted, is_locked=is_locked, cwd=world.cwd)
    except BadInput as error:
        if error.code == "chat_in_use":
            error.try_ = ("close it there", "--no-save, for a copy that is not saved", "kvcli chat, for a new chat")
        elif error.code == "file_unwritable":  # a read-only home
            error.try_ = ("--no-save, for a copy that is not saved", "KVCLI_HOME=FOLDER, for another folder")
        raise


def model_of(world: Environment, opened: SavedChat) -> str | None:
    """Return the model of a saved chat. A file from elsewhere may name only models known and complete here."""
    if not opened.origin:
        return opened.saved.model or None
    return known_here(world, opened.saved.model, "this file", "chats")


def adapters_of(opened: SavedChat) -> dict[str, tuple[object, str]]:
    """Return the adapters of a saved chat, as if they were typed. A file from elsewhere may name none."""
    adapters = opened.saved.adapters
    if adapters and opened.origin:
        raise BadInput(
            f"this file names {plural(len(adapters), 'adapter')}, and is not one of your own chats",
            code="foreign_model",
            lines=adapters[:3],
            try_=["-m MODEL --adapter PATH, if you agree", "-m MODEL, without them"],
        )
    return {"load.adapters": (tuple(adapters), "--adapter")} if adapters else {}


def known_here(world: Environment, name: str, file: str, own: str) -> str:
    """Return the model that a file from elsewhere names. Raises BadInput if it is not known and complete here."""
    if name == config_of(world).default_model:
        return name
    try:
        if name in dict(known(config_of(world), world.paths.data)):
            find(world, name, allow_pickle=False)
            return name
    except BadModel:
        pass
    raise BadInput(
        f"{file} names the model {name}, and is not one of your own {own}",
        code="foreign_model",
        lines=["a file from elsewhere may only name a model that is complete on this machine"],
        try_=[f"-m {shlex.quote(name)}, if you agree", "-m MODEL, for another model"],
    )


def try_save(chat: Chat) -> str:
    """Save the chat; returns the reason if that failed. A failure does not end the chat.

    The first Ctrl-C is ignored. One a second later, as on a disk that hangs, stops saving.
    """
    if not chat.messages and not chat.is_saved:
        return ""
    try:
        with Interrupt():
            chat.save()
    except KeyboardInterrupt:
        return "this chat is not saved: stopped"
    except BadInput as error:
        if error.code != "chat_changed":
            return f"this chat is not saved: {error.message}"
        chat.close()
        return try_save(chat) or f"{error.message}; this chat is saved as {chat.save()}"
    return ""


def save_kv_cache(text_session: TextSession) -> str:
    """Save the KV cache to the prefix cache for later runs; returns a note for the user, or ""."""
    from kvcli.prefix_cache.prefix_cache import STOPPED

    try:
        with Interrupt() as cancel:
            return said_of(text_session.keep(cancel))
    except KeyboardInterrupt:
        return STOPPED


def said_of(kept: Read) -> str:
    """Return the note on a save to the prefix cache."""
    if kept.why_not or kept.prefix_cache is None:
        return kept.why_not
    return f"prefix cache: {kept.prefix_cache.folder} (limit {long_size(kept.prefix_cache.most)}; see kvcli cache)"


def about(talk: Chat) -> str:
    """Return one line with the chat's title and numbers of questions and documents."""
    return facts(talk.title, talk.n_questions(), len(talk.documents))


def facts(title: str | None, questions: int, documents: int) -> str:
    said = [" ".join((title or "").split()) or "untitled", plural(questions, "question")]
    return " · ".join([*said, plural(documents, "document")] if documents else said)


def choices(entries: Sequence[ChatEntry]) -> list[tuple[str, str]]:
    """Return names and contents of the latest chats, numbered as for /resume."""
    return [
        (f"{i}  {entry.id}", facts(entry.title, entry.questions, entry.documents))
        for i, entry in enumerate(entries[:FEW], 1)
    ]
