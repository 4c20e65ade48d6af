"""Chats that are kept: turn by turn, opened again, one process at a time, and refused by name when damaged."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcli.chat.chat_file import ChatFile
from kvcli.chat.conversation import Chat
from kvcli.chat.transcript import newest, open_chat
from kvcli.commands.repl import Repl
from kvcli.commands.setup import Setup
from kvcli.documents import Document
from kvcli.errors import BadConfig, BadInput
from kvcli.policies.headmap import read_headmap
from kvcli.render.screen import Screen
from kvcli.schemas.chat import ChatDocument
from kvcli.world import Paths, World
from tests.bench.storm_chats import storm
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
    files = sorted((machine.folder / "home" / "data" / "chats").glob("*"), key=lambda p: p.stat().st_mtime_ns)
    return [open_chat(path).saved for path in files]


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
    folder = machine.folder / "home" / "data" / "chats"
    assert [p.stat().st_mode & 0o777 for p in (folder, *folder.iterdir())] == [0o700, 0o600]


def test_a_chat_goes_on_by_its_name_its_number_or_its_file(machine: Machine):
    for question in ("one", "two", "three"):
        machine("chat", "-p", question)
    files = sorted((machine.folder / "home" / "data" / "chats").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    assert machine("chat", "-r", files[0].stem, "-p", "by name").exit == 0
    assert machine("chat", "-r", str(files[1]), "-p", "by file").exit == 0
    assert machine("chat", "-r", "3", "-p", "by number").exit == 0  # 1 is the latest, now "two"
    assert [texts(open_chat(path).saved)[::2] for path in files] == [
        ["one", "by name"],
        ["two", "by file"],
        ["three", "by number"],
    ]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["-c"], "no_chat", "no conversation is kept"),
        (["-r", "2026"], "no_chat", "no conversation is kept"),
        (["-r", "nowhere.json"], "file_missing", "no such conversation"),
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
    assert "several conversations begin with 202" in done.err
    assert all(path.stem in done.err for path in (machine.folder / "home" / "data" / "chats").iterdir())


def test_no_save_keeps_nothing_and_leaves_what_is_kept(machine: Machine):
    machine("chat", "-p", "one", "--no-save")
    assert not (machine.folder / "home" / "data" / "chats").exists()
    machine("chat", "-p", "two")
    machine("chat", "-c", "-p", "three", "--no-save")
    assert [texts(one)[::2] for one in kept(machine)] == [["two"]]


def test_a_setting_keeps_nothing(machine: Machine):
    config = machine.folder / "home" / "config" / "config.toml"
    config.write_text(f"keep_chats = false\n{config.read_text()}")
    assert machine("chat", "-p", "one").exit == 0
    assert not (machine.folder / "home" / "data" / "chats").exists()


def test_a_project_does_not_decide_what_is_kept(machine: Machine):
    (machine.folder / ".kvcli.toml").write_text("keep_chats = true\n")
    assert "a project file may not set this" in machine("chat", "-p", "one").err


def test_the_model_that_a_chat_was_held_with_is_used_unless_another_is_typed(machine: Machine, monkeypatch):
    asked: list[str | None] = []
    monkeypatch.setattr("kvcli.commands.loading.load_model", _stop_at(asked))
    folder = machine.folder / "home" / "data" / "chats"
    folder.mkdir(parents=True)
    chat = Chat(FakeModel(answer=ANSWER, info=fake_info(id="x")), folder=folder, called="owner/name")
    chat.send("How deep?")
    chat.save()
    for args in (["-c"], ["-c", "-m", "other/name"], []):
        machine("chat", *args, "-p", "And now?")
    assert asked[:2] == ["owner/name", "other/name"]
    assert asked[2] not in asked[:2]


def test_a_file_from_elsewhere_names_no_model_that_is_not_here(machine: Machine, monkeypatch):
    asked: list[str | None] = []
    monkeypatch.setattr("kvcli.commands.loading.load_model", _stop_at(asked))
    for name, called in {"theirs": "owner/name", "folder": str(machine.folder), "known": "demo"}.items():
        chat = Chat(FakeModel(answer=ANSWER), folder=machine.folder, called=called)
        chat.send("How deep?")
        chat.save().rename(machine.folder / f"{name}.json")
    for name in ("theirs", "folder"):
        done = machine("chat", "-r", f"{name}.json", "-p", "And now?")
        assert (done.exit, asked) == (3, [])
        assert "[foreign_model]" in done.err
        assert "-m " in done.err
    machine("chat", "-r", "theirs.json", "-m", "owner/name", "-p", "And now?")
    machine("chat", "-r", "known.json", "-p", "And now?")
    assert asked == ["owner/name", "demo"]


def test_one_question_says_which_chat_it_goes_on_with_and_with_v_where_it_is_kept(machine: Machine):
    first = machine("chat", "-p", "How deep?")
    assert "goes on" not in first.err
    assert "kept in" not in first.err
    done = machine("-v", "chat", "-c", "-p", "And now?")
    said = " ".join(done.err.split())
    assert re.search("goes on with How deep. . 1 question", said)
    assert "kept in" in said
    assert done.out == f"{ANSWER}\n"


def test_ctrl_c_while_one_question_is_kept_costs_nothing(machine: Machine, monkeypatch):
    write = ChatFile.write

    def interrupted(file: ChatFile, data: bytes) -> None:
        signal.raise_signal(signal.SIGINT)
        write(file, data)

    monkeypatch.setattr(ChatFile, "write", interrupted)
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
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    done = machine("chat", "-p", "How deep?")
    assert (done.exit, done.out) == (0, f"{ANSWER}\n")
    assert "this chat is not kept: cannot write" in " ".join(done.err.split())
    assert list((machine.folder / "home" / "data").rglob("*.*")) == []


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
        self.world = World(io.StringIO(), io.StringIO(), io.StringIO(), {}, root, Paths.of({"KVCLI_HOME": str(root)}))
        self.folder = self.world.paths.data / "chats"
        self.profiles = Profiles()
        self.chat = Chat(FakeModel(answer=ANSWER), folder=self.folder, holds=True)
        options = {"keeps": True, "profiles": self.profiles, "profile": "exact"} | options
        self.repl = Repl(self.chat, Screen.of(self.world), self.world, **options)

    def type(self, *lines):
        self.repl.reader, self.repl.is_over = Keys(lines), False
        before = len(self.world.stderr.stream.getvalue())
        self.repl.run()
        return " ".join(self.world.stderr.stream.getvalue()[before:].split())

    @property
    def files(self):
        return sorted(self.folder.glob("*"), key=lambda p: p.stat().st_mtime_ns)

    def saved(self, i=-1):
        return texts(open_chat(self.files[i]).saved)[::2]


@pytest.fixture
def talk(tmp_path):
    made = Talk(tmp_path)
    yield made
    made.chat.close()


def test_every_turn_is_on_the_disk_before_the_next_line(talk):
    seen = []

    class Looking(Keys):
        def read(self, default=""):
            seen.append(talk.saved() if talk.files else [])
            return super().read(default)

    talk.type()
    talk.repl.reader, talk.repl.is_over = Looking(["one", "two", "/undo", "/clear", "three"]), False
    talk.repl.run()
    assert seen == [[], ["one"], ["one", "two"], ["one"], ["one"], ["three"]]
    assert len(talk.files) == 2  # what was cleared is still there
    assert talk.files[0].stat().st_mode & 0o777 == 0o600


def test_a_chat_without_a_question_leaves_no_file(talk, tmp_path):
    (tmp_path / "r.md").write_text("The report.")
    talk.type("/system Be brief.", "/file r.md", "/files")
    assert talk.files == []


def test_nothing_is_written_where_nothing_changed(talk):
    talk.type("one")
    before = talk.files[0].stat()
    talk.type("/tokens", "/stats", "/files")
    assert talk.files[0].stat().st_ino == before.st_ino


def test_load_lists_and_opens(talk, tmp_path):
    talk.type("one", "/clear", "two", "/save Second", "/clear")
    said = talk.type("/load")
    assert "1 " in said
    assert "Second * 1 question" in said
    assert "one * 1 question" in said
    assert "goes on with one * 1 question" in talk.type("/load 2", "again")
    assert talk.saved() == ["one", "again"]
    assert "that is this conversation" in talk.type("/load 1")
    assert "[no_chat]" in talk.type("/load nothing")
    assert "no conversation is kept yet" in Talk(tmp_path / "other").type("/load")


def test_what_was_cleared_and_what_is_left_is_said_to_be_kept(talk):
    said = talk.type("one", "/clear", "two")
    assert "forgot 1 question; it is kept, and /load opens it again" in said
    assert said.endswith("kept: kvcli chat -c goes on with it")


def test_titles_and_lists_fit_a_narrow_terminal(talk):
    talk.world.environ["COLUMNS"] = "40"
    talk.type("What is the depth of the oldest of the wells at Bethden, in metres?", "/save Two\\nlines")
    before = len(talk.world.stderr.stream.getvalue())
    talk.type("/load")
    assert all(len(line) < 40 for line in talk.world.stderr.stream.getvalue()[before:].split("\n"))


def test_a_chat_that_is_not_kept_is_after_save(tmp_path):
    talk = Talk(tmp_path, keeps=False)
    talk.type("one")
    assert talk.files == []
    assert "from now on with each turn" in talk.type("/save Wells", "two")
    assert talk.saved() == ["one", "two"]
    talk.chat.close()


def test_a_chat_that_somebody_else_changed_goes_on_in_a_file_of_its_own(talk):
    talk.type("one")
    other = json.loads(talk.files[0].read_text())
    other["title"] = "mine"
    talk.files[0].write_text(json.dumps(other))  # as an editor does, which asks for no lock
    assert "was changed by another program" in talk.type("two")
    assert json.loads(talk.files[0].read_text())["title"] == "mine"
    assert talk.saved() == ["one", "two"]
    assert "changed" not in talk.type("three")


def test_a_chat_that_somebody_removed_is_written_again(talk):
    talk.type("one")
    talk.files[0].unlink()
    talk.type("two")
    assert talk.saved() == ["one", "two"]


def test_the_latest_chat_is_the_one_that_was_kept_last_whatever_the_clock_says(talk):
    talk.type("one")
    later = talk.files[0].stat().st_mtime + 3600
    os.utime(talk.files[0], (later, later))  # kept before the clock was put back
    talk.type("/clear", "two")
    assert texts(open_chat(newest(talk.folder)[0]).saved)[0] == "two"
    assert 0 < talk.files[-1].stat().st_mtime - later < 5
    talk.type("/load 2", "three")
    assert talk.saved() == ["one", "three"]
    assert newest(talk.folder)[0] == talk.chat.file.path


def test_ctrl_c_while_a_turn_is_kept_costs_neither_the_turn_nor_the_chat(talk, monkeypatch):
    write = ChatFile.write

    def interrupted(file: ChatFile, data: bytes) -> None:
        signal.raise_signal(signal.SIGINT)
        write(file, data)

    monkeypatch.setattr(ChatFile, "write", interrupted)
    talk.type("one", "two")
    assert talk.saved() == ["one", "two"]


def test_a_disk_that_hangs_is_given_up_by_a_second_ctrl_c(talk, monkeypatch):
    monkeypatch.setattr(ChatFile, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert "this chat is not kept: stopped" in talk.type("one", "two")
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
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert "this chat is not kept: cannot write" in talk.type("two")
        assert talk.saved() == ["one"]
    talk.type("/tokens")
    assert talk.saved() == ["one", "two"]


# --- two processes

OTHER = """
import sys
from pathlib import Path
from kvcli.chat.conversation import Chat
from kvcli.errors import BadInput
from tests.fake_model import FakeModel
path, name, n = sys.argv[1:]
try:
    chat = Chat(FakeModel(answer="an answer"), holds=name == "held").load(path)
except BadInput as error:
    sys.exit(error.code)
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


def other(path: Path, name: str, n: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER, str(path), name, str(n)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    chat = Chat(FakeModel(answer=ANSWER), folder=tmp_path)
    chat.send("How deep?")
    return chat.save()


def test_a_second_process_is_told_that_a_chat_is_open(file: Path):
    first = other(file, "held", 3)
    assert first.stdout.readline() == "\n"
    second = other(file, "held", 3)
    assert second.communicate()[1] == "chat_in_use\n"
    first.stdin.write("\n")
    first.stdin.flush()
    assert first.wait() == 0
    assert texts(open_chat(file).saved)[::2] == ["How deep?", "held 0", "held 1", "held 2"]
    third = other(file, "held", 1)  # the first one is gone, and its lock with it
    third.communicate("\n")
    assert len(texts(open_chat(file).saved)) == 10


def test_of_two_processes_that_save_one_chat_none_loses_a_turn_unsaid(file: Path):
    both = [other(file, name, 40) for name in ("a", "b")]
    for process in both:
        assert process.stdout.readline() == "\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate()[0].split() for process in both]
    kept = texts(open_chat(file).saved)[2::2]
    assert sorted(kept) == sorted(
        f"{name} {i}" for name, words in zip("ab", said, strict=True) for i in range(int(words[0]))
    )
    assert any("chat_changed" in words for words in said)


def test_a_held_file_stays_held_while_it_is_written_again_and_again(tmp_path: Path):
    file = ChatFile(tmp_path / "one", holds=True)
    for n in range(5):
        file.write(b"x" * n)
        with pytest.raises(BadInput, match="is open in another"):
            ChatFile(tmp_path / "one", holds=True).read()
        assert ChatFile(tmp_path / "one").read() == b"x" * n  # to look at it is free
    n_open = len(os.listdir("/proc/self/fd"))
    file.close()
    assert len(os.listdir("/proc/self/fd")) == n_open - 1
    assert ChatFile(tmp_path / "one", holds=True).read() == b"xxxx"


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("holds", [True, False])
def test_what_got_its_name_is_ours_though_its_folder_was_not_synced(tmp_path: Path, monkeypatch, failure, holds: bool):
    file = ChatFile(tmp_path / "one", holds=holds)
    file.write(b"first")
    n_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as broken:
        broken.setattr("kvcli.files._sync_folder", lambda _: (_ for _ in ()).throw(failure))
        with pytest.raises(type(failure)):
            file.write(b"second")
    file.write(b"third")
    assert (tmp_path / "one").read_bytes() == b"third"
    assert len(os.listdir("/proc/self/fd")) == n_open
    file.close()
    assert ChatFile(tmp_path / "one", holds=True).read() == b"third"


def test_a_chat_that_is_a_link_is_written_where_it_leads(tmp_path: Path):
    (tmp_path / "real").write_bytes(b"first")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    file = ChatFile(tmp_path / "link", holds=True)
    file.read()
    file.write(b"second")
    file.close()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"second"


def test_what_is_locked_is_open_to_be_written(tmp_path: Path, monkeypatch):
    """NFS takes a lock of one's own on nothing else."""
    seen = []

    def lock(handle: int, **_: object) -> None:
        seen.append(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE)

    monkeypatch.setattr("kvcli.chat.chat_file.lock", lock)
    for holds in (False, True):
        file = ChatFile(tmp_path / "one", holds=holds)
        file.read() if holds else file.write(b"new")
        file.write(b"newer")
        file.close()
    assert seen == [os.O_RDWR] * 2


def test_a_short_storm_of_kills_and_pairs_damages_nothing():
    """`python tests/bench/storm_chats.py` is the long one."""
    found = storm(kills=8, pairs=2, turns=12)
    assert (found["tried"], found["bad"], found["refused"]) == (10, 0, 1), found


@pytest.mark.slow
def test_a_long_storm_of_kills_and_pairs_damages_nothing():
    found = storm(kills=200, pairs=10, turns=100, seed=1)
    assert found["bad"] == 0, found
    assert found["left over"] > 20, "kills that never hit a write show little"


# --- what is damaged

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
    chat = Chat(FakeModel(answer=ANSWER), "Be brief.", folder=tmp_path)
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
    monkeypatch.setattr("kvcli.chat.chat_file.MOST", 10)
    for holds in (False, True):
        for name, code in (("pipe", "not_a_chat"), ("huge", "not_a_chat"), ("folder", None)):
            with pytest.raises(BadInput) as caught:
                open_chat(tmp_path / f"{name}.json", holds=holds)
            assert caught.value.code in ((code,) if code else ("not_a_chat", "file_unreadable"))
            assert name in caught.value.message


def test_a_later_version_may_know_more(tmp_path: Path):
    (tmp_path / "x.json").write_bytes(damaged(kv="a snapshot"))
    assert Chat(FakeModel()).load(tmp_path / "x.json").title == "t"


def test_what_no_file_can_hold_is_replaced_not_lost(tmp_path: Path):
    """Half of a pair, as a name that is not UTF-8 has it."""
    chat = Chat(FakeModel(answer=ANSWER), folder=tmp_path)
    chat.attach(Document("r\udcff.md", "The report.", "00"))
    chat.send("How deep?")
    assert open_chat(chat.save()).messages[0].documents[0].name == "r\N{REPLACEMENT CHARACTER}.md"


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
    assert "sample.temperature=0.5 was left out: lean has no temperature" in said
    assert said.endswith(" lean")


def test_what_was_typed_at_the_start_stays_too(tmp_path):
    talk = Talk(tmp_path, sets=["sample.seed=1"])
    talk.type("/set sample.seed 2", "/profile lean")
    assert talk.profiles.asked[-1] == ("lean", ("sample.seed=1", "sample.seed=2"))
    assert talk.type("/profile") == "lean with sample.seed=2"


def test_a_file_is_attached_once_and_dropped_in_true_words(talk, tmp_path):
    (tmp_path / "p.txt").write_text("The report.")
    assert "p.txt is attached already, as 1 of /files" in talk.type("/file p.txt", "/file p.txt")
    assert "dropped p.txt; it was not read yet" in talk.type("/drop 1")
    assert "dropped p.txt; what followed it is read again" in talk.type("/file p.txt", "one", "/drop 1")
