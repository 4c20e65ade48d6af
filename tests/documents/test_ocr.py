"""Scanned pages: when their text is recognized (OCR), what is said where it is not, and how much of it is right."""

from __future__ import annotations

import io
import sys
from random import Random

import pytest

from kvcli.documents import document_of, read, recognized_pages, scanned_pages
from kvcli.documents.document import Parsed, ParseJob, Section
from kvcli.documents.reading_order import LinePiece
from kvcli.documents.worker import parse, prepare
from kvcli.errors import BadInput
from tests.documents import made


@pytest.fixture
def asked(monkeypatch):
    """Jobs of a reader that finds text on page 1, an unreadable font on page 2, and a picture on page 3."""
    jobs = []

    def parse(file, job, limits):
        jobs.append((job.ocr, limits))
        sections = [Section(1, "1", "words", job.ocr == "on"), Section(2, "2", "@@", job.ocr != "off")]
        if job.ocr == "off":
            return Parsed("pdf", "page", sections, without_text=[3], unreadable=[2], n_pages=3)
        return Parsed("pdf", "page", [*sections, Section(3, "3", "scan", True)], n_pages=3)

    monkeypatch.setattr(read, "parse_outside", parse)
    monkeypatch.setattr(scanned_pages, "find_spec", lambda name: True)
    return jobs


@pytest.mark.parametrize(
    ("ocr", "jobs", "recognized"),
    [("auto", ["off", "auto"], (2, 3)), ("off", ["off"], ()), ("on", ["off", "on"], (1, 2, 3))],
)
def test_pages_without_readable_text_are_recognized_or_all_or_none(asked, ocr, jobs, recognized):
    document = document_of(b"%PDF-1.4\n", "a.pdf", ocr=ocr)
    assert [job for job, _ in asked] == jobs
    assert document.recognized == recognized
    assert document.without_text == ((3,) if ocr == "off" else ())
    assert ("text recognition (OCR) reads such pages: --ocr auto" in document.notes) == (ocr == "off")
    assert [limits.cpu // scanned_pages.SECONDS for _, limits in asked[1:]] == [len(recognized) + 1] * (ocr != "off")


def test_without_the_packages_the_note_says_what_to_install(asked, monkeypatch):
    monkeypatch.setattr(scanned_pages, "find_spec", lambda name: None)
    assert document_of(b"%PDF-1.4\n", "a.pdf").notes[-1].endswith("-m pip install rapidocr onnxruntime")


def test_too_many_scanned_pages_are_refused_with_their_number(asked, monkeypatch):
    monkeypatch.setattr(scanned_pages, "MOST", 1)
    with pytest.raises(BadInput, match="has 2 pages to recognize"):
        document_of(b"%PDF-1.4\n", "a.pdf")


def test_a_page_is_recognized_once(tmp_path, monkeypatch):
    """Its lines are saved privately; a damaged file, an encrypted document or another document is none of these."""
    pytest.importorskip("rapidocr")
    parsed, line = [], LinePiece("scan", 72, 90, 200, 102, 9, base=99.6)

    def parse(file, job, limits):
        parsed.append(job)
        if job.ocr == "off":
            return Parsed("pdf", "page", [Section(1, "1", "words")], without_text=[2, 3], n_pages=3)
        new = [page for page, _ in job.spans if page not in job.known]
        assert job.recognizes == bool(new)
        sections = [Section(page, str(page), "scan", True) for page, _ in job.spans]
        return Parsed("pdf", "page", sections, n_pages=3, lines={page: [line] for page in new})

    monkeypatch.setattr(read, "parse_outside", parse)

    def known(data=b"%PDF-1.4\n", **how):
        document = document_of(data, "a.pdf", cache=tmp_path, **how)
        assert document.recognized == (2, 3)
        return parsed[-1].known

    assert known() == {}
    assert known() == {2: [line], 3: [line]}
    (saved,) = (tmp_path / "ocr").iterdir()
    assert saved.stat().st_mode & 0o777 == 0o600
    assert known(b"%PDF-1.5\n") == known(password="river") == {}
    for damage in (saved.read_bytes().replace(b"scan", b"scam"), b"", b"{}"):
        saved.write_bytes(damage)
        assert known() == {}
    monkeypatch.setattr(recognized_pages, "MOST_BYTES", saved.stat().st_size)
    assert known(b"%PDF-1.6\n") == {}
    assert len(list((tmp_path / "ocr").iterdir())) == 1
    assert known() == {}


def test_lines_that_are_known_are_read_without_recognition(monkeypatch):
    """In the reader: the text is that of the lines, and nothing of OCR is imported."""
    monkeypatch.setitem(sys.modules, "kvcli.documents.ocr", None)
    line = LinePiece("Known words.", 72, 90, 200, 102, 9, base=99.6)
    job = ParseJob("a.pdf", "pdf", ((1, 1),), ocr="auto", known={1: [line]})
    assert prepare(job) == {}
    found = parse(io.BytesIO(scan(made.plain(Random(1)).data)), job)
    assert [(section.text, section.is_ocr) for section in found.sections] == [("Known words.", True)]
    assert found.lines == {}


def scan(data: bytes, turn: float = 0, dpi: int = 150) -> bytes:
    """A file whose pages are pictures of those of a PDF, turned by some degrees."""
    import pypdfium2 as pdfium

    pages = pdfium.PdfDocument(data)
    found = [
        pages[i].render(scale=dpi / 72).to_pil().convert("L").rotate(turn, expand=True, fillcolor=255)
        for i in range(len(pages))
    ]
    with io.BytesIO() as out:
        found[0].save(out, "PDF", save_all=True, append_images=found[1:], resolution=dpi)
        return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "turn"),
    [
        (made.plain, 0),
        (made.plain, 0.7),
        (made.plain, 90),
        (made.plain, 180),
        (made.columns(2, across=False), 0),
        (made.running, 0),
    ],
    ids=["plain", "inclined", "sideways", "upside down", "columns", "running heads"],
)
def test_text_of_scanned_pages_is_read_in_order(make, turn, tmp_path):
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    one = make(Random(1))
    told = []
    data = scan(one.data, turn)
    document, again = (document_of(data, "a.pdf", on_page=lambda *of: told.append(of), cache=tmp_path) for _ in "ab")
    assert again == document
    assert told == [(i, len(one.pages)) for i in range(1, len(one.pages) + 1)]
    assert len(document.recognized) == len(document.sections)
    for section, page in zip(document.sections, one.pages, strict=True):
        letters, expected = "".join(section.text.split()), "".join(page.split())
        assert letters == expected  # spaces are sometimes missed
