"""PDF files page by page: made ones whose every letter is known, and real ones of this system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from kvcli.documents import document_of
from kvcli.documents.dehyphenate import Words, clean, mended
from kvcli.documents.reading_order import Line, LinePiece
from kvcli.documents.running_headers import without_running
from kvcli.errors import BadInput
from tests.documents import made

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", made.CASES)
def test_pages_have_the_text_that_was_put_on_them(name: str):
    case = made.CASES[name](Random(11))
    document = document_of(case.data, "made.pdf", **case.options)
    got = {s.number: " ".join(s.text.split()) for s in document.sections}
    assert got == {i: text for i, text in enumerate(case.pages, 1) if text}
    assert document.without_text == tuple(i for i, text in enumerate(case.pages, 1) if text == "")
    assert document.blank == case.pages.count(None)
    assert (document.unit, document.kind, document.n_pages) == ("page", "pdf", len(case.pages))
    assert document.title == case.title


def test_lines_that_ended_for_want_of_room_are_one():
    for name, parts in (("justified", 4), ("two columns, drawn across", 2)):
        text = document_of(made.CASES[name](Random(11)).data, "made.pdf").sections[0].text
        assert len(text.split("\n\n")) == parts
        assert "\n" not in text.replace("\n\n", "")


def test_short_lines_and_lists_keep_their_lines():
    sheet = made.Sheet()
    lines = [
        "A list of what was found along the northern channel in the annual survey of the board:",
        "1. a bridge of copper and timber that nobody had measured before the end of the season",
        "2. a cellar",
        "and beside it the lantern of the keeper, who said that it was his own",
        "Short.",
    ]
    sheet.lines(lines)
    assert document_of(sheet.save(), "made.pdf").sections[0].text == "\n".join(lines)


def running(number: int, *lines: str) -> list[LinePiece]:
    """A page of such lines, the first and the last a good way from the others."""
    places = [0.0, *(30.0 + 12 * i for i in range(len(lines) - 2)), 30.0 + 12 * len(lines) + 30]
    fresh = {"a": f"{made.WORDS[number]} one", "b": f"{made.WORDS[number]} two", "c": f"{made.WORDS[number]} three"}
    lines = tuple(fresh.get(line, line) for line in lines)
    return [
        LinePiece(line.replace("#", str(number)), 0, y, 100, y + 10, 10) for line, y in zip(lines, places, strict=True)
    ]


@pytest.mark.parametrize(
    ("lines", "n_pages", "left"),
    [
        (("Board", "a", "b", "c", "#"), 6, "a|b|c"),
        (("Board", "a", "b", "c", "Page # of 6"), 6, "a|b|c"),
        (("Board", "a", "b", "c", "x"), 2, "Board|a|b|c|x"),  # twice is no custom
        (("Board", "a", "Board", "b", "c"), 6, "a|Board|b|c"),  # the second stands within the text
        (("Board", "Board"), 6, "Board|Board"),  # there is nothing else
        (("Gauge #7 bar", "a", "b", "c", "end #9"), 6, "Gauge #7 bar|a|b|c|end #9"),  # no number counts with the pages
    ],
)
def test_what_runs_along_the_edges(lines, n_pages, left):
    pages = [(n, running(n, *lines)) for n in range(1, n_pages + 1)]
    found = [[piece.text for piece in pieces] for pieces in without_running(pages)]
    assert found == [[piece.text for piece in running(n, *left.split("|"))] for n in range(1, n_pages + 1)]


@pytest.mark.parametrize(
    ("text", "head", "tail", "whole"),
    [
        ("the information", "infor", "mation", "information"),
        ("a well-known man", "well", "known", "well-known"),
        ("a well, known", "well", "known", "well-known"),
        ("", "well", "known", "wellknown"),
        ("wellknown, well-known, wellknown", "well", "known", "wellknown"),
        ("", "Anglo", "Saxon", "Anglo-Saxon"),
        ("", "2019", "2020", "2019-2020"),
        ("", "NATIO", "NAL", "NATIONAL"),
        ("in formation", "in", "formation", "information"),
    ],
)
def test_the_words_of_the_document_decide_about_a_hyphen(text, head, tail, whole):
    words = Words()
    words.add([text])
    assert f"{head}{words.joint(head, tail)}{tail}" == whole


@pytest.mark.parametrize(
    ("lines", "whole"),
    [
        (["a new under-", "standing under the law"], "understanding"),  # its end stands there only as its end
        (["lives there. It was there-", "fore", "so"], "therefore"),
        (["out of ten the out-", "come was"], "outcome"),
        (["ein Haus-", "halt im Haus"], "Haushalt"),
        (["a well-", "known man, well and known"], "well-known"),
    ],
)
def test_a_broken_word_is_no_evidence_for_itself(lines, whole):
    words = Words()
    words.add(lines)
    assert mended([[Line(line, goes_on=True) for line in lines]], words).find(whole) >= 0


def test_letters_for_shapes():
    assert (
        clean("\ufb01n o\ufb03ce \ufefb \ufb4a so\u00adft\u200b a\u0308")
        == "fin office \u0644\u0627 \u05ea\u05bc soft ä"
    )


@pytest.mark.parametrize("padding", [b"\0" * 5000, b"\r\n" * 2500, b"% nothing to see\n" * 300, b" \n\0%\n" * 9000])
def test_a_whole_file_with_padding_behind_its_end(padding):
    data = made.plain(Random(1)).data
    assert document_of(data + padding, "made.pdf").n_pages == 3


def test_a_file_that_was_cut_off_behind_an_earlier_end():
    """As one that was saved twice: its middle says that it ends."""
    data = made.plain(Random(1)).data
    with pytest.raises(BadInput, match="cannot be read as a PDF") as caught:
        document_of(data + b"9 0 obj\n<< /Length 9000 >>\nstream\n" + b"x" * 5000, "made.pdf")
    assert caught.value.code == "damaged_file"


def test_the_parent_imports_no_parser(tmp_path):
    (tmp_path / "a.pdf").write_bytes(made.plain(Random(1)).data)
    code = "import sys; from kvcli import read_document; read_document(sys.argv[1]); print(*sys.modules)"
    run = [sys.executable, "-c", code, str(tmp_path / "a.pdf")]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "kvcli.documents.parse_in_process" in done.stdout.split()
    assert not {"pypdfium2", "pypdfium2_raw", "lxml", "bs4", "docx", "torch"} & set(done.stdout.split())
