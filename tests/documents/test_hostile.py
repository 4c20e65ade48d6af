"""What is damaged, locked, or made to do harm: a clear error with exit 3, within bounds, and nothing left running."""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path
from random import Random

import psutil
import pytest

from kvcli.documents import Limits, document_of, read, read_document
from kvcli.documents.decode import HEAD, sniff
from kvcli.documents.document import ParseJob
from kvcli.documents.plain import number
from kvcli.errors import BadInput, ExitStatus
from tests.documents import bombs, books, made

TIGHT = Limits(memory=512 * 2**20, cpu=4, wall=60)
WHOLE = made.plain(Random(1)).data


def refused(data: bytes, name: str, limits: Limits = TIGHT, **options) -> BadInput:
    before = {*psutil.Process().children(recursive=True)}
    with pytest.raises(BadInput) as caught:
        document_of(data, name, limits=limits, **options)
    error = caught.value
    assert error.exit == ExitStatus.BAD_INPUT
    assert name in error.message
    assert {*psutil.Process().children(recursive=True)} <= before
    return error


@pytest.mark.parametrize("name", ["a.pdf", "a.html", "a.epub", "a.docx", "a.md", "a.txt", "standard input"])
def test_nothing_at_all(name):
    assert refused(b"", name).code == "empty_file"


@pytest.mark.parametrize("kind", ["pdf", "html", "epub", "docx"])
def test_nothing_at_all_of_a_kind_that_was_said(kind):
    assert refused(b"", "a", type=kind).code in ("empty_file", "damaged_file", "no_text")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_truncated_pdf(share):
    error = refused(WHOLE[: int(share * len(WHOLE))], "a.pdf")
    assert error.code == "damaged_file"
    assert "its end is missing" in error.lines[0]


def test_a_truncated_archive():
    for name, data in (("a.epub", books.epub()), ("a.docx", books.docx_file())):
        assert refused(data[: len(data) // 2], name).code == "damaged_file"


@pytest.mark.parametrize("algorithm", ["RC4-40", "RC4-128"])
def test_an_encrypted_pdf_asks_for_its_password(algorithm):
    data = made.encrypted("river", "board", algorithm)(Random(1)).data
    assert refused(data, "a.pdf").code == "encrypted"
    wrong = refused(data, "a.pdf", password="lake")
    assert wrong.code == "wrong_password"
    assert "lake" not in str([wrong.message, wrong.lines, wrong.try_, wrong.detail])
    assert document_of(data, "a.pdf", password="board").sections  # the owner's opens it as well


def test_an_encryption_nobody_knows():
    data = made.encrypted("river", "board", "RC4-128")(Random(1)).data
    assert refused(data.replace(b"/Standard", b"/Strange1"), "a.pdf").code == "encrypted"


def test_pictures_only():
    error = refused(made.scanned(Random(1)), "a.pdf", ocr="off")
    assert error.code == "no_text"
    assert "scanned" in error.lines[0]


@pytest.mark.parametrize(
    ("make", "codes"),
    [
        (bombs.endless_pages, {"damaged_file"}),
        (bombs.too_many_pages, {"document_too_large"}),
        (lambda: bombs.forms(10, 12), {"damaged_file", "document_too_heavy"}),
    ],
    ids=["endless pages", "too many pages", "forms in forms"],
)
def test_a_pdf_that_would_take_for_ever_or_all_memory(make, codes):
    assert refused(make(), "a.pdf").code in codes


@pytest.mark.parametrize("make", [bombs.deep_arrays, bombs.many_objects])
def test_a_pdf_that_only_looks_dreadful_is_read(make):
    assert document_of(make(), "a.pdf", limits=TIGHT).sections[0].text == "some words of text"


@pytest.mark.parametrize(
    ("make", "name", "code", "words"),
    [
        (bombs.zip_bomb, "a.epub", "document_too_heavy", "inflates"),
        (bombs.zip_lies, "a.epub", "damaged_file", "three.xhtml"),
        (bombs.crowded, "a.epub", "document_too_heavy", "20,002 files"),
        (bombs.escaping_member, "a.epub", "damaged_file", "leads outside"),
        (lambda: books.epub(more={"OEBPS\\..\\..\\x": "y"}), "a.epub", "damaged_file", "leads outside"),
        (lambda: books.epub(more={"\\\\server\\x": "y"}), "a.epub", "damaged_file", "leads outside"),
        pytest.param(bombs.escaping_link, "a.epub", "damaged_file", "leads outside", marks=pytest.mark.core),
        (bombs.deep_xml, "a.epub", "damaged_file", "XML is invalid"),
        (lambda: books.epub(dtd=bombs.LAUGHS), "a.epub", "damaged_file", "entities"),
        (
            lambda: books.epub(more={"OEBPS/text/one.xhtml": bombs.LAUGHS + "<p>&i;</p>"}),
            "a.epub",
            "damaged_file",
            "entities",
        ),
        (lambda: books.epub({}), "a.epub", "no_text", "pictures"),
        (lambda: books.zipped({"META-INF/container.xml": "<a/>"}), "a.epub", "damaged_file", "does not name a book"),
        (lambda: books.zipped({"a.txt": "x"}), "a.zip", "not_text", ""),
        (lambda: books.zipped({"xl/workbook.xml": "x"}), "a.docx", "not_text", ""),
        (bombs.docx_laughs, "a.docx", "damaged_file", "document type"),
        (lambda: books.zipped({"word/document.xml": "<x/>"}), "a.docx", "damaged_file", ""),
        (lambda: b"<!DOCTYPE html>" + b"<div>" * 200_000 + b"words", "a.html", None, ""),
        (lambda: bombs.LAUGHS.encode() + b"<html>&i;", "a.html", "damaged_file", "entities"),
        (lambda: b"<html><script>x=1</script><!-- y --><p hidden>z</p>", "a.html", "no_text", ""),
    ],
)
def test_archives_and_markup_made_to_do_harm(make, name, code, words):
    error = refused(make(), name)
    assert error.code in ([code] if code else ["damaged_file", "document_too_heavy"])
    assert words in " ".join([error.message, *error.lines])


def test_copy_protection_of_a_book():
    locked = '<encryption><CipherReference URI="OEBPS/text/two.xhtml"/></encryption>'
    assert refused(books.epub(more={"META-INF/encryption.xml": locked}), "a.epub").code == "encrypted"
    font = locked.replace("text/two.xhtml", "font.otf")
    assert document_of(books.epub(more={"META-INF/encryption.xml": font}), "a.epub").sections


def test_a_wall_clock_ends_what_does_not_end():
    assert refused(bombs.forms(10, 12), "a.pdf", Limits(wall=0.3)).code == "document_too_heavy"


def test_memory_ends_with_a_reason():
    assert refused(bombs.swollen(), "a.pdf", Limits(memory=100 * 2**20)).code in ("damaged_file", "document_too_heavy")


def test_an_answer_may_not_be_longer_than_agreed():
    assert "wrote more" in refused(WHOLE, "a.pdf", Limits(output=100)).lines[0]


# --- files


class Growing(io.FileIO):
    """A file that somebody else writes to after its first bytes were read."""

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        with Path(self.name).open("ab") as other:
            other.write(b"more")
        return data


@pytest.mark.parametrize("name", ["a.pdf", "a.txt"])
def test_a_file_that_changes_while_it_is_read(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(WHOLE if name == "a.pdf" else b"words " * 2000)
    with Growing(path) as stream, pytest.raises(BadInput, match="changed while it was read") as caught:
        read._read(stream, ParseJob(name, ""), 20_000_000 if name == "a.txt" else None, None)
    assert caught.value.code == "file_changed"


def test_what_is_no_file(tmp_path):
    (tmp_path / "folder.pdf").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.pdf"))
        codes = {}
        for name in ("folder.pdf", "socket.pdf", "missing.pdf", "missing.pdf:3-9"):
            with pytest.raises(BadInput) as caught:
                read_document(tmp_path / name)
            codes[name] = caught.value.code
    assert codes == {
        "folder.pdf": "is_a_folder",
        "socket.pdf": "file_unreadable",
        "missing.pdf": "file_missing",
        "missing.pdf:3-9": "file_missing",
    }


def test_a_pipe_is_read_to_its_end():
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as out:
            out.write(WHOLE)
        os._exit(0)
    os.close(writing)
    try:
        assert read_document(f"/dev/fd/{reading}").n_pages == 3
    finally:
        os.close(reading)
        os.wait()


def test_nothing_a_file_says_of_itself_can_steer_a_terminal():
    sly = "\x1b]0;owned\x07\u202evil"
    sheet = made.Sheet()
    sheet.canvas.setTitle(sly.replace("\x1b", ""))  # in a PDF this sign begins the name of a language
    sheet.lines(["words"])
    found = [
        document_of(sheet.save(), "a.pdf"),
        document_of(f"<html><title>{sly}</title><h1>{sly}</h1><p>x</p><h1>b</h1>y".encode(), "a.html"),
        document_of(f"# {sly}\n\ntext\n\n# two\n".encode(), "a.md"),
        document_of(books.epub({"one.xhtml": f"<h1>{sly.replace(chr(27), '').replace(chr(7), '')}</h1>"}), "a.epub"),
    ]
    for document in found:
        said = " ".join([document.title or "", *(s.label for s in document.sections)])
        assert "vil" in said
        assert not set(said) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.parametrize("head", [b"<!---->" * 585, b"<!-- " * 800, (b"<!---->" + b" " * 50) * 70])
def test_comments_without_end_are_looked_at_quickly(head):
    started = time.process_time()
    assert sniff(head[:HEAD], "a") == "text"
    assert time.process_time() - started < 1


def test_html_after_many_comments():
    assert sniff(b"<!-- a -- b > c -->\n<!---->" * 9 + b"<!doctype html>", "a") == "html"


def test_a_heading_with_much_room_in_it_is_read_quickly():
    started = time.process_time()
    gap = " " * 100_000
    document = document_of(f"# a{gap}b\n\ntext\n\n## c{gap}##{gap}\n\ntext\n".encode(), "a.md")
    assert [s.label for s in document.sections] == ["a b", "c"]
    assert time.process_time() - started < 2


def test_marks_of_pages_far_apart_are_not_counted_out():
    text = b"[p. 2]\none\n[p. 5]\n\n[p. 999999999]\nlast\n"
    document = document_of(text, "a.txt", pages="1-,3-999999999")
    assert ([s.number for s in document.sections], document.without_text) == ([2, 999999999], (5,))
    assert document.n_pages == document_of(text, "a.txt").n_pages == 3
    for pages, page in (("3-4", 3), ("3", 3), ("1", 1), ("5-", None), ("2-1000", None)):
        if page is None:
            assert document_of(text, "a.txt", pages=pages).sections
        else:
            error = refused(text, "a.txt", pages=pages)
            assert (error.code, error.detail["page"]) == ("no_such_page", page)


def test_more_pages_of_text_than_are_read():
    marks = "".join(f"[p. {n}]\n" for n in range(1, 100_003)).encode()
    for data in (marks, b"a" + b"\f" * 100_001):
        assert refused(data, "a.txt").code == "document_too_large"


def test_a_page_between_form_feeds_cannot_pass_for_another():
    document = document_of(b"one\n\f[p. 7]\ntwo\n\fthree\n", "a.txt")
    assert document.text.count("[p. ") == 3
    assert document.sections[1].text == "(p. 7)\ntwo"


def test_each_heading_has_a_label_of_its_own():
    labels = [s.label for s in number([(h, "x") for h in ("A", "A (2)", "A", "A", "A (2)")])]
    assert labels == ["A", "A (2)", "A (3)", "A (4)", "A (2) (2)"]
