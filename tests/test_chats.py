"""Chats that are kept: turn by turn, opened again, one process at a time, and refused by name when damaged."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvcli.chat import database
from kvcli.chat import database as chat_tables
from kvcli.chat.conversation import Chat
from kvcli.chat.database import NAME, chat_lock
from kvcli.chat.saved_chats import SavedChats, read_chat
from kvcli.chat.transcript import messages_of
from kvcli.commands.chat.repl import Repl
from kvcli.commands.chat.slash import SLASH
from kvcli.commands.common.run_setup import Setup
from kvcli.documents import Document
from kvcli.environment import Environment, Paths
from kvcli.errors import BadConfig, BadInput
from kvcli.files import BEGINS, ENDS, lock
from kvcli.policies.scoring.headmap import read_headmap
from kvcli.render.terminal.screen import Screen
from kvcli.schemas.turn import ChatDocument
from tests.bench.stress_chats import storm
from tests.fake_model import FakeModel, FakeProfile, fake_info
from tests.fakes import Machine

ROOT = Path(__file__).parents[1]
ANSWER = "It is 972 metres."


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(Setup, "load", lambda self, _profile, _tell=None: made.model)
    return made


def kept(machine: Machine) -> list[ChatDocument]:
    """What is on the disk, oldest first."""
    sessions = SavedChats(machine.folder / "home" / "data")
    return [sessions.read(name)[0] for name in names(machine)]


def names(machine: Machine) -> list[str]:
    return [entry.id for entry in reversed(SavedChats(machine.folder / "home" / "data").entries())]


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk dropped: SQLite may not lengthen its file, and no file of ours is synced."""
    begun = database.prepare

    def prepare(db: sqlite3.Connection) -> None:
        begun(db)
        db.execute("PRAGMA max_page_count = 1")  # as many as there are

    monkeypatch.setattr(database, "prepare", prepare)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))


def texts(saved: ChatDocument) -> list[str]:
    return [message.text for message in saved.messages]


# --- one question, and the next


def test_the_next_question_goes_on_with_the_last(machine: Machine):
    (machine.folder / "r.md").write_text("The report.")
    assert machine("chat", "-f", "r.md", "-s", "Be brief.", "-p", "How deep?").exit == 0
    done = machine("chat", "-c", "-p", "And how wide?")
    assert (done.exit, done.out) == (0, f"{ANSWER}\n")
    asked = "".join(map(chr, machine.model.prompts[-1]))
    assert asked.index("Be brief.") < asked.index("The report.") < asked.index(ANSWER) < asked.index("And how wide?")
    (one,) = kept(machine)
    assert texts(one) == ["How deep?", ANSWER, "And how wide?", ANSWER]
    assert (one.title, one.system) == ("How deep?", "Be brief.")


def test_kept_chats_are_private(machine: Machine):
    machine("chat", "-p", "How deep?")
    folder = machine.folder / "home" / "data"
    assert [p.stat().st_mode & 0o777 for p in (folder, folder / NAME)] == [0o700, 0o600]


def test_a_chat_goes_on_by_its_name_its_number_or_its_file(machine: Machine):
    for question in ("one", "two", "three"):
        machine("chat", "-p", question)
    one, _, three = names(machine)
    machine("chats", "export", "two", "-o", "two.json")
    assert machine("chat", "-r", one, "-p", "by name").exit == 0
    assert machine("chat", "-r", "two.json", "-p", "by file").exit == 0
    assert machine("chat", "-r", "./two.json", "-p", "and again").exit == 0  # with what came of it the first time
    assert machine("chat", "-r", "TWO", "-p", "by title").exit == 3  # which by now two have
    assert machine("chat", "-r", three[:-1], "-p", "by its beginning").exit == 0
    assert machine("chat", "-r", "4", "-p", "by number").exit == 0  # 1 is the latest, now "three"
    assert machine("chat", "-r", "Thr", "-p", "by title").exit == 0
    assert [texts(saved)[::2] for saved in kept(machine)] == [
        ["one", "by name"],
        ["two", "by file", "and again"],
        ["two", "by number"],
        ["three", "by its beginning", "by title"],
    ]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["-c"], "no_chat", "there are no saved chats"),
        (["-r", "2026"], "no_chat", "there are no saved chats"),
        (["-r", "nowhere.json"], "file_missing", "no such chat file"),
        (["-c", "-r", "x"], "usage", "exclude each other"),
    ],
)
def test_what_cannot_go_on_is_said(machine: Machine, args: list[str], code: str, words: str):
    done = machine("chat", *args, "-p", "How deep?")
    assert done.exit in (2, 3)
    assert f"[{code}]" in done.err
    assert words in " ".join(done.err.split())


def test_a_name_that_several_have_lists_them(machine: Machine):
    for question in ("one", "two"):
        machine("chat", "-p", question)
    done = machine("chat", "-r", "20", "-p", "Which?")  # years begin so
    assert done.exit == 3
    done = machine("chat", "-r", "202", "-p", "Which?")
    assert "several saved chats match 202" in done.err
    assert all(name in done.err for name in names(machine))


def test_no_save_keeps_nothing_and_leaves_what_is_kept(machine: Machine):
    machine("chat", "-p", "one", "--no-save")
    assert not (machine.folder / "home" / "data" / NAME).exists()
    machine("chat", "-p", "two")
    machine("chat", "-c", "-p", "three", "--no-save")
    assert [texts(one)[::2] for one in kept(machine)] == [["two"]]


def test_a_setting_keeps_nothing(machine: Machine):
    config = machine.folder / "home" / "config" / "config.toml"
    config.write_text(f"keep_chats = false\n{config.read_text()}")
    assert machine("chat", "-p", "one").exit == 0
    assert not (machine.folder / "home" / "data" / NAME).exists()


def test_a_project_does_not_decide_what_is_kept(machine: Machine):
    (machine.folder / ".kvcli.toml").write_text("keep_chats = true\n")
    assert "a project file may not set this" in machine("chat", "-p", "one").err


def test_the_model_that_a_chat_was_held_with_is_used_unless_another_is_typed(machine: Machine, monkeypatch):
    asked: list[str | None] = []
    monkeypatch.setattr("kvcli.commands.common.load_model.load_model", _stop_at(asked))
    sessions = SavedChats(machine.folder / "home" / "data")
    chat = Chat(FakeModel(answer=ANSWER, info=fake_info(id="x")), saved_chats=sessions, called="owner/name")
    chat.send("How deep?")
    chat.save()
    for args in (["-c"], ["-c", "-m", "other/name"], []):
        machine("chat", *args, "-p", "And now?")
    assert asked[:2] == ["owner/name", "other/name"]
    assert asked[2] not in asked[:2]


def test_a_file_from_elsewhere_names_no_model_that_is_not_here(machine: Machine, monkeypatch):
    asked: list[str | None] = []
    monkeypatch.setattr("kvcli.commands.common.load_model.load_model", _stop_at(asked))
    for name, called in {"theirs": "owner/name", "folder": str(machine.folder), "known": "demo"}.items():
        chat = Chat(FakeModel(answer=ANSWER), called=called)
        chat.send("How deep?")
        chat.export(machine.folder / f"{name}.json")
    for name in ("theirs", "folder"):
        done = machine("chat", "-r", f"{name}.json", "-p", "And now?")
        assert (done.exit, asked) == (3, [])
        assert "[foreign_model]" in done.err
        assert "-m " in done.err
    machine("chat", "-r", "theirs.json", "-m", "owner/name", "-p", "And now?")
    machine("chat", "-r", "known.json", "-p", "And now?")
    assert asked == ["owner/name", "demo"]
    assert kept(machine) == [], "nothing was answered, so nothing of theirs came in"


def test_one_question_says_which_chat_it_goes_on_with_and_with_v_where_it_is_kept(machine: Machine):
    first = machine("chat", "-p", "How deep?")
    assert "goes on" not in first.err
    assert "kept as" not in first.err
    done = machine("-v", "chat", "-c", "-p", "And now?")
    said = " ".join(done.err.split())
    assert re.search("continues How deep. . 1 question", said)
    assert f"saved as {names(machine)[0]}" in said
    assert done.out == f"{ANSWER}\n"


def test_ctrl_c_while_one_question_is_kept_costs_nothing(machine: Machine, monkeypatch):
    write = SavedChats.write

    def interrupted(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        write(*args)

    monkeypatch.setattr(SavedChats, "write", interrupted)
    done = machine("chat", "-p", "How deep?")
    assert (done.exit, done.out) == (0, f"{ANSWER}\n")
    assert [texts(one)[0] for one in kept(machine)] == ["How deep?"]


def _stop_at(asked: list[str | None]):
    def load(setup: Setup, *_: object) -> None:
        asked.append(setup.name)
        raise BadInput("stop")

    return load


def test_a_models_folder_is_kept_by_its_whole_path(machine: Machine, monkeypatch):
    (machine.folder / "mine").mkdir()
    monkeypatch.chdir(machine.folder)
    assert Setup(machine.world(), "mine").lasting_name == str(machine.folder / "mine")
    assert Setup(machine.world(), "demo").lasting_name == "demo"
    assert Setup(machine.world(), "owner/name").lasting_name == "owner/name"


def test_a_full_disk_costs_no_answer(machine: Machine, monkeypatch):
    machine("chat", "-p", "How wide?")
    full(monkeypatch)
    machine.model.answer = ANSWER * 10_000
    done = machine("chat", "-p", "How deep?")
    assert (done.exit, done.out) == (0, f"{ANSWER * 10_000}\n")
    said = " ".join(done.err.split())
    assert re.search("this chat is not saved: cannot use .*: database or disk is full", said)
    assert [texts(one)[0] for one in kept(machine)] == ["How wide?"]
    assert [p.name for p in (machine.folder / "home" / "data").iterdir() if ".part" in p.name] == []


def test_a_file_given_twice_is_attached_once(machine: Machine):
    (machine.folder / "r.md").write_text("The report.")
    done = machine("chat", "-f", "r.md", "-f", "r.md", "-p", "How deep?")
    assert "r.md is attached already" in done.err
    assert "".join(map(chr, machine.model.prompts[-1])).count("The report.") == 1
    machine("chat", "-c", "-f", "r.md", "-p", "And now?")
    assert "".join(map(chr, machine.model.prompts[-1])).count("The report.") == 1


# --- a conversation


class Keys:
    def __init__(self, lines):
        self.lines = list(lines)

    def read(self, _default=""):
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


class Profiles:
    """Whose `lean` knows no temperature."""

    def __init__(self):
        self.asked = []

    def names(self):
        return ["exact", "lean"]

    def keys(self):
        return []

    def resolve(self, name, sets):
        if name == "lean" and any("temperature" in item for item in sets):
            raise BadConfig("lean has no temperature")
        self.asked.append((name, tuple(sets)))
        return FakeProfile(name)


class Talk:
    """A chat that is kept, on a screen that is a string."""

    def __init__(self, root: Path, **options):
        self.world = Environment(
            io.StringIO(), io.StringIO(), io.StringIO(), {}, root, Paths.of({"KVCLI_HOME": str(root)})
        )
        self.sessions = SavedChats(self.world.paths.data)
        self.profiles = Profiles()
        self.chat = Chat(FakeModel(answer=ANSWER), saved_chats=self.sessions, is_locked=True)
        options = {"saves": True, "profiles": self.profiles, "profile": "exact"} | options
        self.repl = Repl(self.chat, Screen.of(self.world), self.world, SLASH, **options)

    def type(self, *lines):
        self.repl.reader, self.repl.is_over = Keys(lines), False
        before = len(self.world.stderr.stream.getvalue())
        self.repl.run()
        return " ".join(self.world.stderr.stream.getvalue()[before:].split())

    @property
    def names(self):
        return [entry.id for entry in reversed(self.sessions.entries())]

    def saved(self, i=-1):
        return texts(self.sessions.read(self.names[i])[0])[::2]


@pytest.fixture
def talk(tmp_path):
    made = Talk(tmp_path)
    yield made
    made.chat.close()


def test_every_turn_is_on_the_disk_before_the_next_line(talk):
    seen = []

    class Looking(Keys):
        def read(self, default=""):
            seen.append(talk.saved() if talk.names else [])
            return super().read(default)

    talk.type()
    talk.repl.reader, talk.repl.is_over = Looking(["one", "two", "/undo", "/clear", "three"]), False
    talk.repl.run()
    assert seen == [[], ["one"], ["one", "two"], ["one"], ["one"], ["three"]]
    assert len(talk.names) == 2  # what was cleared is still there


def test_a_chat_without_a_question_is_not_kept(talk, tmp_path):
    (tmp_path / "r.md").write_text("The report.")
    talk.type("/system Be brief.", "/file r.md", "/files")
    assert talk.names == []


def test_nothing_is_written_where_nothing_changed(talk):
    talk.type("one")
    before = talk.chat.saved_chat.version
    talk.type("/tokens", "/stats", "/files")
    assert talk.chat.saved_chat.version == before


def test_load_lists_and_opens(talk, tmp_path):
    talk.type("one", "/clear", "two", "/save Second", "/clear")
    said = talk.type("/load")
    assert "1 " in said
    assert "Second * 1 question" in said
    assert "one * 1 question" in said
    assert "continues one * 1 question" in talk.type("/load 2", "again")
    assert talk.saved() == ["one", "again"]
    assert "this chat is open already" in talk.type("/load 1")
    assert "[no_chat]" in talk.type("/load nothing")
    assert "there are no saved chats yet" in Talk(tmp_path / "other").type("/load")


def test_what_was_cleared_and_what_is_left_is_said_to_be_kept(talk):
    said = talk.type("one", "/clear", "two")
    assert "removed 1 question; the chat is saved, and /resume opens it again" in said
    assert said.endswith("saved; to continue: kvcli chat -c")


def test_titles_and_lists_fit_a_narrow_terminal(talk):
    talk.world.environ["COLUMNS"] = "40"
    talk.type("What is the depth of the oldest of the wells at Bethden, in metres?", "/save Two\\nlines")
    before = len(talk.world.stderr.stream.getvalue())
    talk.type("/load")
    assert all(len(line) < 40 for line in talk.world.stderr.stream.getvalue()[before:].split("\n"))


def test_a_chat_that_is_not_kept_is_after_save(tmp_path):
    talk = Talk(tmp_path, saves=False)
    talk.type("one")
    assert talk.names == []
    assert "from now on after each answer" in talk.type("/save Wells", "two")
    assert talk.saved() == ["one", "two"]
    talk.chat.close()


def test_a_chat_that_somebody_else_changed_goes_on_in_a_session_of_its_own(talk):
    talk.type("one")
    Chat(FakeModel(), saved_chats=talk.sessions).load(talk.names[0]).save("mine")  # without asking for the lock
    assert "another kvcli process changed" in talk.type("two")
    assert talk.sessions.read(talk.names[0])[0].title == "mine"
    assert (talk.saved(0), talk.saved()) == (["one"], ["one", "two"])
    assert "changed" not in talk.type("three")


def test_a_chat_that_somebody_removed_is_written_again(talk):
    talk.type("one")
    for remove in (lambda: (talk.world.paths.data / NAME).unlink(), lambda: _delete(talk)):
        remove()
        talk.type("two", "/undo", "two")
        assert talk.saved() == ["one", "two"]
        talk.type("/undo")


def _delete(talk):
    """As somebody does who asks for no lock."""
    names = talk.names
    talk.sessions._db.run(lambda db: chat_tables.remove(db, names))


def test_the_latest_chat_is_the_one_that_was_kept_last_whatever_the_clock_says(talk):
    talk.type("one")
    later = "UPDATE sessions SET saved = '2099-01-01T00:00:00+00:00', name = '20990101-000000-aaaaaa'"
    talk.sessions._db.run(lambda db: db.execute(later))  # kept before the clock was put back
    talk.chat.close()
    talk.type("/clear", "two")
    assert talk.saved() == ["two"]
    talk.type("/load 2", "three")
    assert talk.saved() == ["one", "three"]
    assert talk.names[-1] == talk.chat.saved_chat.name


def test_ctrl_c_while_a_turn_is_kept_costs_neither_the_turn_nor_the_chat(talk, monkeypatch):
    write = SavedChats.write

    def interrupted(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        write(*args)

    monkeypatch.setattr(SavedChats, "write", interrupted)
    talk.type("one", "two")
    assert talk.saved() == ["one", "two"]


def test_a_disk_that_hangs_is_given_up_by_a_second_ctrl_c(talk, monkeypatch):
    monkeypatch.setattr(SavedChats, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert "this chat is not saved: stopped" in talk.type("one", "two")
    monkeypatch.undo()
    talk.type("three")
    assert talk.saved() == ["one", "two", "three"]


@pytest.mark.parametrize("line", ["What is \udcff?", "/system Be \udcff.", "/save \udcff", "//\udcff"])
def test_what_is_typed_and_no_utf_8_is_refused_by_name(talk, line: str):
    talk.type("one")
    assert "what was typed is not valid UTF-8" in talk.type(line)
    talk.type("two")
    assert talk.saved() == ["one", "two"]


def test_an_edited_question_that_is_no_utf_8_is_refused_by_name(talk, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'bytes \\377' > $1\n")
    editor.chmod(0o700)
    talk.world.environ["EDITOR"] = str(editor)
    assert "[bad_encoding]" in talk.type("one", "/edit")
    assert talk.saved() == ["one"]


def test_a_full_disk_costs_no_turn(talk, monkeypatch):
    talk.type("one")
    talk.chat.text_session.answer = ANSWER * 10_000
    with monkeypatch.context() as patch:
        full(patch)
        assert "this chat is not saved: cannot use" in talk.type("two")
        assert talk.saved() == ["one"]
    talk.type("/tokens")
    assert talk.saved() == ["one", "two"]


# --- two processes

OTHER = """
import sys
from pathlib import Path
from kvcli.chat.conversation import Chat
from kvcli.chat.saved_chats import SavedChats
from kvcli.errors import BadInput
from tests.fake_model import FakeModel
folder, name, n = sys.argv[1:]
try:
    chat = Chat(FakeModel(answer="an answer"), saved_chats=SavedChats(Path(folder)), is_locked=name == "held").load("1")
except BadInput as error:
    sys.exit(f"{error.code}: {error.message}")
print(flush=True)
input()
kept, code = 0, ""
while kept < int(n) and code != "chat_changed":
    chat.send(f"{name} {kept}")
    try:
        chat.save()
        kept += 1
    except BadInput as error:
        code = error.code
        chat.undo()
print(kept, code)
"""


def other(folder: Path, name: str, n: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER, str(folder), name, str(n)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


@pytest.fixture
def sessions(tmp_path: Path) -> SavedChats:
    """One is kept."""
    made = SavedChats(tmp_path / "data")
    chat = Chat(FakeModel(answer=ANSWER), saved_chats=made)
    chat.send("How deep?")
    chat.save()
    return made


def only(sessions: SavedChats) -> list[str]:
    (entry,) = sessions.entries()
    return texts(sessions.read(entry.id)[0])


def test_a_second_process_is_told_who_has_a_chat_open(sessions: SavedChats):
    first = other(sessions.folder, "held", 3)
    assert first.stdout.readline() == "\n"
    second = other(sessions.folder, "held", 3)
    told = second.communicate()[1]
    assert told.startswith("chat_in_use: ")
    assert f"(process {first.pid}, since " in told
    first.stdin.write("\n")
    first.stdin.flush()
    assert first.wait() == 0
    assert only(sessions)[::2] == ["How deep?", "held 0", "held 1", "held 2"]
    third = other(sessions.folder, "held", 1)  # the first one is gone, and its lock with it
    third.communicate("\n")
    assert len(only(sessions)) == 10


def test_of_two_processes_that_save_one_chat_none_loses_a_turn_unsaid(sessions: SavedChats):
    both = [other(sessions.folder, name, 40) for name in ("a", "b")]
    for process in both:
        assert process.stdout.readline() == "\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate()[0].split() for process in both]
    kept = only(sessions)[2::2]
    assert sorted(kept) == sorted(
        f"{name} {i}" for name, words in zip("ab", said, strict=True) for i in range(int(words[0]))
    )
    assert any("chat_changed" in words for words in said)


def test_a_held_session_stays_held_while_it_is_written_again_and_again(tmp_path: Path):
    sessions = SavedChats(tmp_path)
    chat = Chat(FakeModel(answer=ANSWER), saved_chats=sessions, is_locked=True)
    for n in range(5):
        chat.send(f"question {n}")
        name = chat.save()
        with pytest.raises(BadInput, match="is open in another"):
            sessions.open(name, is_locked=True)
        assert len(sessions.open(name).saved.messages) == 2 * n + 2  # to look at it is free
    n_open = len(os.listdir("/proc/self/fd"))
    chat.close()
    chat.close()
    assert len(os.listdir("/proc/self/fd")) == n_open - 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [NAME]
    sessions.open(name, is_locked=True).close()


def test_a_lock_that_a_sweep_takes_for_a_moment_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    handle = os.open(tmp_path / f"{BEGINS}mine{ENDS}", os.O_RDWR | os.O_CREAT)
    lock(handle, wait=False)
    monkeypatch.setattr("kvcli.chat.database.time.sleep", lambda _: os.close(handle))
    with chat_lock(tmp_path, "mine"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_short_stress_test_of_kills_and_pairs_damages_nothing():
    """`python tests/bench/stress_chats.py` is the long one."""
    found = storm(kills=8, pairs=2, turns=12)
    assert (found["tried"], found["bad"], found["refused"]) == (10, 0, 1), found


@pytest.mark.slow
def test_a_long_stress_test_of_kills_and_pairs_damages_nothing():
    found = storm(kills=200, pairs=10, turns=100, seed=1)
    assert found["bad"] == 0, found
    assert found["left over"] > 20, "kills that never hit a write show little"


# --- what is damaged


def test_a_database_that_cannot_be_made_leaves_no_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """SQLite makes a file when it opens one to read; the next run would call it damaged."""

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(database, "temporary_folder", full)
    chats = SavedChats(tmp_path)
    with pytest.raises(BadInput, match="No space left"):
        chats.write(chats.begin(is_locked=False), chats.begin(is_locked=False).saved)
    assert not (tmp_path / database.NAME).exists()


def test_a_new_database_is_whole_without_a_wal_file(tmp_path: Path):
    """It is renamed alone: pages that a full disk left in the -wal file of its temporary name would be lost."""
    database.Database(tmp_path, print)._renew(None)
    assert (tmp_path / database.NAME).read_bytes()[18:20] == b"\1\1"  # versions of the format; 2 = WAL


WHOLE = {
    "schema": "kvcli.chat/1", "title": "t", "model": "demo", "saved": "", "system": None, "pending": [],
    "messages": [
        {"role": "user", "text": "a", "documents": [], "finish": None},
        {"role": "assistant", "text": "b", "documents": [], "finish": "stop"},
    ],
}  # fmt: skip


def damaged(**changes: object) -> bytes:
    return json.dumps(WHOLE | changes).encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"schema": "kvcli.chat/1", "messages": ' + b'{"a":' * 100_000, "recursion"),
        (damaged(title="\ud800"), "hex escape"),
        (damaged(messages=[*WHOLE["messages"], WHOLE["messages"][0]]), "turns"),
        (damaged(messages=WHOLE["messages"][::-1]), "turns"),
        (damaged(messages=[{**WHOLE["messages"][0], "role": "system"}]), "messages.0.role"),
        (damaged(messages=[{**WHOLE["messages"][0], "text": 5}]), "messages.0.text"),
        (damaged(messages=[{**WHOLE["messages"][0], "finish": "bored"}]), "messages.0.finish"),
        (damaged(messages={}), "messages"),
        (damaged(pending=[{"name": "x"}]), "pending.0"),
        (damaged(pending=None), "pending"),
        (damaged(schema="kvcli.chat/2"), "schema"),
        (damaged(system=["x"]), "system"),
        (damaged()[:-9], "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"9" * 10_000, ""),
        (b"", "JSON"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_changes_nothing(tmp_path: Path, data: bytes, words: str):
    chat = Chat(FakeModel(answer=ANSWER), "Be brief.", saved_chats=SavedChats(tmp_path / "data"))
    chat.attach(Document("r.md", "The report.", "00"))
    chat.send("How deep?")
    chat.attach(Document("s.md", "Later.", "01"))
    own, before = chat.save(), (list(chat.messages), list(chat.pending), chat.system, chat.title)
    path = tmp_path / "damaged.json"
    path.write_bytes(data)
    with pytest.raises(BadInput) as caught:
        chat.load(path)
    assert caught.value.code == "not_a_chat"
    assert str(path) in caught.value.message
    assert words in " ".join(caught.value.lines)
    assert (list(chat.messages), list(chat.pending), chat.system, chat.title) == before
    assert chat.save() == own
    assert path.read_bytes() == data


def test_what_is_no_file_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "huge.json").write_bytes(damaged())
    monkeypatch.setattr("kvcli.chat.saved_chats.MOST", len(damaged()))
    assert read_chat(tmp_path / "huge.json")
    monkeypatch.setattr("kvcli.chat.saved_chats.MOST", len(damaged()) - 1)
    for name in ("pipe", "huge", "folder"):
        with pytest.raises(BadInput) as caught:
            read_chat(tmp_path / f"{name}.json")
        assert caught.value.code == "not_a_chat"
        assert name in caught.value.message


def test_a_later_version_may_know_more(tmp_path: Path):
    (tmp_path / "x.json").write_bytes(damaged(kv="a snapshot"))
    assert Chat(FakeModel(), saved_chats=SavedChats(tmp_path)).load(tmp_path / "x.json").title == "t"


def test_what_no_file_can_hold_is_replaced_not_lost(tmp_path: Path):
    """Half of a pair, as a name that is not UTF-8 has it."""
    sessions = SavedChats(tmp_path)
    chat = Chat(FakeModel(answer=ANSWER), saved_chats=sessions)
    chat.attach(Document("r\udcff.md", "The report.", "00"))
    chat.send("How deep?")
    saved, _ = sessions.read(chat.save())
    assert messages_of(saved)[0].documents[0].name == "r\N{REPLACEMENT CHARACTER}.md"


@pytest.mark.parametrize("data", ["[" * 100_000, "[[1e400, 1" + "0" * 400 + "]]", '{"heads": [[' + "1" * 400 + "]]}"])
def test_a_head_map_without_end_is_refused(tmp_path: Path, data: str):
    (tmp_path / "map.json").write_text(data)
    with pytest.raises(BadInput) as caught:
        read_headmap(tmp_path / "map.json")
    assert caught.value.code == "bad_headmap"


# --- settings on the way


def test_what_was_set_stays_with_another_profile(talk):
    said = talk.type("/set sample.seed 1", "/set sample.seed 2", "/profile exact", "/profile")
    assert "sample.seed=1, " not in said
    assert said.endswith("exact with sample.seed=2")
    assert talk.profiles.asked[-1] == ("exact", ("sample.seed=2",))


def test_what_another_profile_cannot_take_is_left_out_and_said(talk):
    said = talk.type("/set sample.temperature 0.5", "/profile lean", "/profile")
    assert "sample.temperature=0.5 is not set: lean has no temperature" in said
    assert said.endswith(" lean")


def test_what_was_typed_at_the_start_stays_too(tmp_path):
    talk = Talk(tmp_path, sets=["sample.seed=1"])
    talk.type("/set sample.seed 2", "/profile lean")
    assert talk.profiles.asked[-1] == ("lean", ("sample.seed=1", "sample.seed=2"))
    assert talk.type("/profile") == "lean with sample.seed=2"


def test_a_file_is_attached_once_and_dropped_in_true_words(talk, tmp_path):
    (tmp_path / "p.txt").write_text("The report.")
    assert "p.txt is attached already, as 1 of /files" in talk.type("/file p.txt", "/file p.txt")
    assert "removed p.txt; it was not read yet" in talk.type("/drop 1")
    assert "removed p.txt; the text after it is read again" in talk.type("/file p.txt", "one", "/drop 1")
