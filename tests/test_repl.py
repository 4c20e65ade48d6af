"""The chat: what is typed, what is asked, what is kept, and what leaves."""

from __future__ import annotations

import io
import json
import re
import signal
from pathlib import Path
from threading import Event

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document as Typed

from kvcli.api import Text
from kvcli.chat.conversation import Chat
from kvcli.chat.saved_chats import SavedChats
from kvcli.commands.chat import line_editor
from kvcli.commands.chat.repl import HINT, Repl, in_background
from kvcli.commands.chat.slash import SLASH
from kvcli.commands.common.exits import IMPATIENT, Interrupt
from kvcli.demo import sample_path
from kvcli.documents import Document
from kvcli.environment import Environment, Paths
from kvcli.errors import BadConfig, ExitStatus
from kvcli.render.terminal.screen import Screen
from tests.fake_model import FakeModel, FakeProfile, fake_info


class Keys:
    """What the user types, line by line; an exception is Ctrl-C or Ctrl-D."""

    def __init__(self, *lines):
        self.lines, self.offered = list(lines), []

    def read(self, default=""):
        self.offered.append(default)
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, str):
            return line
        raise line


class Profiles:
    def names(self):
        return ["exact", "fafo", "lean"]

    def keys(self):
        return ["kv.dtype", "load.dtype", "sample.temperature"]

    def resolve(self, name, sets):
        if name not in self.names():
            raise BadConfig(f"there is no profile {name}", code="unknown_profile")
        return FakeProfile(name)


@pytest.fixture
def talk(tmp_path):
    return Talk(tmp_path)


class Talk:
    """A chat whose screen is two strings."""

    def __init__(self, folder: Path, **facts):
        self.world = Environment(
            io.StringIO(), io.StringIO(), io.StringIO(), {}, folder, Paths.of({"KVCLI_HOME": str(folder)})
        )
        self.world.clock = lambda: self.now
        self.now = 0.0
        self.model = FakeModel(**({"answer": "an answer"} | facts))
        self.chat = Chat(self.model, saved_chats=SavedChats(folder))
        self.repl = Repl(self.chat, Screen.of(self.world), self.world, SLASH, profiles=Profiles(), profile="fafo")

    def type(self, *lines):
        """Type the lines, then Ctrl-D; what the chat said on stderr meanwhile."""
        self.repl.reader = self.keys = Keys(*lines)
        self.repl.is_over = False
        before = len(self.world.stderr.stream.getvalue())
        self.status = self.repl.run()
        return self.world.stderr.stream.getvalue()[before:]

    @property
    def answers(self):
        return self.world.stdout.stream.getvalue()

    @property
    def asked(self):
        return [m.text for m in self.chat.messages if m.role == "user"]


# --- asking and leaving


def test_what_was_left_is_done_while_somebody_types_until_the_line_is_there():
    began, over = Event(), []

    def work(cancel):
        began.set()
        while not cancel():
            pass
        over.append(True)

    with in_background(work, over.append):
        assert began.wait(60)
        assert not over
    assert over == [True]


def test_what_breaks_it_costs_no_line(talk):
    def idle(cancel):
        raise RuntimeError("a bug")

    talk.model.idle = idle
    assert "RuntimeError: a bug" in talk.type("one")
    assert talk.asked == ["one"]


def test_answers_go_to_stdout_and_the_rest_to_stderr(talk):
    said = talk.type("one", "two")
    assert talk.answers == "an answer\nan answer\n"
    assert "tokens in" in said
    assert talk.asked == ["one", "two"]
    assert talk.status == ExitStatus.OK


def test_two_slashes_send_one(talk):
    talk.type("//etc/passwd is a file")
    assert talk.asked == ["/etc/passwd is a file"]


def test_every_answer_is_held_to_the_constraint(talk):
    talk.repl.constraint = object()
    talk.type("one", "/retry", "two")
    assert talk.model.held == [talk.repl.constraint] * 3


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_leaving(talk, word):
    talk.type(word, "never read")
    assert talk.asked == []
    assert talk.keys.lines == ["never read"]


def test_ctrl_c_at_the_prompt_says_how_to_leave_and_twice_leaves(talk):
    assert HINT in talk.type(KeyboardInterrupt(), KeyboardInterrupt(), "never read")
    assert talk.keys.lines == ["never read"]


def test_two_ctrl_c_far_apart_do_not_leave(talk):
    class Slow(Keys):
        def read(self, default=""):
            talk.now += 3
            return super().read(default)

    talk.repl.reader = Slow(KeyboardInterrupt(), KeyboardInterrupt(), "a question")
    talk.repl.run()
    assert talk.asked == ["a question"]


def test_a_failed_turn_leaves_the_conversation_as_it_was(talk):
    talk.model.info = fake_info(limit=60)
    said = talk.type("one", "x" * 100)
    assert "[context_overflow]" in said
    assert "try: --ctx 4096" in said
    assert talk.asked == ["one"]


def test_a_bug_does_not_end_the_chat(talk):
    def broken(*_, **__):
        yield Text("half", (1,))
        raise error

    error: Exception = RuntimeError("index 7 is out of range")
    good, talk.model.stream = talk.model.stream, broken
    assert "RuntimeError: index 7 is out of range" in talk.type("one")
    error = OSError(28, "No space left on device", "kept.json")
    assert "error: cannot write kept.json: No space left on device" in talk.type("one")
    talk.model.stream = good
    talk.type("two")
    assert talk.asked == ["two"]


def test_stopped_before_the_first_word_the_question_is_back_at_the_prompt(talk):
    good = talk.model.stream

    def stopped(ids, *, cancel, **options):
        signal.raise_signal(signal.SIGINT)
        return good(ids, cancel=cancel, **options)

    talk.model.stream = stopped
    talk.type("a long question")
    assert talk.keys.offered == ["", "a long question"]
    assert talk.asked == []


def test_stopped_in_the_middle_what_was_said_is_kept(talk):
    good = talk.model.stream

    def stopped(ids, **options):
        for event in good(ids, **options):
            yield event
            if isinstance(event, Text):
                signal.raise_signal(signal.SIGINT)

    talk.model.stream = stopped
    talk.type("one")
    assert [m.text for m in talk.chat.messages] == ["one", "an"]
    assert talk.chat.messages[-1].finish == "interrupted"


def test_after_each_turn_the_conversation_is_kept_safe(talk):
    saved = []
    talk.repl.after_turn = lambda _: saved.append(len(talk.chat.messages))
    talk.type("one", "two", "/kv")
    assert saved == [2, 4]


# --- Ctrl-C as a flag


def test_the_first_ctrl_c_is_a_flag_and_a_later_one_an_exception():
    now, before = [0.0], signal.getsignal(signal.SIGINT)
    with Interrupt(lambda: now[0]) as cancel:
        assert not cancel()
        signal.raise_signal(signal.SIGINT)
        assert cancel()
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:  # which would end the run and name no test
            pytest.fail("the same wish, twice, is not a second one")
        now[0] = IMPATIENT + 0.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# --- slash commands


def test_help_lists_every_command(talk):
    said = talk.type("/help")
    assert all(f"/{name}" in said for name in SLASH)
    assert talk.type("/help undo").strip() == "/undo [N]: remove the last question, or the last N"
    assert talk.type("/?") == said


@pytest.mark.parametrize(
    ("typed", "meant"), [("/hlep", "/help"), ("/quitt", "/quit"), ("/sp", "/spec"), ("/sessions", "/chats")]
)
def test_an_unknown_command_asks_what_was_meant(talk, typed, meant):
    said = talk.type(typed)
    assert "[unknown_command]" in said
    assert f"did you mean {meant}?" in said


def test_an_unknown_command_that_is_a_path_can_be_sent_as_text(talk):
    assert "//usr/bin/env sends it as text" in talk.type("/usr/bin/env is what?")


@pytest.mark.parametrize(
    ("typed", "said"),
    [("/think perhaps", "/think takes"), ("/think perhaps", "/think off")],
)
def test_advice_names_the_command_of_a_chat_not_the_option(talk, typed, said):
    found = talk.type(typed)
    assert said in found
    assert "--think" not in found


def test_undo_and_retry(talk):
    assert "removed 1 question, 1 left" in talk.type("one", "two", "/undo")
    assert talk.asked == ["one"]
    talk.type("/retry")
    assert len(talk.model.prompts) == 3
    assert talk.model.prompts[2] == talk.model.prompts[0]
    assert "removed 1 question, 0 left" in talk.type("/undo 5")
    assert "[no_question]" in talk.type("/retry")
    said = talk.type("/undo x")
    assert "[not_a_number]" in said
    assert "try: /undo 2" in said
    assert "try: /undo 2" in talk.type("/undo " + "9" * 5000)


def test_edit_asks_the_changed_question_in_place_of_the_last(talk, tmp_path):
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\nprintf "%s, please" "$(cat "$1")" > "$1"\n')
    editor.chmod(0o700)
    talk.world.environ["EDITOR"] = str(editor)
    talk.type("one", "/edit")
    assert talk.asked == ["one, please"]
    talk.world.environ["EDITOR"] = "true"
    assert "the question was not changed" in talk.type("/edit")
    talk.world.environ["EDITOR"] = "/no/such/editor"
    assert "[no_editor]" in talk.type("/edit")
    talk.world.environ["EDITOR"] = "false"
    assert "[editor_failed]" in talk.type("/edit")


def test_a_document_with_pages_is_counted_in_pages(talk):
    said = talk.type(f"/file {sample_path()}", "/files")
    pages = re.search(r"attached sample.pdf \* (\d+) pages \* ", said)
    assert pages
    assert f"1  sample.pdf  {pages[1]} pages" in said


def test_documents_that_leave_with_their_chat_are_named(talk, tmp_path):
    (tmp_path / "a.md").write_text("line\n")
    talk.repl.saves = True
    talk.type("what?", "/file a.md")
    assert "/resume opens it again; also removed: a.md" in " ".join(talk.type("/clear").split())
    said = " ".join(talk.type("/file a.md", "/resume 1").split())
    assert "also removed" not in said.partition("1 question")[0]
    assert "also removed: a.md" in said.partition("1 question")[2]


def test_documents(talk, tmp_path):
    (tmp_path / "a b\x1b.md").write_text("line\nline\n")
    assert "attached a b␛.md * 2 lines * 10 tokens" in talk.type('/file "a b\x1b.md"')
    assert "1  a b␛.md  2 lines  10 tokens  with the next question" in talk.type("/files")
    talk.type("what is in it?")
    assert "with the next question" not in talk.type("/files")
    assert "removed 1 question, 0 left; also removed: a b␛.md" in talk.type("/undo")
    talk.type('/file "a b\x1b.md"')
    assert "removed a b␛.md" in talk.type("/drop 1")
    assert "no document is attached" in talk.type("/files")
    assert "[no_such_document]" in talk.type("/drop 1")
    assert "[file_missing]" in talk.type("/file nothing.md")


def test_a_folder_and_a_pattern_attach_what_is_in_them(talk, tmp_path):
    (tmp_path / "notes" / "below").mkdir(parents=True)
    for name, data in (("b.txt", b"two"), ("a.md", b"one"), ("c.png", b"\x89PNG\0"), (".hidden", b"x")):
        (tmp_path / "notes" / name).write_bytes(data)
    said = talk.type("/file notes")
    assert [document.name for document in talk.chat.documents] == ["a.md", "b.txt"]
    assert "not read: .hidden (hidden), below (a folder), c.png (no document)" in said
    assert "as 2 of /files" in talk.type("/file notes/*.txt")
    assert "[file_count]" in talk.type("/file notes/*.pdf")
    assert "[file_count]" in talk.type("/file notes/below")
    (tmp_path / "notes" / "[x].txt").write_text("a file whose name looks like a pattern")
    assert "attached [x].txt" in talk.type("/file notes/[x].txt")


def test_too_many_files_of_a_pattern_are_refused(talk, tmp_path):
    for i in range(201):
        (tmp_path / f"{i}.txt").write_text("x")
    assert "201 documents (0 MiB) are too many: at most 200" in " ".join(talk.type("/file *.txt").split())
    assert talk.chat.documents == []


def test_another_model_answers_from_the_next_question_on(talk):
    assert "fake" in talk.type("/model") or talk.model.info.id in talk.type("/model")
    other = FakeModel(answer="of another", info=fake_info(id="other"))
    talk.repl.change_model = lambda repl, name: repl.chat.go_to(other, name)
    assert "other answers from the next question on; it reads the chat again" in talk.type("one", "/model other")
    talk.type("two")
    assert [m.text for m in talk.chat.messages[1::2]] == ["an answer", "of another"]
    assert (talk.chat.called, talk.chat.prompt_tokens.ids == talk.model.prompts) == ("other", False)


def test_a_document_longer_than_the_window_is_announced(talk):
    (talk.world.cwd / "long.md").write_text("x" * 3000)
    assert "warning: long.md alone is longer than the context window of 2,048 tokens" in talk.type("/file long.md")


def test_the_system_text(talk):
    assert "there is no system text" in talk.type("/system")
    talk.type("/system Be brief.")
    assert talk.chat.system == "Be brief."
    assert "Be brief." in talk.type("/system")
    talk.type("/system -")
    assert talk.chat.system is None


def test_clear_keeps_the_system_text(talk):
    talk.chat.system = "Be brief."
    assert "removed 2 questions" in talk.type("one", "two", "/clear")
    assert (talk.asked, talk.chat.system) == ([], "Be brief.")
    assert "no question was asked" in talk.type("/spec")


def test_another_profile_takes_over_with_the_next_question(talk):
    assert "lean from the next question on; the chat is read again" in talk.type("one", "/profile lean")
    assert talk.chat.text_session.profile.name == "lean"
    assert "lean with sample.temperature=0.2 from" in talk.type("/set sample.temperature 0.2")
    assert talk.type("/profile").strip() == "lean with sample.temperature=0.2"
    assert "lean with sample.temperature=0.3 from" in talk.type("/set temperature 0.3")
    assert "lean with sample.temperature=0.2 from" in talk.type("/set temperature=0.2")
    assert talk.type("/profile exact", "/profile").strip().endswith("exact with sample.temperature=0.2")


def test_a_profile_that_does_not_work_changes_nothing(talk):
    assert "[unknown_profile]" in talk.type("/profile nope")
    assert talk.repl.profile_name == "fafo"
    assert talk.chat.text_session is talk.model
    assert "/set sample.temperature 0.2" in talk.type("/set sample.temperature")


def test_figures_can_be_switched(talk):
    assert "tokens in" not in talk.type("/stats off", "one")
    assert "tokens in" in talk.type("/stats last")
    assert "tokens in" in talk.type("/stats turn", "two")
    assert "/stats does not take 'loud'" in talk.type("/stats loud")


def test_think_shows_the_last_thought_and_later_ones(tmp_path):
    talk = Talk(tmp_path, thought="Hm.\x1b[31m\nSo?")
    assert "thinking auto; this model has auto" in talk.type("/think")
    assert "Hm." not in talk.type("one")
    assert talk.type("/think show").split("\n")[1:4] == [
        "Hm.\N{SYMBOL FOR ESCAPE}[31m",
        "So?",
        "thoughts are printed from now on",
    ]
    assert "So?" in talk.type("two")
    assert "So?" not in talk.type("/think hide", "three")
    assert "/think takes" in talk.type("/think much")


def test_tables_of_the_last_turn(talk):
    assert "accept" in talk.type("one", "/spec")
    assert "17.1 MiB" in talk.type("/kv")
    assert "question 1" in talk.type("/tokens")


def test_save_and_export(talk, tmp_path):
    talk.type("one", "/save First words", "/export chat.json")
    assert json.loads((tmp_path / "chat.json").read_text())["title"] == "First words"
    assert "[file_exists]" in talk.type("/export chat.json")
    assert "[unknown_format]" in talk.type("/export chat.docx")


def test_every_command_survives_a_chat_in_which_nothing_happened(talk):
    for name in SLASH:
        assert "internal" not in talk.type(f"/{name}"), name


# --- the table of docs/chat.md


def test_the_guide_lists_the_commands_as_they_are():
    page = Path(__file__).parents[1].joinpath("docs", "chat.md").read_text(encoding="utf-8")
    assert SLASH
    assert all(f"| {help} |" in page for _, help in SLASH.rows())


# --- the prompt


@pytest.mark.parametrize(
    ("typed", "is_open", "text"),
    [
        ("one", False, "one"),
        ('"""one\ntwo', True, None),
        ('"""', True, None),
        ('""""', True, None),
        ('"""one\ntwo"""', False, "one\ntwo"),
        ('"""\n  one\n"""', False, "  one"),
        ('say \'"""\'', False, 'say \'"""\''),
    ],
)
def test_blocks(typed, is_open, text):
    assert line_editor.is_open(typed) is is_open
    if text is not None:
        assert line_editor.unblocked(typed) == text


def test_blocks_on_a_dumb_terminal(tmp_path):
    world = Environment(
        io.StringIO('"""a\nb\n"""\nc\n'), io.StringIO(), io.StringIO(), {"TERM": "dumb"}, tmp_path, None
    )
    reader = line_editor.reader(world, SLASH, {}, None)
    assert [reader.read(), reader.read()] == ["a\nb", "c"]
    with pytest.raises(EOFError):
        reader.read()
    assert world.stderr.stream.getvalue() == "> . . > > "


def test_the_editor_moves_its_cursor_and_escapes_other_controls():
    said = []
    for text in ("\r", "\r\n\r\n", "a\rb\x1b"):  # prompt_toolkit leaves the last column with a lone \r
        line_editor._harmless(said.append)(text)
    assert said == ["\r", "\r\n\r\n", "a\N{SYMBOL FOR CARRIAGE RETURN}b\N{SYMBOL FOR ESCAPE}"]


def completions(talk, text):
    completer = line_editor.SlashCompleter(SLASH, talk.repl._words(), talk.world.cwd)
    return [c.text for c in completer.get_completions(Typed(text), CompleteEvent())]


def test_tab_completes_commands_and_their_arguments(talk, tmp_path):
    (tmp_path / "report.md").write_text("x")
    talk.chat.attach(Document("a", "a", ""))
    assert completions(talk, "/s") == ["save ", "set ", "spec", "stats ", "system "]
    assert completions(talk, "/profile f") == ["fafo"]
    assert completions(talk, "/set ") == ["kv.dtype", "load.dtype", "sample.temperature"]
    assert completions(talk, "/set kv.dtype ") == []
    assert completions(talk, "/stats l") == ["live", "last"]
    assert completions(talk, "/file re") == ["port.md"]
    assert completions(talk, "/drop ") == ["1"]
    assert completions(talk, "/help sp") == ["spec"]
    assert completions(talk, "a /s") == completions(talk, "//s") == []


def test_the_history_is_for_its_owner_only(tmp_path):
    file = tmp_path / "state" / "history"
    history = line_editor.open_history(file)
    history.append_string("a question\nof two lines")
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(line_editor.open_history(file).load_history_strings()) == ["a question\nof two lines"]
    assert list(line_editor.open_history(Path("/proc/nowhere/history")).load_history_strings()) == []
