"""In a real terminal: no line is torn or doubled, nothing hostile gets through, no escape codes where none belong."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from kvcli.render.terminal.terminal import text_width
from tests.terminal import ROOT, Terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pty")
NUMBERED = " ".join(f"w{i:03d}" for i in range(150)) + " end."
WORDS = NUMBERED.split()


def words_on(lines):
    """The answer's words in the order in which they stand on the screen."""
    return [word for line in lines for word in line.split() if word in WORDS]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("\u2764", 1),  # a heart, as text and as an emoji
        ("\u2764\ufe0f", 2),
        ("\u2714\ufe0f done", 7),
        ("1\ufe0f\u20e3", 2),  # a key
        ("\u4f60", 2),
        ("e\u0301", 1),
        ("\u202e", 1),  # shown as a sign for what it is
    ],
)
def test_columns_are_those_that_a_terminal_uses(text, columns):
    assert text_width(text) == columns


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_long_answer_leaves_each_word_once(columns):
    term = Terminal("turn", {"answer": NUMBERED, "delay": 0.004}, columns, lines=8)
    assert term.finish() == 0
    assert "tok/s" in term.raw[: term.raw.index("w149")]  # the row was there
    assert words_on(term.lines) == WORDS
    assert max(map(len, term.lines)) <= columns
    assert "tok  " not in term.text
    assert "█" not in term.text
    assert "  651 tokens" in term.text


def test_a_thought_stands_on_lines_of_its_own_before_the_answer():
    facts = {"answer": NUMBERED, "delay": 0.004, "thought": "Hm, well. " * 12 + "\nSo?"}
    term = Terminal("turn", facts, 60, lines=40)
    assert term.finish() == 0
    text = [line.strip() for line in term.lines if line.strip()]
    at = text.index("So?")
    assert " ".join(text[:at]) == ("Hm, well. " * 12).strip()
    assert words_on(text[at + 1 :]) == WORDS
    assert "\x1b[2mSo?" in term.raw


def test_a_widened_window_tears_nothing():
    term = Terminal("turn", {"answer": NUMBERED, "delay": 0.008}, 60, lines=40)
    for columns, word in ((81, "w030"), (83, "w060"), (120, "w090"), (200, "w120")):
        term.wait(word)
        term.resize(columns)
    assert term.finish() == 0
    assert words_on(term.lines) == WORDS


def test_a_narrowed_window_doubles_nothing():
    """pyte cuts what stands beyond the new edge, so only what came later can be compared."""
    term = Terminal("turn", {"answer": NUMBERED, "delay": 0.01}, 80, lines=40)
    term.wait("w040")
    term.resize(44)
    assert term.finish() == 0
    seen = words_on(term.lines)
    assert len(seen) == len(set(seen))
    assert seen[-60:] == WORDS[-60:]  # all that came after the narrowing


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux, which rewraps lines when resized, is not installed")
def test_a_terminal_that_rewraps_its_lines_loses_nothing(tmp_path):
    """Six changes of width. The row that is live at such a moment may stay behind: tmux wraps it before we know."""
    shown = resized_in_tmux(tmp_path / "socket")
    seen = words_on(shown.split("\n"))
    assert list(dict.fromkeys(seen)) == WORDS, shown
    assert len(seen) - len(WORDS) <= 30, shown  # a program that counts rows upwards repeats screens of them
    assert "tok  " not in shown


def resized_in_tmux(socket):
    tmux = ["tmux", "-f", "/dev/null", "-S", str(socket)]
    facts = shlex.quote(json.dumps({"answer": NUMBERED, "delay": 0.012}))
    command = f"env -u NO_COLOR {sys.executable} -m tests.chat_driver turn {facts}; sleep 20"
    env = {k: v for k, v in os.environ.items() if k not in ("TMUX", "COLUMNS")} | {"LC_ALL": "C.UTF-8"}

    def tell(*args):
        return subprocess.run([*tmux, *args], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout

    tell("new-session", "-d", "-x", "80", "-y", "24", command)
    try:
        for columns, word in ((50, "w030"), (37, "w050"), (64, "w070"), (100, "w090"), (30, "w110"), (120, "w130")):
            until(lambda: tell("capture-pane", "-p", "-S", "-"), word)
            tell("resize-window", "-x", str(columns), "-y", "24")
        return until(lambda: tell("capture-pane", "-p", "-S", "-"), "peak 431 MiB")
    finally:
        tell("kill-server")


def until(look, word):
    end = time.monotonic() + 20
    while word not in (shown := look()):
        assert time.monotonic() < end, shown
    return shown


def test_wide_characters_tabs_and_very_long_words():
    answer = "漢字かな交じり文が続きます。" * 4 + "\n" + "x" * 97 + "\n\ta\tb\n" + "é" * 30
    term = Terminal("turn", {"answer": answer}, 40)
    assert term.finish() == 0
    shown = [line for line in term.lines if line]
    # pyte keeps an empty cell behind each wide character
    assert "".join(shown).count("漢") == 4
    assert [len(line) for line in shown if set(line) == {"x"}] == [39, 39, 19]
    assert "        a       b" in shown
    assert "é" * 30 in shown


@pytest.mark.parametrize("columns", [40, 200])
def test_markdown_is_rendered_and_code_can_be_copied(columns):
    code = "x = [" + ", ".join(map(str, range(30))) + "]"
    answer = f"## Steps\n\n1. **First** word\n2. `second`\n\n```\n{code}\n```\n" + "end " * 30
    term = Terminal("turn", {"answer": answer, "delay": 0.002, "markdown": True}, columns, lines=30)
    assert term.finish() == 0
    assert [line for line in term.lines if line][:3] == ["Steps", "1. First word", "2. second"]
    assert code in "".join(line.ljust(columns) for line in term.lines)
    assert " ".join(term.lines).count("end") == 30


def test_hostile_text_cannot_steer_the_terminal():
    answer = "before \x1b]0;owned\x07 \x1b[2J\x1b[H \x9b31m \u202egnp.exe after"
    term = Terminal("turn", {"answer": answer}, 80)
    assert term.finish() == 0
    assert "before" in term.text
    assert "after" in term.text
    assert term.screen.title == ""
    assert [code for code in ("\x1b]", "\x1b[2J", "\x9b", "\u202e") if code in term.raw] == []


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_codes_where_they_are_not_wanted(env):
    term = Terminal("turn", {"answer": NUMBERED, "delay": 0.002}, **env)
    assert term.finish() == 0
    assert "\x1b" not in term.raw
    assert "w149 end." in term.raw
    assert "651 tokens" in term.raw


@pytest.mark.core
def test_a_terminal_that_is_not_utf8():
    answer = "price 5 € · naïve"
    term = Terminal("turn", {"answer": answer + " word" * 60, "delay": 0.01}, PYTHONIOENCODING="iso-8859-1")
    term.wait("tok/pass")
    assert term.finish() == 0
    assert "price 5 ? · naïve" in term.text
    assert " tokens " in term.text
    assert not set("▁▂▃▄▅▆▇█–━×") & set(term.raw)


def test_an_answer_that_comes_back_through_a_pipe_is_not_drawn_over():
    term = Terminal("turn", {"answer": NUMBERED, "delay": 0.005, "read_delay": 0.3}, 200, through="cat -u")
    term.wait("reading")
    term.wait("w149")
    assert term.finish() == 0
    shown = " ".join(term.lines)
    assert all(word in shown for word in WORDS)
    assert "tok  " not in term.raw
    assert " tokens " in term.text


def run(facts, **env):
    args = [sys.executable, "-m", "tests.chat_driver", "turn", facts]
    return subprocess.run(args, cwd=ROOT, env={"PATH": "", **env}, capture_output=True, check=True)


def test_through_pipes_stdout_is_the_answer_alone():
    done = run('{"answer": "one\\u001b[2J two"}')
    assert done.stdout == b"one\x1b[2J two\n"
    assert b"\x1b" not in done.stderr
    assert done.stderr.decode().startswith("  3 tokens")


@pytest.mark.parametrize("silent", ['"quiet": true', '"stats": "off"'])
def test_stats_can_be_silenced(silent):
    assert run('{"answer": "one", ' + silent + "}").stderr == b""


@pytest.mark.core
def test_ctrl_c_keeps_what_was_said_and_marks_it():
    term = Terminal("turn", {"answer": NUMBERED, "delay": 0.02})
    term.wait("w010")
    term.send("\x03")
    assert term.finish() == 0
    assert "[stopped]" in term.text
    assert words_on(term.lines) == WORDS[: len(words_on(term.lines))]
    assert "^C" not in term.text


def test_the_bar_shows_what_is_read_and_goes_away():
    term = Terminal("turn", {"answer": "done", "read_delay": 0.4, "cached": 12})
    term.wait("reading 63 of 191 tokens (12 cached)")
    assert "33 %" in term.text
    assert term.finish() == 0
    assert "reading" not in term.text
    assert term.lines[0] == "done"


def test_ctrl_z_leaves_no_rows_behind():
    """The system does not stop a process that no shell could continue; the rows come and go all the same."""
    term = Terminal("turn", {"answer": NUMBERED, "delay": 0.01})
    term.wait("w040")
    term.send("\x1a")
    assert term.finish() == 0
    assert words_on(term.lines) == WORDS
    assert "tok  " not in term.text
    assert term.raw.count("\x1b[?25h") == 2
