"""Headings of markdown: which lines are some, and what a citation calls them."""

from __future__ import annotations

import pytest

from kvcli.documents import document_of
from kvcli.errors import BadInput


def labels(text: str) -> list[str]:
    document = document_of(text.encode(), "a.md")
    assert "".join(s.text for s in document.sections) == text
    return [s.label for s in document.sections]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("# C#\na\n# C\nb\n", ["C#", "C"]),
        ("# A ##\na\n# B #  \nb\n## # #\nc\n", ["A", "B", "#"]),
        ("# A\n```make test```\n# B\nb\n", ["A", "B"]),
        ("# A\n```make `test\n# B\nb\n", ["A", "B"]),
        ("# A\n``` make\n# B\n```\n# C\nb\n", ["A", "C"]),
        ("# A\n~~~ a`b\n# B\n~~~\n# C\nb\n", ["A", "C"]),
        ("---\ntitle: x\n# no\n---\nOne\n===\na\n\nTwo\n---\nb\n", ["Opening", "One", "Two"]),
        ("---\ntitle: x\n---\n\n# One\na\n", ["Opening", "One"]),
        ("---\n\nOne\n---\na\n\n# Two\nb\n", ["Opening", "One", "Two"]),
        ("---\na: b\n\nOne\n===\n", ["Opening", "One"]),
        ("# [link](http://a.b) *em*\na\n# `a_b` and __c__ of ![d](e.png)\nb\n", ["link em", "a_b and c of d"]),
        ("# snake_case_name 2 * 3 * 4\na\n# [](x)\nb\n", ["snake_case_name 2 * 3 * 4", "()(x)"]),
    ],
)
def test_headings_and_what_they_are_called(text, want):
    assert labels(text) == want


def test_more_headings_than_are_read():
    with pytest.raises(BadInput) as caught:
        document_of(b"# a\n\nb\n" * 100_001, "a.md")
    assert caught.value.code == "document_too_large"
    assert "--pages" not in str(caught.value.try_)


@pytest.mark.parametrize("sign", ["*", "_", "`", "[", "[a](", "***a", "#", "` ", "a*"])
def test_signs_without_an_end_are_kept(sign):
    document = document_of(f"# {sign * 40_000}\n\ntext\n\n# b\n\ntext\n".encode(), "a.md")
    assert [s.number for s in document.sections] == [1, 2]


# --- pages of text


def test_one_form_feed_parts_two_pages():
    document = document_of(b"one page\n\ftwo page\n", "a.txt")
    assert [(s.number, s.text) for s in document.sections] == [(1, "one page"), (2, "two page")]


@pytest.mark.parametrize("text", ["one page\n\f", "one page\f\n", "\fone page\n"])
def test_a_form_feed_at_an_end_parts_nothing(text):
    assert document_of(text.encode(), "a.txt").unit == "line"


# --- texts that begin like a PDF


@pytest.mark.parametrize("name", ["note.txt", "note.md"])
def test_a_text_about_the_header_of_a_pdf_is_text(name):
    assert document_of(b"%PDF-1.7 is the first line of one.\n", name).text.startswith("%PDF-1.7 is")
