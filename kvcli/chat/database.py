"""The file of saved chats: an SQLite database in WAL mode that only its owner can read.

The database is opened for one transaction and then closed, so that a kill, a full disk or another process finds no open
database. A damaged database is kept unchanged beside a new database with the rows that can be read.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from kvcli.api import Finish
from kvcli.errors import BadInput, writing
from kvcli.files import BEGINS, ENDS, lock, locked, opened, private_folder, temporary_folder
from kvcli.schemas.turn import SCHEMA, ChatDocument, Figures, SavedDocument

# A file lock, so that one process at a time works on a saved chat. The system frees it when the process ends.

NOTE_BYTES = 40  # bytes of the note on the process that has the lock
MOMENT = 0.05  # seconds; the cleanup of temporary files locks the file of a dead process for less


@contextmanager
def chat_lock(folder: Path, name: str) -> Iterator[None]:
    """Lock the saved chat of this name. After a kill, the next start removes the file of the lock.

    Raises BadInput if another process has the lock or the folder is not writable.
    """

    def take(handle: int) -> None:
        for is_last in (False, True):
            try:
                return lock(handle, wait=False)
            except BlockingIOError:
                if is_last:
                    who = os.pread(handle, NOTE_BYTES, 0).decode(errors="replace").strip()
                    raise BadInput(f"{name} is open in another kvcli ({who})", code="chat_in_use") from None
                time.sleep(MOMENT)

    path = folder / f"{BEGINS}{name}{ENDS}"
    with ExitStack() as stack:
        with writing(path):
            private_folder(folder)
            handle = stack.enter_context(opened(path, os.O_RDWR | os.O_CREAT, take))
        with suppress(OSError):  # a full disk; then the error of another process names no process
            os.pwrite(handle, f"process {os.getpid()}, since {datetime.now():%H:%M}".ljust(NOTE_BYTES).encode(), 0)
        try:
            yield
        finally:
            with suppress(OSError):  # else the next start removes it
                path.unlink()


# Chats in the tables of the database: functions that run in an open transaction.


# numbers of documents that belong to no asked question: documents for the next question; notes on messages that the
# model is not shown (their name is the count of messages); thinking of turn n, which has number -3 - n
PENDING, LEFT_OUT, THOUGHT = -1, -2, -3
TOOLS = ("calls", "results")  # names of documents of turn n beside its thought: JSON lists
ADAPTER = "adapter"  # name of a document LEFT_OUT that is a LoRA adapter of the chat's model
ABOUT = ("title", "model", "system", "saved")
FIGURES = tuple(Figures.model_fields)
SAID = "question, answer"  # columns of the full-text index
# scans of the tables: a damaged index would hide rows
CHAT = "FROM sessions NOT INDEXED WHERE name = ?"
TURNS = "FROM turns NOT INDEXED WHERE session = ?"


def new_name() -> str:
    """Return a name of a chat or a file that begins with the present time."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def sound(name: object) -> str:
    """Return a name read from the database. It becomes a file name, so only names that kvcli makes are accepted."""
    if not isinstance(name, str) or not SOUND.fullmatch(name):
        raise Damaged("a name")
    return name


def version(db: sqlite3.Connection, name: str) -> int | None:
    """Return the version of a chat, which every write raises above all others; None if there is no such chat."""
    row = db.execute(f"SELECT latest {CHAT}", [name]).fetchone()
    return int(row[0]) if row else None


def read(db: sqlite3.Connection, name: str) -> tuple[ChatDocument, int] | None:
    """Return a chat and its version; None if there is no such chat."""
    about = db.execute(f"SELECT id, latest, {', '.join(ABOUT)} {CHAT}", [name]).fetchone()
    try:
        return (_document(db, about[0], about[2:]), int(about[1])) if about else None
    except (TypeError, ValueError):  # values of other types; pydantic's error is one
        raise Damaged("a chat") from None


def _document(db: sqlite3.Connection, session: int, about: Sequence[str]) -> ChatDocument:
    documents: dict[int, list[Mapping[str, str]]] = defaultdict(list)
    for n, *words in db.execute(
        "SELECT n, name, documents.sha256, texts.text FROM documents JOIN texts ON texts.id = documents.text"
        " WHERE session = ? ORDER BY documents.id",
        [session],
    ):
        documents[n].append(dict(zip(("name", "sha256", "text"), words, strict=True)))
    messages: list[Mapping[str, object]] = []
    keys = ", ".join(("n", SAID, "finish", *FIGURES))
    for n, question, answer, finish, *took in db.execute(f"SELECT {keys} {TURNS} ORDER BY n", [session]):
        figures, ended = None, finish if finish in get_args(Finish) else None
        with suppress(ValidationError):  # a damaged figure is left out
            figures = Figures.model_validate(dict(zip(FIGURES, took, strict=True))) if any(took) else None
        beside = {document["name"]: document["text"] for document in documents[THOUGHT - n]}
        calls, results = ([*json.loads(beside.get(name, "[]"))] for name in TOOLS)
        asked = {"role": "tool" if results else "user", "text": question, "results": results}
        messages.append({**asked, "documents": documents[n], "finish": None})
        more = {"finish": ended, "figures": figures, "thinking": beside.get("", ""), "calls": calls}
        messages.append({"role": "assistant", "text": answer, "documents": [], **more})
    made = dict(zip(ABOUT, about, strict=True)) | {"messages": messages, "pending": documents[PENDING]}
    made["adapters"] = [one["text"] for one in documents[LEFT_OUT] if one["name"] == ADAPTER]
    saved = ChatDocument.model_validate({"schema": SCHEMA, **made})
    for notes in documents[LEFT_OUT]:
        with suppress(ValueError):  # no number, or more messages than there are
            left = {"messages": int(notes["name"]), "notes": notes["text"]}
            saved = ChatDocument.model_validate({"schema": SCHEMA, **made, "left_out": left})
    return saved


def write(db: sqlite3.Connection, name: str, made: ChatDocument, had: ChatDocument) -> int:
    """Store the chat `made` in place of `had`, from the first turn that differs; returns its new version."""
    (latest,) = db.execute("SELECT coalesce(max(latest), 0) + 1 FROM sessions").fetchone()
    if version(db, name) is None:
        db.execute("INSERT INTO sessions (name, model, saved, latest) VALUES (?, '', '', 0)", [name])
    (session,) = db.execute(f"SELECT id {CHAT}", [name]).fetchone()
    values = [latest, *(getattr(made, key) for key in ABOUT), session]
    db.execute(f"UPDATE sessions SET latest = ?, {' = ?, '.join(ABOUT)} = ? WHERE id = ?", values)
    new, old = (list(zip(of.messages[::2], of.messages[1::2], strict=True)) for of in (made, had))
    first = next((n for n, (a, b) in enumerate(zip(new, old, strict=False)) if a != b), min(len(new), len(old)))
    if db.execute(f"SELECT count(*) {TURNS} AND n < ?", [session, first]).fetchone() != (first,):
        first = 0  # numbers have gaps, because damaged turns were lost
    _forget(db, session, first)
    for n, (question, answer) in enumerate(new[first:], first):
        took = answer.figures or Figures()
        db.execute(
            f"INSERT INTO turns (session, n, {SAID}, finish, {', '.join(FIGURES)})"
            f" VALUES (?, ?, ?, ?, ?, {', '.join('?' * len(FIGURES))})",
            [session, n, question.text, answer.text, answer.finish, *(getattr(took, key) for key in FIGURES)],
        )
        _attach(db, session, n, *question.documents)
        lists = dict(zip(TOOLS, ([one.model_dump() for one in answer.calls], question.results), strict=True))
        beside = {"": answer.thinking, **{name: json.dumps(one) for name, one in lists.items() if one}}
        made_of = (SavedDocument(name=name, sha256="", text=text) for name, text in beside.items() if text)
        _attach(db, session, THOUGHT - n, *made_of)
    _attach(db, session, PENDING, *made.pending)
    _attach(db, session, LEFT_OUT, *(SavedDocument(name=ADAPTER, sha256="", text=one) for one in made.adapters))
    if left := made.left_out:
        _attach(db, session, LEFT_OUT, SavedDocument(name=str(left.messages), sha256="", text=left.notes))
    db.execute(f"INSERT INTO words (rowid, {SAID}) SELECT id, {SAID} {TURNS} AND n >= ?", [session, first])
    _drop_texts(db)
    return int(latest)


def remove(db: sqlite3.Connection, names: Sequence[str]) -> None:
    """Delete these chats and texts that no other chat uses."""
    for name in names:
        for (session,) in db.execute(f"SELECT id {CHAT}", [name]).fetchall():
            _forget(db, session, 0)
            db.execute("DELETE FROM files WHERE session = ?", [session])
            db.execute("DELETE FROM sessions WHERE id = ?", [session])
    _drop_texts(db)
    db.execute("INSERT INTO words (words) VALUES ('optimize')")  # else deleted words stay in the index for a while


def of_file(db: sqlite3.Connection, digest: str) -> str | None:
    """Return the name of the chat that was exported to, or continued from, a file of this digest."""
    row = db.execute(
        "SELECT name FROM files JOIN sessions ON sessions.id = session WHERE sha256 = ?", [digest]
    ).fetchone()
    return row and sound(row[0])


def note_file(db: sqlite3.Connection, digest: str, name: str) -> None:
    """Record the digest of a file, with the name of its chat."""
    db.execute(f"INSERT INTO files (stamp, sha256, session) SELECT '', ?, id {CHAT}", [digest, name])


def _attach(db: sqlite3.Connection, session: int, n: int, *documents: SavedDocument) -> None:
    for document in documents:
        digest = sha256(document.text.encode()).hexdigest()
        db.execute("INSERT OR IGNORE INTO texts (sha256, text) VALUES (?, ?)", [digest, document.text])
        db.execute(
            "INSERT INTO documents (session, n, name, sha256, text)"
            " VALUES (?, ?, ?, ?, (SELECT id FROM texts WHERE sha256 = ?))",
            [session, n, document.name, document.sha256, digest],
        )


def _forget(db: sqlite3.Connection, session: int, first: int) -> None:
    """Delete the turns of a chat from number `first` on, and all documents but those of the turns before."""
    db.execute(
        f"INSERT INTO words (words, rowid, {SAID}) SELECT 'delete', id, {SAID} {TURNS} AND n >= ?", [session, first]
    )
    db.execute(f"DELETE {TURNS} AND n >= ?", [session, first])
    kept = [0, first - 1, THOUGHT - first + 1, THOUGHT]
    db.execute(
        "DELETE FROM documents WHERE session = ? AND n NOT BETWEEN ? AND ? AND n NOT BETWEEN ? AND ?", [session, *kept]
    )


def _drop_texts(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM texts WHERE id NOT IN (SELECT text FROM documents)")


NAME, VERSION = "kvcli.db", 1
PATIENCE = 5.0  # seconds to wait while another process writes
SETTINGS = (
    "journal_mode = WAL",  # where the file system has no shared memory, SQLite keeps its older journal
    "synchronous = FULL",  # a saved turn is on the disk; under NORMAL a power cut may take the last ones
    "secure_delete = ON",  # removed chats are overwritten
    "trusted_schema = OFF",
    "cell_size_check = ON",
)
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
        try:
            if (seen := self._inode()) is None:
                self._renew(None)
            try:
                return self._transaction(work)
            except TROUBLE as error:
                if not _is_damage(error):
                    raise
            self._renew(seen)
            return self._transaction(work)
        except (OSError, *TROUBLE) as error:
            with suppress(*TROUBLE), closing(self._read_only()) as db:
                return work(db)
            raise BadInput(
                f"cannot use {self.path}: {getattr(error, 'strerror', None) or error}",
                code="no_sessions",
                try_=["KVCLI_HOME=FOLDER, on a disk with free space and write access", "--no-save, for this chat"],
            ) from None

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with closing(connect(self.path)) as db, db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise BadInput(
                    f"{self.path} was written by a newer kvcli: its format is {version}, this kvcli supports {VERSION}",
                    code="newer_sessions",
                    try_=["install the newer kvcli", "KVCLI_HOME=FOLDER, for a separate folder", "--no-save"],
                )
            if version < VERSION:
                raise Damaged("it has no schema version")
            prepare(db)
            db.execute("BEGIN IMMEDIATE")
            return work(db)

    def _read_only(self) -> sqlite3.Connection:
        if (wal := Path(f"{self.path}-wal")).exists() and wal.stat().st_size:
            raise sqlite3.OperationalError("its last changes are in a separate file")
        return connect(f"{self.path.as_uri()}?mode=ro&immutable=1")

    def _inode(self) -> int | None:
        return self.path.stat().st_ino if self.path.exists() else None

    def _renew(self, seen: int | None) -> None:
        """Set the damaged file `seen` aside and make a new database of its readable rows; None = there is no file.

        Another process may have done so meanwhile: then the file is not `seen`, and nothing changes.
        """
        aside, guard, n = f"{self.path}.damaged-{new_name()}", self.path.with_name(f"{BEGINS}{NAME}{ENDS}"), 0
        private_folder(self.path.parent)
        with locked(guard), ExitStack() as ends:
            ends.callback(guard.unlink, missing_ok=True)
            if self._inode() != seen:
                return
            new = ends.enter_context(temporary_folder(self.path.parent)) / NAME
            # not in WAL mode yet: closing keeps pages in the -wal file if they cannot be moved, and says nothing
            with closing(connect(new)) as db:
                db.executescript(f"BEGIN; {FORM} PRAGMA user_version = {VERSION}; COMMIT")
                if seen is not None:
                    n = _salvage(self.path, db)
            new.chmod(0o600)  # SQLite gives its -wal and -shm files the same mode
            for side in ("-wal", ""):  # the last changes first: beside a new database, SQLite would apply them to it
                if Path(f"{self.path}{side}").exists():
                    os.rename(f"{self.path}{side}", f"{aside}{side}")
            Path(f"{self.path}-shm").unlink(missing_ok=True)
            new.replace(self.path)
        if seen is not None:
            self._tell(f"{self.path} is damaged: it was renamed to {aside}; {n:,} chats were recovered")


def connect(path: Path | str) -> sqlite3.Connection:
    """Open a database file or URI. Damaged text is read with its readable part."""
    db = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, uri=isinstance(path, str))
    db.text_factory = lambda raw: raw.decode(errors="replace")
    return db


def prepare(db: sqlite3.Connection) -> None:
    for setting in SETTINGS:
        db.execute(f"PRAGMA {setting}")


def _is_damage(error: Exception) -> bool:
    return isinstance(error, UnicodeDecodeError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE


def _salvage(old: Path, db: sqlite3.Connection) -> int:
    """Copy the rows that SQLite reads from either end of each table; returns the number of chats."""
    db.execute("BEGIN")
    with closing(connect(old)) as source:
        for table in TABLES:
            types = [f"CAST({name} AS {kind})" for _, name, kind, *_ in db.execute(f"PRAGMA table_info({table})")]
            put = f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(types))})"
            for row in _rows(source, f"SELECT {', '.join(types)} FROM {table}"):
                if not db.execute(put, row).rowcount and table == "turns":  # nothing refers to their ids
                    db.execute(put, (None, *row[1:]))  # two rows have one id, and either may be damaged
    # turns of a lost chat become a chat, and what refers to a lost row goes
    db.executescript("""
        INSERT OR IGNORE INTO sessions SELECT DISTINCT session, 'found-' || session, NULL, '', NULL, '', 0
            FROM turns WHERE session NOT IN (SELECT id FROM sessions);
        DELETE FROM documents WHERE text NOT IN (SELECT id FROM texts);
        DELETE FROM files WHERE session NOT IN (SELECT id FROM sessions);
        INSERT INTO words (words) VALUES ('rebuild');
    """)
    names = db.execute("SELECT id, name FROM sessions").fetchall()
    for session, name in names:
        if not SOUND.fullmatch(name):
            db.execute("UPDATE sessions SET name = 'found-' || id WHERE id = ?", [session])
    return len(names)


def _rows(source: sqlite3.Connection, select: str) -> Iterator[tuple[Any, ...]]:
    for order in ("id", "id DESC"):
        with suppress(*TROUBLE):
            yield from source.execute(f"{select} ORDER BY {order}")
