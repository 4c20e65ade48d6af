"""Chats in the tables of the database: functions that run in an open transaction."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from kvcli.api import Finish
from kvcli.chat.database import SOUND, Damaged
from kvcli.schemas.chat import SCHEMA, ChatDocument, Figures

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
