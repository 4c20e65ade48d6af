"""Whatever the bytes are: a document or an error for the user, never anything else."""

from __future__ import annotations

import io
import json
import re
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcli.documents import Document, Limits, document_of
from kvcli.documents.document import Parsed, ParseJob, parse_pages, split_pages
from kvcli.documents.worker import parse
from kvcli.errors import KvcliError
from tests.documents import books, made
from tests.documents import test_mail as mails
from tests.documents.test_formats import PAGE

EQUATION = "<w:p><m:f><m:num><m:r><m:t>1</m:t></m:r></m:num><m:den/></m:f><w:txbxContent><w:p/></w:txbxContent></w:p>"
SEEDS = {
    "pdf": [made.form(Random(1)).data, made.encrypted("", "x", "RC4-128")(Random(1)).data, made.table(Random(1)).data],
    "html": [PAGE.encode()],
    "epub": [books.epub()],
    "docx": [books.docx_file(), books.word(books.paragraph("10") + EQUATION, styles="<w:style/>")],
}
SEEDS |= {
    "mail": [mails.box(), mails.rich()],
    "mhtml": [mails.archive()],
    "notebook": [json.dumps(mails.BOOK).encode()],
}
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SPLICE = st.tuples(st.integers(0, 1 << 20), st.integers(0, 64), st.binary(max_size=24))


def mutated(data: bytes, splices: list[tuple[int, int, bytes]]) -> bytes:
    """The same file with stretches replaced."""
    for at, n, put in splices:
        at %= len(data) + 1
        data = data[:at] + put + data[at + n :]
    return data


def inside(kind: str, data: bytes) -> None:
    """The reader itself, without a process around it; what it raises is for the user."""
    try:
        parsed = parse(io.BytesIO(data), ParseJob("f", kind))
    except KvcliError:
        return
    assert isinstance(parsed, Parsed)
    assert all(section.text.strip() for section in parsed.sections)


@pytest.mark.parametrize("kind", ["html", "epub", "docx", "zip", "mail", "mhtml", "notebook"])
@QUICK
@given(data=st.data())
def test_a_reader_takes_any_mutation_of_a_valid_file(kind: str, data: st.DataObject):
    seed = data.draw(st.sampled_from(SEEDS.get(kind) or [*SEEDS["epub"], *SEEDS["docx"]]))
    inside(kind, mutated(seed, data.draw(st.lists(SPLICE, max_size=4))))


@QUICK
@given(
    text=st.text(),
    tags=st.lists(st.sampled_from(["<h1>", "</h1>", "<table>", "<tr>", "<td>", "<pre>", "<li>", "<!--"])),
)
def test_html_of_any_tags(text: str, tags: list[str]):
    inside("html", (text + text.join(tags)).encode("utf-8", "replace"))


@QUICK
@given(
    inner=st.dictionaries(
        st.sampled_from(["META-INF/container.xml", "OEBPS/book.opf", "OEBPS/nav.xhtml"]), st.binary(max_size=80)
    )
)
def test_a_book_with_any_inner_file(inner: dict[str, bytes]):
    inside("epub", books.epub(more=inner))


@QUICK
@given(data=st.binary(max_size=3000), name=st.sampled_from(["a.txt", "a.md", "a", "a.c"]))
def test_text_of_any_bytes(data: bytes, name: str):
    try:
        document = document_of(data, name, limits=Limits(cpu=4))
    except KvcliError:
        return
    assert isinstance(document, Document)


@QUICK
@given(text=st.text(st.sampled_from("#=-` \nab[p. 3]\f~")), name=st.sampled_from(["a.txt", "a.md"]))
def test_sections_of_text_lose_nothing(text: str, name: str):
    try:
        document = document_of(text.encode(), name)
    except KvcliError:
        return
    joined = "".join("".join(s.text for s in document.sections).split())
    if document.unit == "page":
        text = re.sub(r"(?m)^\[p\. \d+\][ \t]*$", "", document.text)
        assert joined == "".join(text.split())
    else:
        assert joined == "".join(document.text.split())


@settings(QUICK, max_examples=12)
@given(data=st.data(), kind=st.sampled_from(["pdf", "pdf", "epub", "docx", "html"]))
def test_the_process_around_a_reader_takes_any_mutation(data: st.DataObject, kind: str):
    """PDF only here: pdfium is not ours, and a crash of it must end in words, not with the tests."""
    seed = data.draw(st.sampled_from(SEEDS[kind]))
    try:
        found = document_of(mutated(seed, data.draw(st.lists(SPLICE, max_size=4))), f"f.{kind}", limits=Limits(cpu=6))
    except KvcliError:
        return
    assert found.sections


@QUICK
@given(text=st.text(st.sampled_from("0123456789,-: .a")))
def test_ranges_of_pages(text: str):
    rest, pages = split_pages(text)
    assert rest + (f":{pages}" if pages else "") == text
    try:
        spans = parse_pages(text)
    except KvcliError:
        return
    assert all(first > 0 and (last is None or last >= first) for first, last in spans)
