"""HTML and EPUB: what a reader of the page sees is taken in, what is hidden or struck out is not."""

from __future__ import annotations

import pytest

from kvcli.documents import document_of
from kvcli.errors import BadInput
from tests.documents import books


def text_of(body: str) -> str:
    return document_of(f"<html><body>{body}</body></html>".encode(), "a.html").text.rstrip("\n")


@pytest.mark.parametrize(
    "style",
    [
        "font-size:0.9em",
        "font-size: 0.05rem",
        "font-size:00.5px",
        "--mask-display:none",
        "fill-opacity:0",
        "x-visibility:hidden",
        "opacity:0.5",
    ],
)
def test_small_text_and_other_properties_are_read(style):
    assert text_of(f'<p style="{style}">seen</p><p>too</p>') == "seen\n\ntoo"


@pytest.mark.parametrize(
    "style", ["font-size:0", "font-size: 0.0em", "color:red;display : NONE", "opacity:0", "visibility:hidden;"]
)
def test_what_an_elements_own_style_hides_is_not_read(style):
    assert text_of(f'<p style="{style}">unseen</p><p>seen</p>') == "seen"


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("10<sup>6</sup>", "10^6"),
        ("10<sup>-6</sup> m", "10^-6 m"),
        ("x<sup>n + 1</sup>", "x^(n + 1)"),
        ("x<sup>(2)</sup>", "x^(2)"),
        ("the 1<sup>st</sup> day", "the 1st day"),
        ("so<sup>*</sup>", "so*"),
        ("H<sub>2</sub>O", "H2O"),
        ('in 1984<sup><a href="#n3">3</a></sup>.', "in 1984 [3]."),
        ('in 1984<a href="notes.xhtml#n3"><sup>3</sup></a>.', "in 1984 [3]."),
        ('in 1984<sup><a href="#n3">[3]</a></sup>.', "in 1984[3]."),
        ("<pre>a<sup>2</sup></pre>", "```\na2\n```"),
        ("<del>100</del> 80 <s>old</s><strike>older</strike>", "80"),
        ("80 <ins>now</ins>", "80 now"),
        ("<dialog open>asked</dialog><dialog>not yet</dialog>", "asked"),
        ("<textarea>typed in</textarea>", "typed in"),
        ("<!-- <!ENTITY x> --><p>read</p>", "read"),
    ],
)
def test_what_is_raised_struck_out_open_or_commented(markup, text):
    assert text_of(markup).strip() == text


def test_a_comment_about_entities_before_the_page():
    page = b"<!-- <!ENTITY x> --><!doctype html><html><p>read"
    assert document_of(page, "a.html").text == "read\n"
    with pytest.raises(BadInput, match="cannot be read as HTML"):
        document_of(b"<!-- a -->" + b'<!doctype html [<!ENTITY x "y">]><html><p>&x;', "a.html")


# --- EPUB


SEVERAL = {"all.xhtml": "<p>By nobody.</p><h1 id='a'>One</h1><p>first</p><h1 id='b'>Two</h1><p>second</p>"}


def labels(nav: str, chapters: dict[str, str]) -> list[str]:
    page = f'<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops"><body>{nav}</body></html>'
    return [s.label for s in document_of(books.epub(chapters, more={"OEBPS/nav.xhtml": page}), "a.epub").sections]


def test_chapters_that_share_a_file_keep_their_names():
    nav = '<nav><a href="all.xhtml#a">One</a><a href="all.xhtml#b">Two</a></nav>'
    page = f'<html xmlns="http://www.w3.org/1999/xhtml"><body>{nav}</body></html>'
    document = document_of(books.epub(SEVERAL, more={"OEBPS/nav.xhtml": page}), "a.epub")
    assert [(s.label, s.text) for s in document.sections] == [
        ("One", "By nobody.\n\n# One\n\nfirst"),
        ("Two", "# Two\n\nsecond"),
    ]


@pytest.mark.parametrize(
    "nav",
    [
        '<nav><a href="all.xhtml#a">The book</a><a href="all.xhtml">The book</a></nav>',
        '<nav epub:type="page-list"><a href="all.xhtml#p1">1</a><a href="all.xhtml#p2">2</a></nav>'
        '<nav epub:type="toc"><a href="all.xhtml">The book</a></nav>'
        '<nav epub:type="landmarks"><a href="all.xhtml">Start</a></nav>',
    ],
    ids=["the same name twice", "printed pages and landmarks"],
)
def test_a_chapter_in_a_file_of_its_own_is_whole(nav):
    assert labels(nav, SEVERAL) == ["The book"]


def test_chapters_without_headings_stay_together():
    nav = '<nav><a href="all.xhtml#a">One</a><a href="all.xhtml#b">Two</a></nav>'
    assert labels(nav, {"all.xhtml": "<p id='a'>first</p><p id='b'>second</p>"}) == ["One"]
