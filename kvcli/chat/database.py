"""The file of saved chats: an SQLite database of a known schema that only its owner can read.

The database is opened for one transaction and then closed, so that a kill, a full disk or another process finds no open
database. A damaged database is kept unchanged beside a new database with all rows that can be read.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from hashlib import file_digest
from pathlib import Path
from typing import Any, TypeVar

from kvcli.errors import BadInput
from kvcli.files import BEGINS, ENDS, locked, private_folder, replacing, temporary_folder

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
