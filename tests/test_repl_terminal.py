"""The chat in a real terminal: keys as they are typed, and a screen that stays in order."""

from __future__ import annotations

import sys

import pytest

from tests.terminal import Terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pty")
WORDS = [f"w{i:03d}" for i in range(80)]
SLOW = {"answer": " ".join(WORDS), "delay": 0.02}
QUICK = {"answer": "an answer"}


@pytest.fixture
def start(tmp_path):
    running = []

    def begin(facts, columns=80, **env):
        term = Terminal("repl", facts, columns, history=str(tmp_path / "history"), **env)
        running.append(term)
        term.wait("\n>")
        return term

    yield begin
    for term in running:
        term.child.close(force=True)


@pytest.mark.core
def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(start):
    term = start(SLOW)
    term.send("one\r")
    term.wait("w010")
    term.send("typed ahead\x03")
    term.wait("[stopped]")
    term.wait("context")
    term.send("\r")  # discarded by the terminal driver along with the line that Ctrl-C interrupted
    term.send("/tokens\r")
    term.wait("answer 1")
    said = [word for line in term.lines for word in line.replace("[stopped]", "").split() if word in WORDS]
    assert said == WORDS[: len(said)]
    assert "^C" not in term.text
    term.send("\x04")
    assert term.finish() == 0


def test_leaving_with_ctrl_c(start):
    term = start(QUICK)
    term.send("half a quest\x03")
    term.wait("Ctrl-D or /exit to leave")
    term.send("\x03")
    assert term.finish() == 0


def test_several_lines_pasted_typed_and_in_a_block(start):
    term = start(QUICK)
    term.send("\x1b[200~pasted one\npasted two\x1b[201~\r")
    term.wait("an answer")
    term.send('"""first\rsecond"""\r')
    term.wait(". second")
    term.send("a\x1b\rb\r")
    term.send("/tokens\r")
    term.wait("question 3")
    rows = [line.split() for line in term.lines if line.startswith("question")]
    assert [int(row[2]) for row in rows] == [len("pasted one\npasted two"), len("first\nsecond"), len("a\nb")]


def test_tab_completes_and_history_returns(start):
    term = start(QUICK)
    term.send("/prof\tle\t\r")
    term.wait("lean from the next question on")
    term.send("/s\t")
    term.wait("system")
    term.send("\x15\x1b[A\x1b[A\r")
    term.send("/profile\r")
    term.wait("\nlean")


@pytest.mark.core
@pytest.mark.parametrize("columns", [40, 200])
def test_a_turn_in_the_chat(start, columns):
    term = start(QUICK, columns)
    term.send("one\r")
    term.wait("context")
    term.send("/help\r")
    term.wait("Ctrl-C stops an answer.")
    assert max(map(len, term.lines)) <= columns
    assert [line for line in term.lines if line.startswith("an answer")] == ["an answer"]


def test_on_a_dumb_terminal_there_are_no_escape_codes(start):
    term = start(QUICK, TERM="dumb")
    term.send("one\r")
    term.wait("tokens in")
    term.send("/exit\r")
    assert term.finish() == 0
    assert "\x1b" not in term.raw


def test_no_color_leaves_only_what_editing_needs(start):
    term = start(QUICK, NO_COLOR="1")
    term.send("one\r")
    term.wait("tokens in")
    colours = [
        code for code in term.raw.split("\x1b[")[1:] if code[: code.find("m") + 1].strip("0;m") and "m" in code[:8]
    ]
    assert [code for code in colours if code.split("m")[0].isdigit() and 30 <= int(code.split("m")[0]) < 48] == []
