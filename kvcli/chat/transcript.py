"""Messages of a chat as a document: its saved form, and its export as markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvcli.api import Finish
from kvcli.documents import Document, with_documents
from kvcli.errors import BadInput, UsageError, writing
from kvcli.files import write_private
from kvcli.schemas.chat import SCHEMA, ChatDocument, Figures, LeftOut, SavedDocument, SavedMessage

if TYPE_CHECKING:
    from kvcli.chat.conversation import Chat
    from kvcli.engine.stats import Stats

Role = Literal["user", "assistant"]
FINISH_MARKS = {
    "stop": "",
    "interrupted": " *[stopped]*",
    "length": " *[cut at the length limit]*",
    "loop": " *[stopped in a loop]*",
}


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat. Its documents precede its text in the prompt."""

    role: Role
    text: str
    documents: tuple[Document, ...] = ()
    finish: Finish | None = None  # of an answer: how it ended
    figures: Figures | None = None  # of an answer: its times and token counts
    thinking: str = ""  # of an answer: saved, but left out of later prompts

    @property
    def content(self) -> str:
        """Text of the message in the prompt, with its documents."""
        return with_documents(self.text, self.documents)


def messages_of(saved: ChatDocument) -> list[Message]:
    return [Message(m.role, m.text, documents_of(m.documents), m.finish, m.figures, m.thinking) for m in saved.messages]


def documents_of(saved: Sequence[SavedDocument]) -> tuple[Document, ...]:
    return tuple(Document(one.name, one.text, one.sha256) for one in saved)


def figures_of(stats: Stats) -> Figures:
    """Return the saved figures of a turn. Figures that were not measured are None."""
    return Figures.from_attributes(
        stats,
        first_token=stats.first_token or None,
        read_tok_s=stats.read_tok_s or None,
        decode_tok_s=stats.decode_tok_s or None,
    )


def save_chat(chat: Chat, title: str | None = None) -> str:
    """Save `chat`, the first time as a new saved chat, and return its name. An unchanged chat is not written."""
    chat.title = title or chat.title or first_words(chat.messages)
    made = as_document(chat).document()
    if chat.kept is not None and made | {"saved": ""} == {**chat.kept.made, "saved": ""}:
        return chat.kept.name
    kept = chat.kept or chat.sessions.begin(holds=chat.holds)
    try:
        chat.sessions.write(kept, made)
        chat.kept = kept
    finally:
        if chat.kept is None:
            kept.close()
    return kept.name


def export_chat(saved: ChatDocument, path: Path, *, overwrite: bool = False) -> Path:
    """Write the chat to `path`, in the format of its suffix."""
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
        write_private(path, write(saved))
    return path


def as_document(chat: Chat) -> ChatDocument:
    """Return the chat as a document that can be continued later, with its attached documents."""
    return ChatDocument(
        schema=SCHEMA,
        title=chat.title,
        model=chat.called or chat.model.info.id,
        saved=datetime.now().astimezone().isoformat(timespec="seconds"),
        system=chat.system,
        messages=[
            SavedMessage.from_attributes(m, documents=[SavedDocument.from_attributes(d) for d in m.documents])
            for m in chat.messages
        ],
        pending=[SavedDocument.from_attributes(d) for d in chat.pending],
        left_out=LeftOut(messages=chat.visible_messages.left, notes=chat.visible_messages.notes)
        if chat.visible_messages.left
        else None,
    )


def json_lines(saved: ChatDocument) -> str:
    """Return one message per line with `role` and `content`, as training and evaluation tools read them."""
    rows = [{"role": "system", "content": saved.system}] if saved.system else []
    rows += [{"role": m.role, "content": m.content} for m in messages_of(saved)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def markdown(saved: ChatDocument) -> str:
    """Return markdown for people: headings by speaker, documents by name only."""
    parts = [f"# {saved.title or first_words(saved.messages) or 'Conversation'}"]
    if saved.system:
        parts.append(f"## System\n\n{saved.system}")
    for message in messages_of(saved):
        if message.role == "user":
            files = "".join(f"*{d.name}, {d.lines:,} line{'s' * (d.lines != 1)}*\n\n" for d in message.documents)
            parts.append(f"## You\n\n{files}{message.text}")
        else:
            mark = FINISH_MARKS[message.finish or "stop"]
            thought = f"*{' '.join(message.thinking.split())}*\n\n" if message.thinking else ""
            parts.append(f"## {saved.model}\n\n{thought}{message.text}{mark}")
    return "\n\n".join(parts) + "\n"


def first_words(messages: Sequence[Message] | Sequence[SavedMessage], width: int = 60) -> str | None:
    """Return a title made of the first question."""
    if not messages:
        return None
    words = " ".join(messages[0].text.split())
    return words if len(words) <= width else words[: width - 1].rsplit(" ", 1)[0] + "…"


def _pretty(saved: ChatDocument) -> str:
    return json.dumps(saved.document(), ensure_ascii=False, indent=2) + "\n"
