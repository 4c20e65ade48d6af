"""`kvcli summarize` in a real terminal: points whole, rows gone at the end, Ctrl-C at any width."""

from __future__ import annotations

import sys

import pytest

from tests.terminal import Terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pty")
FILLER = " ".join(f"word{i}" for i in range(150))


@pytest.fixture
def facts(tmp_path):
    """Five pages, a part each, at a pace that shows the rows."""
    pages = [f"Well {i} gave {i + 40} litres of water an hour. {FILLER}" for i in range(1, 6)]
    file = tmp_path / "wells.txt"
    file.write_text("\f".join(pages))
    return {"args": [str(file), "--chunk", "200", "--length", "150"], "delay": 0.05}


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_parts_then_points(facts, tmp_path, columns):
    term = Terminal("summarize", facts, columns, lines=50, KVCLI_HOME=str(tmp_path))
    term.wait(" part 2 of 5 · page 2")
    assert term.finish() == 0
    assert max(map(len, term.lines)) <= columns
    joined = " ".join(" ".join(term.lines).split())
    for i in range(1, 6):
        assert joined.count(f"- Well {i} gave {i + 40} litres of water an hour [p. {i}].") == 1
        assert joined.count(f"part {i} of 5 ·") == 0, "the row that moved is gone"
    assert "█" not in term.text
    assert "reading" not in term.text
    assert "tok/s" in term.raw
    assert "plan: 5 parts" in joined


def test_ctrl_c_says_what_is_kept(facts, tmp_path):
    term = Terminal("summarize", facts, 80, lines=50, KVCLI_HOME=str(tmp_path))
    term.wait(" part 3 of 5 · page 3")
    term.send("\x03")
    assert term.finish() == 130
    assert "stopped: parts 1 and 2 of 5 are saved; the same command continues" in term.text
    again = Terminal("summarize", facts, 80, lines=50, KVCLI_HOME=str(tmp_path))
    assert again.finish() == 0
    assert "2 of 5 answers are from an earlier run" in " ".join(again.text.split())


def test_a_window_made_narrow_on_the_way_cuts_no_word(facts, tmp_path):
    term = Terminal("summarize", facts, 80, lines=50, KVCLI_HOME=str(tmp_path))
    term.wait(" part 2 of 5 · page 2")
    term.resize(40)
    term.wait(" part 3 of 5")
    term.send("\x03")
    assert term.finish() == 130
    said = " ".join(" ".join(term.lines).split())
    assert "stopped: parts 1 and 2 of 5 are saved; the same command continues" in said


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_codes_where_they_are_not_wanted(facts, tmp_path, env):
    term = Terminal("summarize", facts | {"delay": 0.0}, KVCLI_HOME=str(tmp_path), **env)
    assert term.finish() == 0
    assert "\x1b" not in term.raw
    assert "part 5 of 5" in term.text


@pytest.mark.core
def test_a_pipe_gets_points_and_nothing_else(facts, tmp_path):
    facts["delay"] = 0.0
    through = f"cat > {tmp_path}/out"
    term = Terminal("summarize", facts, 80, lines=50, KVCLI_HOME=str(tmp_path), through=through)
    assert term.finish() == 0
    points = (tmp_path / "out").read_text().splitlines()
    assert points == [f"- Well {i} gave {i + 40} litres of water an hour [p. {i}]." for i in range(1, 6)]
    assert "- Well" not in term.text
