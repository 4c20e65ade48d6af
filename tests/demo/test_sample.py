"""The sample PDF: what is planted in it is what is read, and what its summary tells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcli
from kvcli.chat.model import Model
from kvcli.demo import sample_path
from kvcli.documents import Document, read_document
from tests.demo_model.sample import N_PAGES, main, pdf_bytes, write_sample
from tests.summarize.scribe import summary_of

SAMPLE = write_sample()


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def shipped() -> Document:
    return read_document("demo:pdf")


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with kvcli.load("demo") as loaded:
        yield loaded


def test_every_page_is_read_as_it_was_written(shipped: Document):
    assert (shipped.kind, shipped.n_pages, len(shipped.sections)) == ("pdf", N_PAGES, N_PAGES)
    written = [plain(" ".join(p.removeprefix("## ") for p in page.paragraphs)) for page in SAMPLE.pages]
    assert [plain(section.text) for section in shipped.sections] == written


def test_every_finding_is_planted_on_the_page_it_names(shipped: Document):
    assert len(SAMPLE.findings) == 9
    for finding in SAMPLE.findings:
        assert finding.sentence in plain(shipped.sections[finding.page - 1].text)


def test_it_is_what_its_command_writes(tmp_path: Path, shipped: Document):
    pytest.importorskip("reportlab", reason="writes the PDF; comes with the dev extra")
    main(tmp_path / "a.pdf")
    again = read_document(tmp_path / "a.pdf")
    assert [section.text for section in again.sections] == [section.text for section in shipped.sections]
    assert pdf_bytes(SAMPLE) == pdf_bytes(SAMPLE) == (tmp_path / "a.pdf").read_bytes()


def test_it_is_typeset_as_reports_are():
    pypdfium2 = pytest.importorskip("pypdfium2")
    pdf = pypdfium2.PdfDocument(sample_path())
    texts = [pdf[i].get_textpage().get_text_bounded() for i in range(len(pdf))]
    assert all(f"Page {i} of {N_PAGES}" in text and "kvcli sample" in text for i, text in enumerate(texts, 1))
    assert (
        sum(len(re.findall("[\x02\ufffe]", text)) for text in texts) >= 5
    )  # pdfium's sign for a word broken at the end of a line


def test_its_summary_has_all_findings_with_their_pages(model: Model, shipped: Document):
    summary = summary_of(model, [shipped])
    assert (summary.mode, summary.unconfirmed) == ("whole", 0)
    assert [point.marked for point in summary.points] == [finding.sentence for finding in SAMPLE.findings]
