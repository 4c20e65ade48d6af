"""Saved chats of a user: in one database, found by name, title or words, open in one process at a time.

A document attached to ten chats is stored once. `/save` also writes a chat to a file in `chats` beside the database.
"""

from __future__ import annotations

import json
import re
import sqlite3
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from os.path import expanduser
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kvcli.chat import database
from kvcli.chat.database import Database, chat_lock
from kvcli.errors import BadInput, reading, writing
from kvcli.files import private_folder, write_private
from kvcli.schemas.base import SURROGATE
from kvcli.schemas.chats import ChatEntry
from kvcli.schemas.turn import SCHEMA, ChatDocument
from kvcli.settings.small_file import Unfit, read_small

# Saved chats as JSON files, written by `/save` or by other users.

MOST = 512 << 20  # bytes of a file that is read, at most; several times the largest document


def read_chat(path: Path) -> tuple[ChatDocument, str]:
    """Return the chat in a file and the file's digest. Raises BadInput if the file is missing, too large or no chat."""
    with reading(path):
        if not path.exists():
            raise BadInput(f"no such chat file: {path}", code="file_missing")
    try:
        data = read_small(path, MOST)
        return ChatDocument.model_validate_json(data), sha256(data).hexdigest()
    except Unfit as error:
        raise BadInput(f"{path} {error}", code="not_a_chat") from None
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise BadInput(f"{path} is not a saved chat", code="not_a_chat", lines=[why]) from None


def write_chat(path: Path, saved: ChatDocument) -> str:
    """Write the chat to a file and return the file's digest."""
    data = (json.dumps(saved.document(), ensure_ascii=False, indent=1) + "\n").encode()
    with writing(path):
        private_folder(path.parent)
        write_private(path, data)
    return sha256(data).hexdigest()


PARTS = re.compile(r"[\W_]+")  # separators of words in a file name
AT_ONCE = 100  # locks held at a time, each an open file
SHOWN = 10  # entries of a list to choose from
AROUND = 40  # characters shown before and after a literal match
LISTED = (
    "SELECT name, title, model, saved, (SELECT count(*) FROM turns WHERE session = sessions.id) - (SELECT count(*)"
    f" FROM documents WHERE session = sessions.id AND n <= {database.THOUGHT} AND name = 'results'),"
    " (SELECT group_concat(name, char(10)) FROM"
    f" (SELECT name FROM documents WHERE session = sessions.id AND n >= {database.PENDING} ORDER BY id))"
    " FROM sessions"
)
EMPTY = partial(ChatDocument, schema=SCHEMA, title=None, model="", system=None, messages=[], pending=[])
T = TypeVar("T")


@dataclass(slots=True)
class SavedChat:
    """The database entry of a chat: its name and its stored content. Version 0 means that nothing is stored yet."""

    name: str
    saved: ChatDocument = field(default_factory=EMPTY)  # as stored, or as read from a JSON file
    version: int = 0
    origin: str = ""  # digest of the JSON file that it was read from
    lock: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Release the lock."""
        self.lock.close()


class SavedChats:
    """The saved chats in a folder. Methods raise BadInput for missing chats and for an unusable database."""

    def __init__(self, folder: Path, tell: Callable[[str], None] = warnings.warn) -> None:
        """`tell` receives messages about a damaged database."""
        self.folder, self.files, self._db = folder, folder / "chats", Database(folder, tell)

    # --- one chat

    def open(self, wanted: str | None = None, *, is_locked: bool = False, cwd: Path = Path()) -> SavedChat:
        """Open a chat, named as for `find` or by the path of a JSON file. `is_locked`: lock it for this process."""
        name = self.name_of(wanted, cwd)
        opened = self.begin(name, is_locked=is_locked)
        try:
            if name is None:
                opened.saved, opened.origin = read_chat(cwd / expanduser(wanted or ""))
            else:
                opened.saved, opened.version = self.read(name)
        except BaseException:
            opened.close()
            raise
        return opened

    def name_of(self, wanted: str | None, cwd: Path = Path()) -> str | None:
        """Return the name of the chat that `open` would open; None for a file that no saved chat continues."""
        if wanted is None or not ("/" in wanted or wanted.endswith(".json")):
            return self.find(wanted)
        _, digest = read_chat(cwd / expanduser(wanted))
        return self._run(lambda db: database.of_file(db, digest), None)

    def begin(self, name: str | None = None, *, is_locked: bool) -> SavedChat:
        """Return the entry of this name, or one for a new chat. Nothing is read from or written to the database."""
        begun = SavedChat(name or database.new_name())
        if is_locked:
            begun.lock.enter_context(chat_lock(self.folder, begun.name))
        return begun

    def read(self, name: str) -> tuple[ChatDocument, int]:
        """Return a chat and its version."""
        found = self._run(lambda db: database.read(db, name), None)
        if found is None:
            raise BadInput(f"there is no saved chat {name}", code="no_chat", try_=["kvcli chats list"])
        return found

    def write(self, saved_chat: SavedChat, made: ChatDocument) -> None:
        """Store `made` in place of the stored chat. Only turns that differ are written.

        Raises BadInput if another process has written meanwhile. A chat that was removed meanwhile is stored again.
        """

        def work(db: sqlite3.Connection) -> int:
            version = database.version(db, saved_chat.name)
            if version not in (None, saved_chat.version):
                raise BadInput(f"another kvcli process changed {saved_chat.name}; not saved", code="chat_changed")
            latest = database.write(db, saved_chat.name, made, saved_chat.saved if version is not None else EMPTY())
            if saved_chat.origin:
                database.note_file(db, saved_chat.origin, saved_chat.name)
            return latest

        made = ChatDocument.model_validate(made.document())  # without halves of characters, which no file can hold
        saved_chat.version, saved_chat.saved, saved_chat.origin = self._db.run(work), made, ""

    def save(self, name: str) -> Path:
        """Write the chat to a file in `chats`."""
        digest = write_chat(path := self._file(name), self.read(name)[0])
        self._run(lambda db: database.note_file(db, digest, name), None)
        return path

    def remove(self, names: Sequence[str]) -> None:
        """Delete chats and their files in `chats`. If a chat is open, raise BadInput and delete none of its batch."""
        for some in (names[i : i + AT_ONCE] for i in range(0, len(names), AT_ONCE)):
            with ExitStack() as locks, writing(self.files):
                for name in some:
                    locks.enter_context(chat_lock(self.folder, name))
                self._run(partial(database.remove, names=some), None)
                for name in some:
                    self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.files / f"{name}.json"

    # --- finding

    def entries(self) -> list[ChatEntry]:
        """Return all saved chats, the last saved first."""
        return self._run(lambda db: list(map(_entry, db.execute(f"{LISTED} ORDER BY latest DESC"))), [])

    def find(self, wanted: str | None) -> str:
        """Return the name of one chat. `wanted`: a name or its beginning, a number of the list, or words of its title
        and document names; None = the latest.
        """
        entries = self.entries()
        if wanted is None:
            found = entries[:1]
        elif not wanted.strip():
            found = []
        elif wanted.isdecimal() and len(wanted) < 7 and 0 < int(wanted) <= len(entries):
            found = [entries[int(wanted) - 1]]
        else:
            found = [entry for entry in entries if entry.id.startswith(wanted)] or _titled(entries, wanted)
            found = [entry for entry in found if entry.id == wanted] or found
        if len(found) == 1:
            return found[0].id
        if not entries:
            raise BadInput(f"there are no saved chats in {self.folder}", code="no_chat", try_=["kvcli chat"])
        lines = [
            f"{entry.id}  {' '.join((entry.title or '').split())}".rstrip() for entry in (found or entries)[:SHOWN]
        ]
        try_ = ["kvcli chat --continue, for the latest", "kvcli chats list"]
        if found:
            raise BadInput(f"several saved chats match {wanted}", code="no_chat", lines=lines, try_=try_)
        raise BadInput(f"no saved chat matches {wanted}", code="no_chat", lines=lines, try_=try_)

    def search(self, text: str) -> list[ChatEntry]:
        """Return chats whose title and document names contain all words or words that begin so, then chats with such a
        turn, the best first. If there are none, return chats with a turn that contains the text literally.
        """
        text = SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\0", " ")).strip()
        if not text:
            return []
        phrases = " ".join('"' + word.replace('"', '""') + '"*' for word in text.split())
        ranked = (
            "SELECT name, snippet(words, -1, '', '', '…', 16) FROM words JOIN turns ON turns.id = words.rowid"
            " JOIN sessions ON sessions.id = session WHERE words MATCH ? ORDER BY rank"
        )
        exact = (
            "SELECT name, substr(said, max(1, instr(said, ?1) - ?2), length(?1) + 2 * ?2) FROM"
            " (SELECT session, n, question || char(10) || answer AS said FROM turns)"
            " JOIN sessions ON sessions.id = session WHERE instr(said, ?1) ORDER BY latest DESC, n"
        )
        entries = {entry.id: entry for entry in self.entries()}
        found = {entry.id: "" for entry in _titled(entries.values(), text)}
        rows: list[tuple[str, str]] = self._run(lambda db: db.execute(ranked, [phrases]).fetchall(), [])
        if not found and not rows:
            rows = self._run(lambda db: db.execute(exact, [text, AROUND]).fetchall(), [])
        for name, around in rows:
            found[name] = found.get(name) or around
        return [
            entries[name].model_copy(update={"found": around or None})
            for name, around in found.items()
            if name in entries
        ]

    # --- internals

    def _run(self, work: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        """Run `work` in the database. Without a database, return `nothing` and create none."""
        return self._db.run(work) if self._db.path.exists() else nothing


def _entry(row: tuple[Any, ...]) -> ChatEntry:
    name, title, model, saved, questions, documents = row
    about = {"id": database.sound(name), "title": title and str(title), "model": str(model), "saved": str(saved)}
    files = str(documents).split("\n") if documents is not None else []
    return ChatEntry(**about, questions=questions, documents=len(files), files=files)


def _titled(entries: Iterable[ChatEntry], text: str) -> list[ChatEntry]:
    """Return chats whose title and document names contain all these words, or words that begin so."""
    wanted, found = text.casefold().split(), []
    for entry in entries:
        names = " ".join(entry.files)
        words = f"{entry.title or ''} {names} {re.sub(PARTS, ' ', names)}".casefold().split()
        if all(any(word.startswith(one) for word in words) for one in wanted):
            found.append(entry)
    return found
