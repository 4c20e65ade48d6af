"""The bundled sample PDF: a field report of twenty pages with findings planted in it. Writes sample.pdf.

python -m tests.demo_model.sample

It is typeset as reports are: a running header and footer, page numbers, headings, justified and hyphenated lines. Each
finding names its own page in print ("[p. 4]"), because that is what the bundled model was trained to copy. Needs
reportlab, which only developers have.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from random import Random

from kvcli.demo import sample_path
from kvcli.demo.report import Finding, write_report

SEED = 7
N_TOKENS = 5_400
FACT_SHARE = 0.35
N_PAGES = 20
N_SECTIONS = 9

TITLE = "Field Report"
BREAKABLE = 7  # letters; shorter words are not broken at the end of a line
VOWELS = "aeiouy"


@dataclass(frozen=True)
class Page:
    """Paragraphs of one page; those that begin with "## " are headings."""

    number: int
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """The text of the PDF, and what is planted in it."""

    pages: tuple[Page, ...]
    findings: tuple[Finding, ...]


def write_sample(seed: int = SEED) -> Sample:
    """A report of exactly twenty pages: the first such that numbers drawn from the seed lead to."""
    for attempt in range(1_000):
        report = write_report(Random(f"{seed} {attempt}"), N_TOKENS, FACT_SHARE, n_sections=N_SECTIONS)
        pages = tuple(_pages(report.text))
        if len(pages) == N_PAGES:
            return Sample(pages, tuple(report.findings))
    raise AssertionError(f"no report of {N_PAGES} pages for seed {seed}")


def _pages(text: str) -> Iterator[Page]:
    head, *rest = re.split(r"^\[p\. \d+\]$\n?", text, flags=re.MULTILINE)
    for number, body in enumerate(rest, 1):
        body = head + body if number == 1 else body
        paragraphs = [" ".join(p.split()) for p in body.split("\n") if p.strip()]
        if paragraphs:  # the mark of a page that never came ends some reports
            yield Page(number, tuple(paragraphs))


def pdf_bytes(sample: Sample) -> bytes:
    """The sample as a PDF; the same bytes for the same sample and version of reportlab."""
    from reportlab.lib.pagesizes import A5
    from reportlab.pdfgen.canvas import Canvas

    out = BytesIO()
    canvas = Canvas(out, pagesize=A5, invariant=1, pageCompression=1)
    canvas.setTitle(f"{TITLE}: a sample for kvcli")
    canvas.setAuthor("kvcli")
    for page in sample.pages:
        _typeset(canvas, page, A5, len(sample.pages))
        canvas.showPage()
    canvas.save()
    return out.getvalue()


def _typeset(canvas: object, page: Page, size: tuple[float, float], of: int) -> None:
    from reportlab.lib.enums import TA_JUSTIFY
    from reportlab.lib.styles import ParagraphStyle
    from reportlab.pdfgen.canvas import Canvas
    from reportlab.platypus import Frame, KeepInFrame, Paragraph

    assert isinstance(canvas, Canvas)
    width, height = size
    canvas.setFont("Helvetica", 7.5)
    canvas.drawString(48, height - 34, f"{TITLE} · kvcli sample")
    canvas.drawRightString(width - 48, height - 34, "Survey of wells, depots and gauges")
    canvas.line(48, height - 39, width - 48, height - 39)
    canvas.drawCentredString(width / 2, 26, f"Page {page.number} of {of}")
    body = ParagraphStyle(
        "body",
        fontName="Times-Roman",
        fontSize=10,
        leading=13,
        alignment=TA_JUSTIFY,
        spaceAfter=6,
        splitLongWords=0,
        embeddedHyphenation=1,
    )
    heading = ParagraphStyle("heading", parent=body, fontName="Helvetica-Bold", fontSize=12, leading=16, spaceBefore=6)
    flow = [
        Paragraph(_hyphenated(p.removeprefix("## ")), heading if p.startswith("## ") else body) for p in page.paragraphs
    ]
    frame = Frame(42, 40, width - 84, height - 88, showBoundary=0)
    frame.addFromList([KeepInFrame(width - 96, height - 100, flow, mode="shrink")], canvas)


def _hyphenated(text: str) -> str:
    """Text for a paragraph, with soft hyphens where long words may be broken."""
    from xml.sax.saxutils import escape

    return re.sub(rf"\b[a-z]{{{BREAKABLE},}}\b", lambda m: _syllables(m[0]), escape(text))


def _syllables(word: str) -> str:
    """A soft hyphen before each consonant that a vowel follows, some letters from either end."""
    found = ""
    for i, letter in enumerate(word):
        inside = 3 <= i <= len(word) - 4
        if inside and letter not in VOWELS and word[i + 1] in VOWELS:
            found += "\N{SOFT HYPHEN}"
        found += letter
    return found


def main(path: Path | None = None) -> None:
    file = path or sample_path()
    file.write_bytes(pdf_bytes(write_sample()))
    sys.stdout.write(f"{file}: {N_PAGES} pages\n")


if __name__ == "__main__":
    main()
