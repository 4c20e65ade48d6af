"""Messages as files: the JSON a chat is resumed from, and the markdown or JSON it is exported as."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from os.path import expanduser, realpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import ValidationError

from kvcli.api import Finish
from kvcli.chat.chat_file import ChatFile
from kvcli.documents import Document, with_documents
from kvcli.errors import BadInput, UsageError, reading, writing
from kvcli.files import private_folder, write_private
from kvcli.schemas.chat import ChatDocument, SavedDocument, SavedMessage

if TYPE_CHECKING:
    from kvcli.chat.conversation import Chat

Role = Literal["user", "assistant"]
SCHEMA: Final = "kvcli.chat/1"
COARSEST = 2.0  # seconds between two dates that every file system tells apart
FINISH_MARKS = {
    "stop": "",
    "interrupted": " *[stopped]*",
    "length": " *[cut at the length limit]*",
    "loop": " *[stopped in a loop]*",
}


@dataclass(frozen=True, slots=True)
class Message:
    """What one side said. Documents stand before the text of the question they came with."""

    role: Role
    text: str
    documents: tuple[Document, ...] = ()
    finish: Finish | None = None  # of an answer: how it ended

    @property
    def content(self) -> str:
        """What the model reads."""
        return with_documents(self.text, self.documents)


@dataclass(frozen=True, slots=True)
class Opened:
    """A conversation as its file has it, and the file."""

    file: ChatFile
    saved: ChatDocument

    @property
    def messages(self) -> list[Message]:
        return [Message(m.role, m.text, tuple(map(_document, m.documents)), m.finish) for m in self.saved.messages]

    @property
    def pending(self) -> list[Document]:
        return waiting(self.saved)


def chats_folder() -> Path:
    """Where conversations are kept unless the caller says otherwise."""
    from platformdirs import user_data_path

    return user_data_path("kvcli", appauthor=False) / "chats"


def save_chat(chat: Chat, title: str | None = None) -> Path:
    """Write `chat` to its file, a new one in its folder the first time. Nothing is written where nothing is new."""
    chat.title = title or chat.title or first_words(chat)
    folder = chat.folder or chats_folder()
    file = chat.file or ChatFile(
        folder / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}.json", holds=chat.holds
    )
    made = as_json(chat)
    if chat.file is not None and made | {"saved": ""} == chat.kept:
        return file.path
    with writing(file.path):
        private_folder(file.path.parent)
        file.write((json.dumps(made, ensure_ascii=False, indent=1) + "\n").encode())
    chat.file, chat.kept = file, made | {"saved": ""}
    _come_first(file.path, Path(realpath(folder)))
    return file.path


def _come_first(path: Path, folder: Path) -> None:
    """Date a chat of the folder after all others, whatever the clock says: the latest is the one that was kept last."""
    others = [other for other in newest(folder) if other != path] if path.parent == folder else []
    with suppress(OSError):  # removed meanwhile
        latest = max((other.stat().st_mtime for other in others[:1]), default=0.0)
        if path.stat().st_mtime <= latest:
            os.utime(path, (latest + COARSEST, latest + COARSEST))


def newest(folder: Path) -> list[Path]:
    """All chats of a folder, that which was kept last first."""
    dated = []
    for path in folder.glob("*.json"):
        try:
            dated.append((path.stat().st_mtime_ns, path))
        except OSError:  # removed meanwhile
            continue
    return [path for _, path in sorted(dated, reverse=True)]


def open_chat(path: Path, *, holds: bool = False) -> Opened:
    """The conversation that a file keeps; with `holds` nobody else can open it so until its file is closed."""
    file = ChatFile(path, holds=holds)
    with reading(path):
        try:
            return Opened(file, ChatDocument.model_validate_json(file.read()))
        except FileNotFoundError:
            raise BadInput(f"no such conversation: {path}", code="file_missing") from None
        except ValidationError as error:
            file.close()
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
            raise BadInput(f"{path} is not a saved conversation", code="not_a_chat", lines=[why]) from None


def export_chat(chat: Chat, path: Path, *, overwrite: bool = False) -> Path:
    """Write `chat` to `path`, in the form its name asks for."""
    path = Path(expanduser(path))
    write = {".md": markdown, ".json": _pretty, ".jsonl": json_lines}.get(path.suffix.lower())
    if write is None:
        raise UsageError(
            f"cannot tell the format from the name {path.name}",
            code="unknown_format",
            try_=["a name in .md, .json or .jsonl"],
        )
    if not path.parent.is_dir():
        raise BadInput(f"no such folder: {path.parent}", code="file_missing")
    if path.exists() and not overwrite:
        raise BadInput(f"{path} exists already", code="file_exists", try_=["another name, or remove it first"])
    with writing(path):
        write_private(path, write(chat))
    return path


def as_json(chat: Chat) -> dict[str, Any]:
    """Everything needed to go on later, documents included."""
    return ChatDocument(
        schema=SCHEMA,
        title=chat.title,
        model=chat.called or chat.model.info.id,
        saved=datetime.now().astimezone().isoformat(timespec="seconds"),
        system=chat.system,
        messages=[
            SavedMessage(role=m.role, text=m.text, documents=[_saved(d) for d in m.documents], finish=m.finish)
            for m in chat.messages
        ],
        pending=[_saved(d) for d in chat.pending],
    ).document()


def json_lines(chat: Chat) -> str:
    """One message a line with `role` and `content`, as training and evaluation tools read them."""
    rows = [{"role": "system", "content": chat.system}] if chat.system else []
    rows += [{"role": m.role, "content": m.content} for m in chat.messages]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def markdown(chat: Chat) -> str:
    """For people: headings by speaker; documents by name only."""
    parts = [f"# {chat.title or first_words(chat) or 'Conversation'}"]
    if chat.system:
        parts.append(f"## System\n\n{chat.system}")
    for message in chat.messages:
        if message.role == "user":
            files = "".join(f"*{d.name}, {d.lines:,} line{'s' * (d.lines != 1)}*\n\n" for d in message.documents)
            parts.append(f"## You\n\n{files}{message.text}")
        else:
            mark = FINISH_MARKS[message.finish or "stop"]
            parts.append(f"## {chat.model.info.id}\n\n{message.text}{mark}")
    return "\n\n".join(parts) + "\n"


def first_words(chat: Chat, width: int = 60) -> str | None:
    """A title from the first question."""
    if not chat.messages:
        return None
    words = " ".join(chat.messages[0].text.split())
    return words if len(words) <= width else words[: width - 1].rsplit(" ", 1)[0] + "…"


def _pretty(chat: Chat) -> str:
    return json.dumps(as_json(chat), ensure_ascii=False, indent=2) + "\n"


def waiting(saved: ChatDocument) -> list[Document]:
    """The documents that nothing was asked about yet."""
    return list(map(_document, saved.pending))


def _saved(document: Document) -> SavedDocument:
    return SavedDocument(name=document.name, sha256=document.sha256, text=document.text)


def _document(saved: SavedDocument) -> Document:
    return Document(saved.name, saved.text, saved.sha256)
