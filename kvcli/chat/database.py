"""The file of saved chats: an SQLite database of a known schema that only its owner can read.

The database is opened for one transaction and then closed, so that a kill, a full disk or another process finds no open
database. A damaged database is kept unchanged beside a new database with all rows that can be read.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import datetime
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from kvcli.api import Finish
from kvcli.errors import BadInput, writing
from kvcli.files import BEGINS, ENDS, lock, locked, opened, private_folder, replacing, temporary_folder
from kvcli.schemas.turn import SCHEMA, ChatDocument, Figures

# A file lock, so that one process at a time works on a saved chat. The system frees it when the process ends.


NOTE_BYTES = 40  # bytes of the note on the process that has the lock
MOMENT = 0.05  # seconds; the cleanup of temporary files locks the file of a dead process for less


class ChatLock:
    """An exclusive lock on the saved chat of this name until `close`. After a kill, the next start removes its file."""

    def __init__(self, folder: Path, name: str) -> None:
        """Take the lock. Raises BadInput if another process has it or the folder is not writable."""
        self._name, self._path, self._stack = name, folder / f"{BEGINS}{name}{ENDS}", ExitStack()
        with writing(self._path):
            private_folder(folder)
            handle = self._stack.enter_context(opened(self._path, os.O_RDWR | os.O_CREAT, self._take))
        self._stack.callback(self._leave)
        with suppress(OSError):  # a full disk; then the error of another process names no process
            os.pwrite(handle, f"process {os.getpid()}, since {datetime.now():%H:%M}".ljust(NOTE_BYTES).encode(), 0)

    def close(self) -> None:
        """Release the lock."""
        self._stack.close()

    def _leave(self) -> None:
        with suppress(OSError):  # else the next start removes it
            self._path.unlink()

    def _take(self, handle: int) -> None:
        for is_last in (False, True):
            try:
                lock(handle, wait=False)
                return
            except BlockingIOError:
                if is_last:
                    who = os.pread(handle, NOTE_BYTES, 0).decode(errors="replace").strip()
                    raise BadInput(f"{self._name} is open in another kvcli ({who})", code="chat_in_use") from None
                time.sleep(MOMENT)


# Chats in the tables of the database: functions that run in an open transaction.


# numbers of documents that belong to no asked question: documents for the next question; notes on messages that the
# model is not shown (their name is the count of messages); thinking of turn n, which has number -3 - n
PENDING, LEFT_OUT, THOUGHT = -1, -2, -3
ABOUT = ("title", "model", "system", "saved")
FIGURES = tuple(Figures.model_fields)
ID = "(SELECT id FROM sessions WHERE name = ?)"
SAID = "question, answer"  # columns of the full-text index
FROM = f"WHERE session = {ID} AND n >= ?"
# cast, because a damaged file may hold values of other types
LATEST, NUMBER = (f"ifnull(CAST({key} AS INTEGER), 0)" for key in ("latest", "n"))


def sound(name: object) -> str:
    """Return a name read from the database. It becomes a file name, so only names that kvcli makes are accepted."""
    if not isinstance(name, str) or not SOUND.fullmatch(name):
        raise Damaged("a name")
    return name


def version(db: sqlite3.Connection, name: str) -> int | None:
    """Return the version of a chat, which every write raises above all others; None if there is no such chat."""
    asked = f"SELECT {LATEST}, id FROM sessions WHERE"
    found = db.execute(f"{asked} name = ?", [name]).fetchall()
    if found != db.execute(f"{asked} +name = ?", [name]).fetchall():  # scans the table, not its index
        raise Damaged("the index of names")
    return int(found[0][0]) if found else None


def read(db: sqlite3.Connection, name: str) -> tuple[ChatDocument, int] | None:
    """Return a chat and its version; None if there is no such chat. Damaged values of a wrong type are left out."""
    latest = version(db, name)
    if latest is None:
        return None
    about = db.execute(f"SELECT id, {', '.join(ABOUT)} FROM sessions WHERE name = ?", [name]).fetchone()
    documents: dict[int, list[Mapping[str, str]]] = defaultdict(list)
    for n, *words in db.execute(
        "SELECT n, name, documents.sha256, texts.text FROM documents JOIN texts ON texts.id = documents.text"
        " WHERE session = ? ORDER BY documents.id",
        about[:1],
    ):
        documents[n].append(dict(zip(("name", "sha256", "text"), map(str, words), strict=True)))
    messages: list[Mapping[str, object]] = []
    keys = f"{NUMBER}, question, answer, finish, {', '.join(FIGURES)}"
    for n, question, answer, finish, *took in db.execute(
        f"SELECT {keys} FROM turns NOT INDEXED WHERE session = ? ORDER BY n", about[:1]
    ):
        figures, ended = None, finish if finish in get_args(Finish) else None
        with suppress(ValidationError):
            figures = Figures.model_validate(dict(zip(FIGURES, took, strict=True))) if any(took) else None
        messages.append({"role": "user", "text": str(question), "documents": documents[n], "finish": None})
        messages.append(
            {"role": "assistant", "text": str(answer), "documents": [], "finish": ended, "figures": figures}
            | {"thinking": "".join(thought["text"] for thought in documents[THOUGHT - n])}
        )
    by_index = db.execute("SELECT n FROM turns WHERE session = ? ORDER BY n", about[:1]).fetchall()
    if by_index != db.execute("SELECT n FROM turns NOT INDEXED WHERE session = ? ORDER BY n", about[:1]).fetchall():
        raise Damaged("the index of turns")
    made = {key: None if value is None else str(value) for key, value in zip(ABOUT, about[1:], strict=True)}
    whole = {"schema": SCHEMA, **made, "messages": messages, "pending": documents[PENDING]}
    saved = ChatDocument.model_validate(whole)
    for notes in documents[LEFT_OUT]:
        with suppress(ValueError):
            left = {"messages": int(notes["name"]), "notes": notes["text"]}
            saved = ChatDocument.model_validate(whole | {"left_out": left})
    return saved, latest


def write(db: sqlite3.Connection, name: str, made: Mapping[str, Any], had: Mapping[str, Any]) -> int:
    """Replace the stored chat `had` by `made`, both documents as dicts; returns the new version."""
    db.execute(
        f"INSERT INTO sessions (name, latest, {', '.join(ABOUT)}) VALUES (?, (SELECT coalesce(max(latest), 0) + 1"
        " FROM sessions), ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET latest = excluded.latest, "
        + ", ".join(f"{key} = excluded.{key}" for key in ABOUT),
        [name, *(made[key] for key in ABOUT)],
    )
    new, old = _turns(made), _turns(had)
    same = next((n for n, (a, b) in enumerate(zip(new, old, strict=False)) if a != b), min(len(new), len(old)))
    numbers = [n for (n,) in db.execute(f"SELECT {NUMBER} FROM turns WHERE session = {ID} ORDER BY n", [name])]
    # numbers have gaps where damaged turns were lost
    first = numbers[same] if same < len(numbers) else max(numbers, default=-1) + 1
    _forget(db, name, first)
    for n, (question, answer) in enumerate(new[same:], first):
        took = answer["figures"] or {}
        db.execute(
            f"INSERT INTO turns (session, n, question, answer, finish, {', '.join(FIGURES)})"
            f" VALUES ({ID}, ?, ?, ?, ?, {', '.join('?' * len(FIGURES))})",
            [name, n, question["text"], answer["text"], answer["finish"], *map(took.get, FIGURES)],
        )
        _attach(db, name, n, question["documents"])
    _attach(db, name, PENDING, made["pending"])
    for n, (_, answer) in zip([*numbers[:same], *range(first, first + len(new))], new, strict=False):
        if thought := answer.get("thinking"):
            _attach(db, name, THOUGHT - n, [{"name": "", "sha256": "", "text": thought}])
    if left := made.get("left_out"):
        _attach(db, name, LEFT_OUT, [{"name": str(left["messages"]), "sha256": "", "text": left["notes"]}])
    db.execute(f"INSERT INTO words (rowid, {SAID}) SELECT id, {SAID} FROM turns {FROM}", [name, first])
    _drop_texts(db)
    latest = version(db, name)
    assert latest is not None, "it was just written"
    return latest


def remove(db: sqlite3.Connection, names: Sequence[str]) -> list[str]:
    """Delete these chats and texts that no other chat uses; returns the names of their files, which may still exist."""
    files = []
    for name in names:
        stamps = db.execute(f"SELECT stamp FROM files WHERE stamp <> '' AND session = {ID}", [name])
        files += [Path(str(stamp).rsplit(" ", 3)[0]).name for (stamp,) in stamps]
        db.execute(f"UPDATE files SET session = NULL WHERE session = {ID}", [name])
        _forget(db, name, 0)
        db.execute("DELETE FROM sessions WHERE name = ?", [name])
    _drop_texts(db)
    db.execute("INSERT INTO words (words) VALUES ('optimize')")  # else deleted words stay in the index for a while
    return files


def of_file(db: sqlite3.Connection, digest: str) -> str | None:
    """Return the name of the chat that was exported to, or imported from, a file of this digest."""
    row = db.execute(
        "SELECT name FROM files JOIN sessions ON sessions.id = session WHERE sha256 = ?", [digest]
    ).fetchone()
    return row and sound(row[0])


def note_file(db: sqlite3.Connection, stamp: str, digest: str, name: str | None) -> None:
    """Record a file by its stamp (name, size and times) and digest, with the name of its chat."""
    db.execute(f"INSERT INTO files (stamp, sha256, session) VALUES (?, ?, {ID})", [stamp, digest, name])


def stamps(db: sqlite3.Connection) -> set[str]:
    return {str(stamp) for (stamp,) in db.execute("SELECT stamp FROM files")}


def _turns(made: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    messages = made.get("messages", [])
    return list(zip(messages[::2], messages[1::2], strict=True))


def _attach(db: sqlite3.Connection, name: str, n: int, documents: Sequence[Mapping[str, str]]) -> None:
    for document in documents:
        digest = sha256(document["text"].encode()).hexdigest()
        db.execute("INSERT OR IGNORE INTO texts (sha256, text) VALUES (?, ?)", [digest, document["text"]])
        db.execute(
            f"INSERT INTO documents (session, n, name, sha256, text)"
            f" VALUES ({ID}, ?, ?, ?, (SELECT id FROM texts WHERE sha256 = ?))",
            [name, n, document["name"], document["sha256"], digest],
        )


def _forget(db: sqlite3.Connection, name: str, first: int) -> None:
    """Delete the turns from number `first` on, and all documents with negative numbers."""
    db.execute(f"INSERT INTO words (words, rowid, {SAID}) SELECT 'delete', id, {SAID} FROM turns {FROM}", [name, first])
    db.execute(f"DELETE FROM turns {FROM}", [name, first])
    db.execute(f"DELETE FROM documents {FROM} OR session = {ID} AND n < 0", [name, first, name])


def _drop_texts(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM texts WHERE id NOT IN (SELECT text FROM documents)")


NAME, VERSION = "kvcli.db", 1
PATIENCE = 5.0  # seconds to wait while another process writes
PAGE = 4096  # bytes; the first page is the same in all databases of the schema, but for fields that SQLite can rebuild:
LENGTH, FREE = slice(28, 32), slice(32, 40)  # number of pages, and the list of free pages; 0 = SQLite finds out
FAR = 10_000  # ids after the last readable one that are tried one by one
CORRUPT, NO_DATABASE, ERROR, CONSTRAINT = 11, 26, 1, 19  # error codes of SQLite
TROUBLE = (sqlite3.Error, UnicodeDecodeError)  # the latter if an error message of SQLite quotes damaged bytes
DAMAGE = (CORRUPT, NO_DATABASE, ERROR, CONSTRAINT)  # an undamaged database never answers kvcli's statements with these
SOUND = re.compile(r"[\w-]{1,64}", re.ASCII)  # names of saved chats
TABLES = ("sessions", "turns", "texts", "documents", "files")
FORM = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, title TEXT, model TEXT NOT NULL, system TEXT,
    saved TEXT NOT NULL, latest INTEGER NOT NULL);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY, session INTEGER NOT NULL, n INTEGER NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL,
    finish TEXT, prompt INTEGER, cached INTEGER, new INTEGER, first_token REAL, read_tok_s REAL, decode_tok_s REAL,
    UNIQUE (session, n));
CREATE TABLE texts (id INTEGER PRIMARY KEY, sha256 TEXT NOT NULL UNIQUE, text TEXT NOT NULL);
CREATE TABLE documents (
    id INTEGER PRIMARY KEY, session INTEGER NOT NULL, n INTEGER NOT NULL, name TEXT NOT NULL, sha256 TEXT NOT NULL,
    text INTEGER NOT NULL);
CREATE TABLE files (id INTEGER PRIMARY KEY, stamp TEXT NOT NULL, sha256 TEXT NOT NULL, session INTEGER);
CREATE VIRTUAL TABLE words USING fts5 (question, answer, content=turns, content_rowid=id);
"""
T = TypeVar("T")


class Damaged(sqlite3.DatabaseError):
    """The tables hold values that kvcli cannot have written."""

    sqlite_errorcode = CORRUPT


class Database:
    """The database in a folder. `tell` receives a message if the database was damaged."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.path, self._tell = Path(os.path.realpath(folder / NAME)), tell

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work`, run in one transaction that is either on disk afterwards or has no effect.

        Work that only reads also succeeds on a full or read-only disk, if no other process uses the database.
        """
        for is_last in (False, True):
            seen = self._seen()
            try:
                with closing(self._opened()) as db, db:
                    db.execute("BEGIN IMMEDIATE")
                    return work(db)
            except TROUBLE as error:
                if not is_last and _is_damage(error):
                    self._renew(seen)
                    continue
                with suppress(*TROUBLE), closing(self._frozen()) as db:
                    return work(db)
                raise self._refused(error) from None
        raise AssertionError("the last time it raises or returns")

    def _frozen(self) -> sqlite3.Connection:
        with suppress(FileNotFoundError):
            if Path(f"{self.path}-wal").stat().st_size:
                raise sqlite3.OperationalError("its last changes are in a separate file")
        db = sqlite3.connect(f"{self.path.as_uri()}?immutable=1", uri=True)
        db.text_factory = _text
        return db

    def _seen(self) -> tuple[int, int] | None:
        with suppress(FileNotFoundError):
            about = self.path.stat()
            return about.st_dev, about.st_ino
        return None

    def _opened(self) -> sqlite3.Connection:
        if not self.path.exists():
            self._renew(None)
        db = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
        try:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise BadInput(
                    f"{self.path} was written by a newer kvcli: its format is {version}, this kvcli supports {VERSION}",
                    code="newer_sessions",
                    try_=["install the newer kvcli", "KVCLI_HOME=FOLDER, for a separate folder", "--no-save"],
                )
            if version < VERSION:
                raise Damaged("it has no schema version")
            _prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    def _renew(self, seen: tuple[int, int] | None) -> None:
        """Rebuild the database from readable rows of the file `seen`, unless another process has replaced that file."""
        guard = self.path.with_name(f"{BEGINS}{NAME}{ENDS}")
        try:
            private_folder(self.path.parent)
            with locked(guard):
                try:
                    if self._seen() == seen:
                        self._replace()
                finally:
                    guard.unlink(missing_ok=True)
        except (OSError, *TROUBLE) as error:
            raise self._refused(error) from None

    def _refused(self, error: Exception) -> BadInput:
        why = getattr(error, "strerror", None) or error
        return BadInput(f"cannot use {self.path}: {why}", code="no_sessions")

    def _replace(self) -> None:
        there = [side for side in ("", "-wal") if self._seen() and Path(f"{self.path}{side}").exists()]
        with temporary_folder(self.path.parent) as folder:
            new, old = folder / NAME, folder / "old"
            with closing(sqlite3.connect(new, isolation_level=None)) as db:
                db.executescript(f"BEGIN; {FORM} PRAGMA user_version = {VERSION}; COMMIT")
                _prepare(db)
            for side in there:
                _copy(Path(f"{self.path}{side}"), Path(f"{old}{side}"), b"" if side else _first_page(new))
            n = _salvage(old, new) if there else 0
            # named by its digest: if the disk is full halfway, each try leaves the same file
            aside = f"{self.path}.damaged-{_digest(self.path)[:12]}" if there else ""
            for side in there:
                _copy(Path(f"{self.path}{side}"), Path(f"{aside}{side}"))
            for side in ("-wal", "-shm"):
                Path(f"{self.path}{side}").unlink(missing_ok=True)
            _copy(new, self.path)
        if there:
            self._tell(f"{self.path} is damaged: it was renamed to {aside}; {n:,} chats were recovered")


def _is_damage(error: Exception) -> bool:
    return isinstance(error, UnicodeDecodeError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE


def _copy(source: Path, target: Path, head: bytes = b"") -> None:
    """Copy a file, whole or not at all. `head` replaces its first bytes."""
    with source.open("rb") as data, replacing(target) as stream:
        stream.write(head)
        data.seek(len(head))
        shutil.copyfileobj(data, stream)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _first_page(new: Path) -> bytes:
    with new.open("rb") as stream:
        page = bytearray(stream.read(PAGE))
    page[LENGTH], page[FREE] = bytes(4), bytes(8)
    return bytes(page)


def _prepare(db: sqlite3.Connection) -> None:
    db.text_factory = _text
    for setting in ("trusted_schema = OFF", "cell_size_check = ON", "secure_delete = ON", "journal_mode = WAL"):
        db.execute(f"PRAGMA {setting}")
    db.execute("PRAGMA synchronous = FULL")


def _text(raw: bytes) -> str:
    """Decode text and replace damaged bytes, because the rest is still readable."""
    return raw.decode(errors="replace")


def _salvage(old: Path, new: Path) -> int:
    """Copy all readable rows one by one; returns the number of chats."""
    with closing(sqlite3.connect(old)) as source, closing(sqlite3.connect(new)) as db, db:
        _prepare(db)
        source.text_factory = _text
        for table in TABLES:
            names = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
            put = f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(names))})"
            for row in _rows(source, f"SELECT {', '.join(names)} FROM {table}"):
                if not db.execute(put, row).rowcount and table in ("turns", "documents"):  # nothing refers to their ids
                    db.execute(put, (None, *row[1:]))  # two rows have one id, and either may be damaged
        db.execute(
            "INSERT OR IGNORE INTO sessions SELECT DISTINCT session, 'found-' || session, NULL, '', NULL, '', 0"
            " FROM turns WHERE session NOT IN (SELECT id FROM sessions)"
        )
        for session, name in db.execute("SELECT id, name FROM sessions").fetchall():
            if not SOUND.fullmatch(str(name)):
                db.execute("UPDATE sessions SET name = 'found-' || id WHERE id = ?", [session])
        db.execute("INSERT INTO words (words) VALUES ('rebuild')")
        db.execute("DELETE FROM documents WHERE text NOT IN (SELECT id FROM texts)")
        db.execute("DELETE FROM files WHERE session NOT IN (SELECT id FROM sessions)")  # their files are imported again
        (n,) = db.execute("SELECT count(*) FROM sessions").fetchone()
        return int(n)


def _rows(source: sqlite3.Connection, select: str) -> Iterator[tuple[Any, ...]]:
    """Yield rows from both ends of a table up to the damage, then rows in between that can be read one by one."""
    first, last = 0, FAR
    try:
        for row in source.execute(f"{select} ORDER BY id"):
            first = row[0]
            yield row
        return
    except TROUBLE:
        pass
    with suppress(*TROUBLE):
        for row in source.execute(f"{select} WHERE id > ? ORDER BY id DESC", [first]):
            last = row[0]
            yield row
    for i in range(first + 1, min(last, first + FAR)):
        with suppress(*TROUBLE):
            yield from source.execute(f"{select} WHERE id = ?", [i])
