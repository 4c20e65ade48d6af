"""Sessions: one database of all conversations, found by words, opened by one process, mended where it is damaged."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvcli.chat import database
from kvcli.chat.conversation import Chat
from kvcli.chat.database import NAME, VERSION, Database
from kvcli.chat.saved_chats import SavedChats
from kvcli.commands.common.run_setup import Setup
from kvcli.documents import Document
from kvcli.errors import BadInput
from kvcli.render.terminal.terminal import text_width
from kvcli.schemas.turn import LeftOut
from tests.bench.stress_chats import storm
from tests.fake_model import FakeModel, fake_info
from tests.fakes import Machine

ANSWER = "It is 972 metres."
TEXT = "A report of wells. " * 5_000


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(Setup, "load", lambda self, _profile, _tell=None: made.model)
    return made


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def sessions(tmp_path: Path, told: list[str]) -> SavedChats:
    return SavedChats(tmp_path / "home" / "data", told.append)


def model(answer: str = ANSWER, **facts: int) -> FakeModel:
    return FakeModel(answer=answer, info=fake_info(limit=1 << 30), **facts)


def hold_talk(sessions: SavedChats, *questions: str, answer: str = ANSWER, title: str | None = None) -> str:
    """The name of a new one."""
    chat = Chat(model(answer), saved_chats=sessions)
    for question in questions:
        chat.send(question)
    return chat.save(title)


def asked(sessions: SavedChats, name: str) -> list[str]:
    return [m.text for m in sessions.read(name)[0].messages[::2]]


def whole(sessions: SavedChats) -> dict[str, object]:
    """Everything that is kept."""
    return {entry.id: sessions.read(entry.id)[0].document() for entry in sessions.entries()}


# --- what is written


def test_a_document_of_ten_chats_is_stored_once(sessions: SavedChats):
    for i in range(10):
        chat = Chat(model(), saved_chats=sessions)
        chat.attach(Document(f"copy {i}.md", TEXT, "00"))
        chat.send("How deep?")
        chat.save()
    file = sessions.folder / NAME
    assert file.read_bytes().count(b"A report of wells. ") < 1.1 * 5_000
    assert [doc.name for e in sessions.entries() for doc in sessions.read(e.id)[0].messages[0].documents] == [
        f"copy {i}.md" for i in reversed(range(10))
    ]
    sessions.remove([entry.id for entry in sessions.entries()[1:]])
    assert sessions.open().saved.messages[0].documents[0].text == TEXT
    sessions.remove([sessions.entries()[0].id])
    assert b"A report of wells" not in b"".join(p.read_bytes() for p in sessions.folder.iterdir())


def test_the_figures_of_each_turn_are_kept(sessions: SavedChats):
    chat = Chat(model(cached=7), saved_chats=sessions)
    turns = [chat.send(f"question {i}") for i in range(3)]
    chat.save()
    chat.undo()
    again = Chat(model(), saved_chats=sessions).load(chat.save())
    found = [m.figures for m in again.messages[1::2]]
    for figures, turn in zip(found, turns[:2], strict=True):
        assert figures is not None
        assert (figures.prompt, figures.cached, figures.new) == (turn.stats.prompt, 7, turn.stats.new)
        assert (figures.read_tok_s, figures.decode_tok_s) == (turn.stats.read_tok_s, turn.stats.decode_tok_s)
        assert figures.first_token == turn.stats.first_token
    assert [m.figures for m in again.messages[::2]] == [None, None]


def test_only_turns_that_differ_are_written(sessions: SavedChats):
    chat = Chat(model(), saved_chats=sessions)
    rows = "SELECT id, question FROM turns ORDER BY n"
    for i in range(4):
        chat.send(f"question {i}")
        chat.save()
    before = sessions._run(lambda db: db.execute(rows).fetchall(), [])
    chat.undo(2)
    chat.send("another")
    chat.save()
    after = sessions._run(lambda db: db.execute(rows).fetchall(), [])
    assert after[:2] == before[:2]
    assert [question for _, question in after] == ["question 0", "question 1", "another"]
    assert sessions.search("another")
    assert sessions.search("question 3") == []


def test_what_is_forgotten_is_in_no_file(machine: Machine, sessions: SavedChats):
    machine("chat", "-p", "Where is the xylophone?")
    machine("chat", "-c", "-p", "And the zither?")
    machine("chat", "-p", "Something else")
    machine("chats", "export", "xylophone", "-o", "x.md")
    sessions.save(sessions.find("2"))
    assert machine("chats", "rm", "2", "-y").exit == 0
    left = b"".join(p.read_bytes() for p in (machine.folder / "home" / "data").rglob("*") if p.is_file())
    assert b"lophone" not in left
    assert b"zither" not in left
    assert b"Something else" in left
    assert (machine.folder / "x.md").exists()


# --- search


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("well", ["a"]), ("WELL beth", ["a"]), ("well harbour", []), ("café", ["b"]), ("cafe", ["b"]), ("plans", ["f"]),
        ('"', ["c"]), ('say "no"', ["c"]), ("NEAR(", []), ("a AND", ["c"]), ("OR", []), ("NOT well", []), ("*", ["d"]),
        ("question:well", []), ("^well", ["a"]), ("-well", ["a"]), ("well*", ["a"]), ("(", ["d"]), ("100 %", ["d"]),
        ("%", ["d"]), ("井戸", ["e"]), ("深い", ["e"]), ("\0well", ["a"]), ("\udcff", []),
        ("'; DROP TABLE turns; --", []), ("", []), ("   ", []), ("x" * 100_000, []), ("w " * 2_000, ["a", "b"]),
        ("my pl", ["f"]), ("\u202ewell", ["a", "g"]),
    ],
)  # fmt: skip
def test_search_takes_whatever_is_typed(sessions: SavedChats, query: str, found: list[str]):
    texts = {
        "a": "How deep is well Bethden?", "b": "Where is the café?", "c": 'She may say "no" to a AND b.',
        "d": "Is (a * b) 100 % of it?", "e": "この井戸は深いですか", "f": "?", "g": "a \u202ewell",
    }  # fmt: skip
    names = {hold_talk(sessions, texts[key], answer="!", title="My plans" if key == "f" else "t"): key for key in texts}
    assert sorted({names[entry.id] for entry in sessions.search(query)} - {"g"} | {"g"} & set(found)) == found
    assert len(sessions.entries()) == len(texts)


def test_the_best_come_first_each_once_and_with_their_neighbours(sessions: SavedChats):
    other = hold_talk(sessions, "A harbour, a ship, a long way, a well, and whatever else there is to be seen there")
    best = hold_talk(sessions, "well", "well well")
    found = sessions.search("well")
    assert [entry.id for entry in found] == [best, other]
    assert "a well, and" in found[1].found


# --- the command


def test_sessions_are_listed_shown_found_and_exported(machine: Machine, sessions: SavedChats):
    (machine.folder / "r.md").write_text("The report.")
    machine("chat", "-f", "r.md", "-p", "How deep?")
    machine("chat", "-p", "How wide?")
    listed = json.loads(machine("chats", "list", "--json").out)
    assert (listed["schema"], listed["total"]) == ("kvcli.chats/1", 2)
    assert [(s["title"], s["questions"], s["documents"]) for s in listed["chats"]] == [
        ("How wide?", 1, 0),
        ("How deep?", 1, 1),
    ]
    assert len(json.loads(machine("chats", "list", "-n", "1", "--json").out)["chats"]) == 1
    assert "1 more: -n 2" in machine("chats", "list", "-n", "1").err
    assert machine("chats", "show", "2").out.startswith("# How deep?\n\n## You\n\n*r.md, 1 line*")
    shown = json.loads(machine("chats", "show", "deep", "--json").out)
    assert shown["messages"][0]["documents"][0]["text"] == "The report."
    assert shown["messages"][1]["figures"]["new"] > 0
    (found,) = json.loads(machine("chats", "search", "deep", "--json").out)["chats"]
    assert found["found"] == "How deep?"
    assert "no saved chat contains zither" in machine("chats", "search", "zither").err
    assert machine("chats", "export", "deep", "-o", "deep.json").exit == 0
    assert "[file_exists]" in machine("chats", "export", "deep", "-o", "deep.json").err
    assert machine("chat", "-r", "deep.json", "-p", "And now?").exit == 0


@pytest.mark.parametrize("command", [["rm", "1"], ["prune", "--older-than", "0"]])
def test_nothing_is_forgotten_unasked(machine: Machine, sessions: SavedChats, command: list[str]):
    machine("chat", "-p", "How deep?")
    refused = machine("chats", *command)
    assert (refused.exit, len(sessions.entries())) == (2, 1)
    assert f"kvcli chats {command[0]}" in refused.err
    assert "--yes" in refused.err
    no = machine("chats", *command, stdin=b"n\n", tty=("stdin", "stderr"))
    assert (no.exit, len(sessions.entries())) == (2, 1)
    yes = machine("chats", *command, stdin=b"y\n", tty=("stdin", "stderr"))
    assert (yes.exit, sessions.entries()) == (0, [])
    assert "How deep? · 1 question" in yes.err
    assert machine("chats", "prune", "--older-than", "0", "--json").exit == 0


def test_prune_spares_what_is_young_and_says_what_would_go(machine: Machine, sessions: SavedChats):
    old, undated, _ = (hold_talk(sessions, text) for text in ("old", "undated", "young"))
    for name, date in ((old, "2020-01-01T00:00:00+01:00"), (undated, "")):
        sessions._db.run(lambda db, new=(date, name): db.execute("UPDATE sessions SET saved = ? WHERE name = ?", new))
    assert [s["id"] for s in json.loads(machine("chats", "prune", "--dry-run", "--json").out)["chats"]] == [old]
    assert len(sessions.entries()) == 3
    assert machine("chats", "prune", "-y").exit == 0
    assert old not in whole(sessions)
    assert len(sessions.entries()) == 2


def test_what_is_open_is_not_forgotten(machine: Machine, sessions: SavedChats):
    free, held = hold_talk(sessions, "one"), hold_talk(sessions, "two")
    opened = sessions.open(held, is_locked=True)
    done = machine("chats", "rm", free, held, "-y")
    assert "[chat_in_use]" in done.err
    assert len(sessions.entries()) == 2, "all or none"
    told = machine("chat", "-r", held, "-p", "three")
    assert "[chat_in_use]" in told.err
    assert "--no-save" in told.err
    assert machine("chat", "-r", held, "-p", "three", "--no-save").out == f"{ANSWER}\n"
    opened.close()
    assert machine("chats", "rm", free, held, "-y").exit == 0


@pytest.mark.parametrize("width", [40, 200])
def test_lists_fit_and_what_others_wrote_steers_no_terminal(machine: Machine, sessions: SavedChats, width: int):
    hold_talk(
        sessions, "How deep is \x1b]0;pwned\x07 the well? \u202e" * 9, answer="\x1b[2J done " * 40, title="a\x1b[31m\nb"
    )
    hold_talk(sessions, "井戸" * 60)
    machine.environ["COLUMNS"] = str(width)
    for args in (["list"], ["search", "well"], ["show", "2"]):
        done = machine("chats", *args, tty=("stdout",))
        assert done.exit == 0
        assert not {"\x1b", "\x07", "\u202e"} & set(done.out)
        if args != ["show", "2"]:
            assert all(text_width(line) < width for line in done.out.split("\n")), done.out
    assert "\x1b" not in machine("chats", "show", "2", "--json").out


# --- in the chat


def test_a_fork_goes_on_and_leaves_the_other_as_it_was(machine: Machine, sessions: SavedChats):
    machine.environ["TERM"] = "dumb"
    typed = b"/fork\none\n/fork Mine\ntwo\n/chats\n/chats two\n/chats zither\n/resume 2\n/resume 1\n/exit\n"
    done = machine("chat", stdin=typed, tty=("stdin", "stdout", "stderr"))
    said = " ".join(done.err.split())
    assert "this chat is not saved yet" in said
    assert "no saved chat contains zither" in said
    assert "this chat is open already" not in said.split("continues one")[0]
    assert [asked(sessions, entry.id) for entry in sessions.entries()] in (
        [["one"], ["one", "two"]],
        [["one", "two"], ["one"]],
    )
    assert {entry.title for entry in sessions.entries()} == {"one", "Mine"}


def test_save_writes_a_file_that_is_not_taken_in_again(machine: Machine, sessions: SavedChats):
    machine.environ["TERM"] = "dumb"
    done = machine("chat", "--no-save", stdin=b"one\n/save Wells\ntwo\n", tty=("stdin", "stdout", "stderr"))
    assert "from now on after each answer" in " ".join(done.err.split())
    (file,) = (machine.folder / "home" / "data" / "chats").iterdir()
    assert (file.stat().st_mode & 0o777, json.loads(file.read_text())["title"]) == (0o600, "Wells")
    (entry,) = SavedChats(sessions.folder).entries()
    assert file.stem == entry.id
    assert asked(sessions, entry.id) == ["one", "two"]


# --- a database of version 0.1.0

FIRST_RELEASE = """
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
INSERT INTO sessions VALUES (7, '20261127-101500-0a1b2c', 'Wells', 'demo', 'Be brief.', '2026-11-27T10:15:00+01:00', 3);
INSERT INTO turns VALUES (11, 7, 0, 'How deep?', '972 metres.', 'stop', 40, 8, 5, 0.5, 80.0, 20.0);
INSERT INTO turns VALUES (12, 7, 2, 'How wide?', 'Two', 'interrupted', NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO texts VALUES (1, 'd1', 'The report.'), (2, 'd2', 'Later.'), (3, 'd3', 'A thought.'), (4, 'd4', 'Notes.');
INSERT INTO documents VALUES
    (1, 7, 0, 'r.md', '01', 1), (2, 7, -1, 's.md', '02', 2), (3, 7, -5, '', '', 3), (4, 7, -2, '2', '', 4);
INSERT INTO files VALUES (1, '20261127-101500-0a1b2c.json 9 8 7', 'f1', 7);
INSERT INTO words (words) VALUES ('rebuild');
PRAGMA user_version = 1;
PRAGMA journal_mode = WAL;
"""


def test_a_database_of_the_first_release_is_read_whole_and_continued(sessions: SavedChats, told: list[str]):
    """With documents, a thought, notes on what is left out, and a gap where a damaged turn was lost."""
    sessions.folder.mkdir(parents=True)
    with closing(sqlite3.connect(sessions.folder / NAME)) as db:
        db.executescript(FIRST_RELEASE)
    (entry,) = sessions.entries()
    assert (entry.title, entry.questions, entry.files) == ("Wells", 2, ["r.md", "s.md"])
    chat = Chat(model(), saved_chats=sessions).load(entry.id)
    assert chat.system == "Be brief."
    assert [m.text for m in chat.messages] == ["How deep?", "972 metres.", "How wide?", "Two"]
    assert [m.thinking for m in chat.messages[1::2]] == ["", "A thought."]
    assert [m.finish for m in chat.messages[1::2]] == ["stop", "interrupted"]
    assert chat.messages[1].figures is not None
    assert (chat.messages[1].figures.cached, chat.messages[1].figures.decode_tok_s) == (8, 20.0)
    assert [(d.name, d.text) for d in chat.documents] == [("r.md", "The report."), ("s.md", "Later.")]
    assert sessions.read(entry.id)[0].left_out == LeftOut(messages=2, notes="Notes.")
    chat.send("And how old?")
    chat.save()
    again = Chat(model(), saved_chats=sessions).load(entry.id)
    assert again.messages == chat.messages
    assert sessions.search("deep")[0].id == sessions.search("old")[0].id == entry.id
    assert told == []


def test_the_files_beside_the_database_are_private_too(sessions: SavedChats):
    hold_talk(sessions, "one")
    with closing(database.connect(sessions.folder / NAME)) as db, db:
        db.execute("UPDATE sessions SET title = 'Two'")
        modes = {path.name: path.stat().st_mode & 0o777 for path in sessions.folder.iterdir()}
    assert modes == dict.fromkeys([NAME, f"{NAME}-wal", f"{NAME}-shm"], 0o600)


# --- what is damaged


def test_a_newer_form_is_refused_by_name_and_costs_no_answer(machine: Machine, sessions: SavedChats):
    hold_talk(sessions, "one")
    with sqlite3.connect(sessions.folder / NAME) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = (sessions.folder / NAME).read_bytes()
    for args in (["chats", "list"], ["chat", "-c", "-p", "two"]):
        done = machine(*args)
        assert done.exit == 3
        assert "[newer_sessions]" in done.err
        assert "was written by a newer kvcli" in " ".join(done.err.split())
    done = machine("chat", "-p", "two")
    assert (done.exit, done.out) == (0, f"{ANSWER}\n")
    assert "this chat is not saved" in done.err
    assert (sessions.folder / NAME).read_bytes() == before


@pytest.mark.parametrize("data", [b"", b"x", b"no database " * 1000, bytes(8192)])
def test_what_is_no_database_is_set_aside(machine: Machine, sessions: SavedChats, data: bytes):
    sessions.folder.mkdir(parents=True)
    (sessions.folder / NAME).write_bytes(data)
    done = machine("chat", "-p", "one")
    assert done.exit == 0
    assert "is damaged: it was renamed to" in " ".join(done.err.split())
    (aside,) = sessions.folder.glob(f"{NAME}.damaged-*")
    assert (aside.read_bytes(), aside.stat().st_mode & 0o777) == (data, 0o600)
    assert len(sessions.entries()) == 1


@pytest.mark.parametrize("name", ["../../x", "a/b", "", "x" * 99, "caf\u00e9", "\x1b[31m"])
def test_names_that_are_none_of_ours_become_no_files(sessions: SavedChats, told: list[str], name: str):
    hold_talk(sessions, "one")
    sessions._db.run(lambda db: db.execute("UPDATE sessions SET name = ?", [name]))
    opened = sessions.open("1", is_locked=True)
    assert (opened.name, len(told)) == ("found-1", 1)
    opened.close()
    sessions.remove(["found-1"])
    assert sessions.entries() == []


def test_what_is_kept_can_be_read_where_nothing_can_be_written(machine: Machine, sessions: SavedChats, monkeypatch):
    machine("chat", "-p", "How deep?")

    def fails(_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(database, "prepare", fails)
    done = machine("chat", "-c", "-p", "And now?")
    assert (done.exit, done.out) == (0, f"{ANSWER}\n")
    assert "disk I/O error" in " ".join(done.err.split())
    assert "How deep?" in "".join(map(chr, machine.model.prompts[-1]))
    done = machine("chats", "rm", "1", "-y")
    assert (done.exit, "[no_sessions]" in done.err) == (3, True)
    assert "KVCLI_HOME=FOLDER" in done.err
    monkeypatch.undo()
    assert asked(sessions, sessions.find(None)) == ["How deep?"]


def test_a_chat_that_cannot_be_locked_is_refused_with_what_to_type(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    """As on a read-only disk."""
    machine("chat", "-p", "How deep?")

    def fails(_: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(database, "private_folder", fails)
    done = machine("chat", "-c", "-p", "And now?")
    assert (done.exit, "Read-only file system" in done.err, "--no-save" in done.err) == (3, True, True)
    assert machine("chat", "-c", "-p", "And now?", "--no-save").out == f"{ANSWER}\n"


def test_a_database_that_is_a_link_is_one_where_it_leads(sessions: SavedChats, tmp_path: Path, told: list[str]):
    sessions.folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (sessions.folder / NAME).symlink_to(tmp_path / "elsewhere" / "chats.db")
    linked = SavedChats(sessions.folder, told.append)
    hold_talk(linked, "one")
    (tmp_path / "elsewhere" / "chats.db").write_bytes(b"damaged" * 999)
    hold_talk(linked, "two")
    assert (sessions.folder / NAME).is_symlink()
    assert len(told) == 1
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of some size."""
    folder = tmp_path_factory.mktemp("library")
    sessions = SavedChats(folder)
    for i in range(12):
        chat = Chat(model(f"answer {i} " * 30), saved_chats=sessions)
        chat.attach(Document("r.md", f"{i % 3} {TEXT[:9000]}", "00"))
        for n in range(5):
            chat.send(f"question {n} of {i} " * 10)
        chat.save()
    return folder / NAME


def damaged(library: Path, folder: Path, seeds: range, flips: int) -> Iterator[tuple[int, SavedChats, list[str]]]:
    """Copies with bytes changed, half of them in the same page."""
    sound = library.read_bytes()
    for seed in seeds:
        rng, data, told = random.Random(seed), bytearray(sound), list[str]()
        page = rng.randrange(len(data) // 4096) * 4096
        for _ in range(flips):
            at = page + rng.randrange(4096) if seed % 2 else rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
        home = folder / str(seed)
        home.mkdir(parents=True)
        (home / NAME).write_bytes(data)
        yield seed, SavedChats(home, told.append), told


def fuzz(library: Path, folder: Path, seeds: range, flips: int) -> tuple[int, int]:
    """How many turns there were and how many were lost, none of them in silence. Nothing here may raise."""
    n_turns = lost = 0
    for seed, sessions, told in damaged(library, folder, seeds, flips):
        before = (sessions.folder / NAME).read_bytes()
        if before[60:64] == VERSION.to_bytes(4):  # else it says that it is of a newer kvcli
            kept = {entry.id: asked(sessions, entry.id) for entry in sessions.entries()}
            n_found = sum(map(len, kept.values()))
            asides = [path.read_bytes() for path in sessions.folder.glob(f"{NAME}.damaged-*")]
            assert (before in asides) == bool(told), seed
            n_told = len(told)
            for name in kept:  # what continues one that has gaps takes no turn away
                chat = Chat(model(), saved_chats=sessions).load(name)
                chat.send("more")
                chat.save()
                assert "more" in asked(sessions, name), seed
            after = {text for entry in sessions.entries() for text in asked(sessions, entry.id)}
            assert {text for texts in kept.values() for text in texts if text.startswith("question")} <= after or (
                len(told) > n_told  # damage that only a write meets
            ), seed
            sessions.search("question")
            hold_talk(sessions, "one more")
            assert sessions.search("one more"), seed
            assert told or n_found == 60, seed
            n_turns, lost = n_turns + 60, lost + 60 - n_found
        shutil.rmtree(sessions.folder)
    return n_turns, lost


def test_of_a_damaged_database_what_can_be_read_is_there(library: Path, tmp_path: Path):
    for flips, seeds in ((1, 10), (20, 20)):
        n_turns, lost = fuzz(library, tmp_path / str(flips), range(seeds), flips)
        assert lost < 0.15 * n_turns, (lost, n_turns)


def test_two_rows_that_have_one_id_are_both_there(library: Path, tmp_path: Path):
    """As a changed bit makes them, in a file whose first row cannot be read either."""
    n_turns, lost = fuzz(library, tmp_path, range(163, 164), 30)
    assert lost < 0.1 * n_turns


@pytest.mark.slow
def test_of_a_damaged_database_what_can_be_read_is_there_a_thousand_times(library: Path, tmp_path: Path):
    for flips in (1, 3, 30):
        n_turns, lost = fuzz(library, tmp_path / str(flips), range(400), flips)
        print(f"{flips} flips: {lost} of {n_turns} turns lost")
        assert lost < 0.3 * n_turns


@pytest.mark.parametrize("page", [2, 3])
def test_a_page_of_zeros_costs_what_stood_there(library: Path, tmp_path: Path, page: int):
    """The second has titles, the third their index."""
    data = bytearray(library.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = bytes(4096)
    (tmp_path / NAME).write_bytes(data)
    told: list[str] = []
    sessions = SavedChats(tmp_path, told.append)
    assert len(sessions.entries()) == 12
    assert sum(len(asked(sessions, entry.id)) for entry in sessions.entries()) == 60
    assert len(told) == (page == 2), "an index is not needed to read"


def test_a_name_that_its_index_lacks_is_found(sessions: SavedChats):
    """A lost write: the index is as it was before the last chat, and no page of the file is broken."""
    hold_talk(sessions, "Where?")
    path = sessions.folder / NAME
    with closing(sqlite3.connect(path)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_sessions_1'").fetchone()
    at, before = slice((page - 1) * 4096, page * 4096), path.read_bytes()
    name = hold_talk(sessions, "How long?")
    data = bytearray(path.read_bytes())
    assert data[at] != before[at]
    data[at] = before[at]
    path.write_bytes(data)
    chat = Chat(model(), saved_chats=sessions).load(name)
    chat.send("And how wide?")
    assert chat.save() == name
    assert asked(sessions, name) == ["How long?", "And how wide?"]
    assert len(sessions.entries()) == 2


def test_of_a_document_whose_text_is_lost_no_name_is_left(sessions: SavedChats, told: list[str]):
    """Or it would be listed, and the model shown nothing of it."""
    names = [with_documents(sessions, name) for name in ("lost.pdf", "left.pdf")]
    with closing(sqlite3.connect(sessions.folder / NAME)) as db, db:
        db.execute("DELETE FROM texts WHERE text LIKE '%lost%'")
        db.execute("UPDATE sessions SET latest = 'x'")  # that it is damaged is seen there
    documents = [[d.name for m in sessions.read(name)[0].messages for d in m.documents] for name in names]
    assert documents == [[], ["left.pdf"]]
    assert len(told) == 1
    assert {entry.id: entry.files for entry in sessions.entries()} == dict(zip(names, documents, strict=True))


def test_what_is_written_is_on_the_disk_and_what_is_removed_is_overwritten(sessions: SavedChats):
    """What SQLite promises of a power cut hangs on these settings of each connection."""
    hold_talk(sessions, "Where?")
    asks = ("synchronous", "journal_mode", "secure_delete", "trusted_schema", "cell_size_check")
    said = Database(sessions.folder, pytest.fail).run(
        lambda db: [db.execute(f"PRAGMA {a}").fetchone()[0] for a in asks]
    )
    assert dict(zip(asks, said, strict=True)) == {
        "synchronous": 2,  # FULL: waits for the disk at each transaction, not at checkpoints alone
        "journal_mode": "wal",
        "secure_delete": 1,
        "trusted_schema": 0,
        "cell_size_check": 1,
    }


def test_a_short_stress_test_of_kills_loses_nothing_that_was_said_to_be_kept():
    found = storm(kills=10, pairs=0, turns=0, seed=2)
    assert (found["tried"], found["bad"]) == (10, 0), found


@pytest.mark.slow
def test_a_long_stress_test_of_kills_loses_nothing_that_was_said_to_be_kept():
    found = storm(kills=200, pairs=0, turns=0, seed=3)
    assert (found["tried"], found["bad"]) == (200, 0), found


# --- found by what its documents are called


def with_documents(sessions: SavedChats, *names: str) -> str:
    chat = Chat(model(), saved_chats=sessions)
    for name in names:
        chat.attach(Document(name, f"text of {name}", name))
    chat.send("What is in it?")
    return chat.save()


@pytest.mark.parametrize(
    "typed", ["faq.pdf", "FAQ.pdf", "faq", "annual", "2024_annual-report.docx", "report 2024", "what faq"]
)
def test_a_chat_is_found_by_the_name_of_its_document(sessions: SavedChats, machine: Machine, typed: str):
    name = with_documents(sessions, "faq.pdf", "2024_annual-report.docx")
    with_documents(sessions, "other.md")
    hold_talk(sessions, "pdf")
    assert sessions.find(typed) == name
    assert [entry.id for entry in sessions.search(typed)] == [name]
    if " " not in typed:
        assert "continues What is in it?" in machine("chat", "-r", typed, "-p", "And?").err


def test_of_several_with_one_document_none_is_chosen(sessions: SavedChats):
    names = {with_documents(sessions, "faq.pdf") for _ in range(2)}
    with pytest.raises(BadInput, match=r"several saved chats match faq\.pdf"):
        sessions.find("faq.pdf")
    assert {entry.id for entry in sessions.search("faq.pdf")} == names


def test_documents_are_named_in_the_list(sessions: SavedChats, machine: Machine):
    with_documents(sessions, "faq.pdf", "b.md", "c.md")
    hold_talk(sessions, "none")
    assert "faq.pdf +2" in machine("chats", "list").out
    held = json.loads(machine("chats", "list", "--json").out)["chats"]
    assert [(e["documents"], e["files"]) for e in held] == [(0, []), (3, ["faq.pdf", "b.md", "c.md"])]
