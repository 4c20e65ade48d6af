"""Messages as files: the JSON a chat is resumed from, and the markdown or JSON it is exported as."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from datetime import datetime
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvcli.api import Finish
from kvcli.documents import Document, with_documents
from kvcli.errors import BadInput, UsageError
from kvcli.files import private_folder, write_private

if TYPE_CHECKING:
    from kvcli.conversation import Chat

Role = Literal["user", "assistant"]
SCHEMA = "kvcli.chat/1"
FINISH_MARKS = {"stop": "", "interrupted": " *[stopped]*", "length": " *[cut at the length limit]*"}


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


def chats_folder() -> Path:
    """Where conversations are kept unless the caller says otherwise."""
    from platformdirs import user_data_path

    return user_data_path("kvcli", appauthor=False) / "chats"


def save_chat(chat: Chat, title: str | None = None) -> Path:
    """Write `chat` to its file, a new one in its folder the first time."""
    chat.title = title or chat.title or first_words(chat)
    if chat.path is None:
        folder = private_folder(chat.folder or chats_folder())
        chat.path = folder / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}.json"
    write_private(chat.path, json.dumps(as_json(chat), ensure_ascii=False, indent=1) + "\n")
    return chat.path


def load_chat(chat: Chat, path: Path) -> None:
    """Put the saved conversation into `chat`; nothing changes if the file is not one."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["schema"] != SCHEMA:
            raise ValueError(f"schema is {saved['schema']!r}, not {SCHEMA!r}")
        messages = [_message(m) for m in saved["messages"]]
        pending = [_document(d) for d in saved["pending"]]
        system, title = saved["system"], saved["title"]
    except FileNotFoundError:
        raise BadInput(f"no such conversation: {path}", code="file_missing") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}", code="file_unreadable") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is not a saved conversation", code="not_a_chat", lines=[repr(error)]) from None
    chat.messages, chat.pending, chat.system, chat.title, chat.path = messages, pending, system, title, path


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
    try:
        write_private(path, write(chat))
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}", code="file_unwritable") from None
    return path


def as_json(chat: Chat) -> dict[str, Any]:
    """Everything needed to go on later, documents included."""
    return {
        "schema": SCHEMA,
        "title": chat.title,
        "model": chat.model.info.id,
        "saved": datetime.now().astimezone().isoformat(timespec="seconds"),
        "system": chat.system,
        "messages": [
            {"role": m.role, "text": m.text, "documents": [_as_dict(d) for d in m.documents], "finish": m.finish}
            for m in chat.messages
        ],
        "pending": [_as_dict(d) for d in chat.pending],
    }


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


def _as_dict(document: Document) -> dict[str, str]:
    return {"name": document.name, "sha256": document.sha256, "text": document.text}


def _document(saved: dict[str, Any]) -> Document:
    return Document(str(saved["name"]), str(saved["text"]), str(saved["sha256"]))


def _message(saved: dict[str, Any]) -> Message:
    if saved["role"] not in ("user", "assistant") or saved["finish"] not in (None, *get_args(Finish)):
        raise ValueError(f"unknown role or finish: {saved['role']!r}, {saved['finish']!r}")
    documents = tuple(_document(d) for d in saved["documents"])
    return Message(saved["role"], str(saved["text"]), documents, saved["finish"])
