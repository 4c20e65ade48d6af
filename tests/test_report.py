"""Blocks of a report as lines of a terminal and as Markdown."""

from __future__ import annotations

import pytest

from kvcli.render.report import ReportTable, Text, markdown, terminal_lines
from kvcli.render.terminal.terminal import text_width

TABLE = [["side", "tok/s"], ["a|b", "1.0"], ["\x1b[31mred", "20.0"]]
BLOCKS = [
    Text("title", "demo · bf16"),
    Text("heading", "summary"),
    ReportTable(TABLE),
    Text("caption", "range: 1 to 2"),
    Text("paragraph", "tok/s: tokens per second."),
    Text("item", "an item"),
    Text("note", "a note"),
    Text("heading", "quality"),
    ReportTable(TABLE),
    Text("item", "after a table"),
]


def test_a_terminal_has_an_empty_line_before_headings_paragraphs_and_after_tables():
    lines = terminal_lines(BLOCKS, 80)
    assert [i for i, line in enumerate(lines) if not line] == [1, 7, 11, 16]
    assert lines[6:11] == ["range: 1 to 2", "", "tok/s: tokens per second.", "an item", "note: a note"]
    assert lines[-1] == "after a table"


@pytest.mark.parametrize("width", [20, 40, 200])
def test_no_line_is_wider_than_the_terminal(width: int):
    assert max(map(text_width, terminal_lines(BLOCKS, width))) <= width


def test_markdown_separates_lists_from_tables_and_escapes_cells():
    text = markdown([*BLOCKS, Text("code", "1 | 2\n3")])
    assert text.startswith("**demo · bf16**\n\nsummary:\n\n| side | tok/s |\n|---|---:|\n| a\\|b | 1.0 |\n")
    assert "\n\nrange: 1 to 2\n\ntok/s: tokens per second.\n- an item\n- a note\n\nquality:\n\n" in text
    assert text.endswith("|\n\n- after a table\n\n```\n1 | 2\n3\n```\n")
    assert "\x1b" not in text
    assert "\n\n\n" not in text
