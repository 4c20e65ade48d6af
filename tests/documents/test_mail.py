"""Mail, web archives and notebooks: what their programs show is read, and what else holds text is named."""

from __future__ import annotations

import io
import json
import zipfile
from email.message import EmailMessage

import pytest

from kvcli.documents import Document, document_of
from kvcli.errors import BadInput


def message(text: str = "Hello.\n", subject: str = "Angebot für die Brücke", **more: str) -> EmailMessage:
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "Jörg <j@example.org>", "ann@example.org", subject
    mail["Date"], mail["Message-ID"] = "Thu, 01 Jan 2026 10:00:00 +0100", "<1@example.org>"
    mail.set_content(text, **more)
    return mail


def rich() -> bytes:
    """Two forms of a text, with a picture in one of them, an attachment and a message that is forwarded."""
    mail = message("Only HTML here.\n", subject="Price")
    mail.add_alternative("<p>It is € 4.200 for 10<sup>6</sup> bolts.<img src='cid:a'>", subtype="html")
    mail.get_payload()[1].add_related(b"\x89PNG", "image", "png", cid="<a>")
    mail.add_attachment(b"%PDF-1.7", maintype="application", subtype="pdf", filename="Übersicht.pdf")
    inner = message("Inner text.\n", subject="Inner")
    mail.add_attachment(inner)
    return mail.as_bytes()


def box() -> bytes:
    """Three messages in a file."""
    made = b""
    for subject in ("Budget", "Budget", "End"):
        raw = (
            message("First.\n\nFrom now on: 10:30\nx: y\n", subject=subject)
            .as_bytes()
            .replace(b"\nFrom n", b"\n>From n")
        )
        made += b"From j@example.org Thu Jan  1 10:00:00 2026\n" + raw + b"\n"
    return made


def archive() -> bytes:
    """A page with a style sheet and a frame."""
    page = message("x", subject="Brücke")
    page.set_content("<title>t</title><h1>One</h1><p>10<b class=u>6</b> “bolts”</p><h2>Two</h2>end", subtype="html")
    page.add_related(".u {vertical-align: super}", subtype="css")
    page.add_related("<p>an advertisement", subtype="html")
    del page["To"], page["Message-ID"]
    return page.as_bytes()


def sections(document: Document) -> list[tuple[str, str]]:
    return [(s.label, s.text) for s in document.sections]


HEADERS = "From: Jörg <j@example.org>\nTo: ann@example.org\nDate: Thu, 01 Jan 2026 10:00:00 +0100\nSubject: "


@pytest.mark.parametrize("name", ["a.eml", "standard input", "a.txt"])
@pytest.mark.parametrize(
    ("charset", "cte"), [("utf-8", "base64"), ("iso-8859-1", "quoted-printable"), ("koi8-r", "8bit")]
)
def test_a_message_is_its_headers_and_its_text_decoded(name, charset, cte):
    text = "Мост закрыт.\n" if charset == "koi8-r" else "Die Brücke für alle.\n"
    document = document_of(message(text, charset=charset, cte=cte).as_bytes(), name)
    assert document.text == f"{HEADERS}Angebot für die Brücke\n\n{text}"
    assert (document.kind, document.title) == ("mail", "Angebot für die Brücke")
    assert bool(document.notes) == (name == "a.txt")  # which says that it is no text


def test_of_two_forms_the_one_that_a_reader_sees_and_attachments_by_name():
    document = document_of(rich(), "a.eml")
    attached = "Übersicht.pdf (application/pdf, 8 bytes)"
    assert sections(document) == [
        ("Price", f"{HEADERS}Price\nAttached: {attached}\n\nIt is € 4.200 for 10^6 bolts."),
        ("Inner", f"{HEADERS}Inner\n\nInner text."),
    ]
    assert document.notes == (f"attachments of a.eml, not read: {attached}",)


def test_a_box_of_messages_has_a_section_for_each():
    for name in ("a.mbox", "standard input"):
        document = document_of(box(), name)
        assert [s.label for s in document.sections] == ["Budget", "Budget (2)", "End"]
        assert document.sections[2].text == f"{HEADERS}End\n\nFirst.\n\nFrom now on: 10:30\nx: y"


def test_a_web_archive_is_its_page_with_its_style_sheets():
    document = document_of(archive(), "p.mhtml")
    assert sections(document) == [("One", "# One\n\n10^6 “bolts”"), ("Two", "## Two\n\nend")]
    assert (document.kind, document.title, document.notes) == ("mhtml", "Brücke", ())


def test_a_text_that_only_looks_like_headers_is_text():
    for text in (
        b"From: the river\nTo: the sea\nDate: now\n\nA poem.\n",
        b"Title: x\nDate: y\n\nz\n",
        b"From here on: no.\n",
    ):
        assert document_of(text, "notes").kind == "text"


def test_a_message_of_nothing_but_attachments_and_one_in_an_unknown_encoding():
    mail = message("", subject="")
    mail.set_content(b"\x00", maintype="application", subtype="pkcs7-mime", filename="smime.p7m")
    assert "smime.p7m (application/pkcs7-mime, 1 bytes)" in document_of(mail.as_bytes(), "a.eml").notes[0]
    raw = message("x").as_bytes().replace(b'charset="utf-8"', b'charset="klingon"').replace(b"\nx", b"\n\x81\x8d\x8f")
    with pytest.raises(BadInput, match="does not declare its encoding"):
        document_of(raw, "a.eml")


# --- notebooks

BOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# River\n", f"Ice. ![x](data:image/png;base64,{'A' * 99})"]},
        {
            "cell_type": "code",
            "execution_count": 3,
            "source": "print('a```b')",
            "outputs": [
                {"output_type": "stream", "text": ["a```b\n"]},
                {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": ["<Figure>"]}},
                {"output_type": "error", "ename": "ValueError", "evalue": "bad", "traceback": ["\x1b[31mno"]},
            ],
        },
        {"cell_type": "markdown", "source": "## Result\nIt is 59."},
    ],
    "metadata": {},
    "nbformat": 4,
}
READ = [
    (
        "River",
        "# River\nIce. ![x]((picture))\n\nIn [3]:\n````\nprint('a```b')\n````\n\n````\na```b\n````\n\n"
        "```\n<Figure>\n```\n\n```\nValueError: bad\n```\n\n",
    ),
    ("Result", "## Result\nIt is 59."),
]


@pytest.mark.parametrize("name", ["a.ipynb", "standard input"])
def test_a_notebook_is_its_texts_its_code_and_what_that_printed(name):
    document = document_of(json.dumps(BOOK).encode(), name)
    assert (document.kind, sections(document)) == ("notebook", READ)


def test_a_notebook_of_the_older_form():
    cells = [{"cell_type": "heading", "level": 2, "source": "One"}]
    cells += [{"cell_type": "code", "prompt_number": 1, "input": "1+1", "outputs": [{"text": "2"}]}]
    old = {"nbformat": 3, "worksheets": [{"cells": cells}]}
    assert document_of(json.dumps(old).encode(), "a.ipynb").text == "## One\n\nIn [1]:\n```\n1+1\n```\n\n```\n2\n```\n"


@pytest.mark.parametrize(
    "data", [b'{"cells": 7}', b'{"cells": [7]}', b'{"cells": [{}]}', b'{"nbformat": 4}', b'{"cells": [']
)
def test_a_damaged_notebook(data):
    with pytest.raises(BadInput, match="cannot be read as a notebook") as caught:
        document_of(data, "a.ipynb", type="ipynb")
    assert caught.value.code == "damaged_file"


# --- other containers of text


def zipped(*names: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name in names:
            made.writestr(name, "x")
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.odt", zipped("mimetype", "content.xml"), "an OpenDocument file"),
        ("a.pages", zipped("Index/Document.iwa"), "a file of Pages, Numbers or Keynote"),
        ("a.xlsx", zipped("xl/workbook.xml"), "an Excel file"),
        ("a.pptx", zipped("ppt/presentation.xml"), "a PowerPoint file"),
        ("a.zip", zipped("Index.html"), "a zip archive"),
        ("a.rtf", b"{\\rtf1 words}", "an RTF file"),
        ("a.msg", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), "a message of Outlook"),
        ("a.webarchive", b"bplist00" + bytes(99), "a web archive of Safari"),
        ("a.mobi", b"x" * 60 + b"BOOKMOBI" + bytes(99), "a Kindle book"),
        ("a.ps", b"%!PS-Adobe-3.0\n(words) show", "PostScript"),
        ("a.warc", b"WARC/1.0\r\nWARC-Type: response\r\n", "a web crawl"),
        ("a.fb2", b'<?xml version="1.0"?><FictionBook xmlns="x"><body/>', "a document in XML (FictionBook)"),
        ("a.fodt", b'<?xml version="1.0"?>\n<office:document xmlns:office="x">', "a document in XML (office:document)"),
        ("a.xml", b'<?xml version="1.0"?><w:wordDocument xmlns:w="x">', "a document in XML (w:wordDocument)"),
    ],
)
def test_another_container_of_text_is_refused_by_its_name(name, data, words):
    with pytest.raises(BadInput) as caught:
        document_of(data, name)
    assert (caught.value.code, words in caught.value.message) == ("not_text", True), caught.value.message
    assert caught.value.try_


def test_other_xml_is_text():
    assert document_of(b'<?xml version="1.0"?><rows><row>1</row></rows>', "a.xml").kind == "text"
