"""What a reader of a PDF page sees is its text, and what nobody sees is left out and said."""

from __future__ import annotations

import io

import pytest
from pypdf import PdfWriter
from pypdf.generic import (
    ArrayObject,
    BooleanObject,
    DecodedStreamObject,
    DictionaryObject,
    FloatObject,
    NameObject,
    RectangleObject,
    create_string_object,
)

from kvcli.documents import document_of
from kvcli.documents.document import Parsed, ParseJob
from kvcli.documents.worker import parse
from kvcli.errors import BadInput
from tests.documents import made

HELVETICA = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
LINE = "BT /F1 12 Tf 100 700 Td (A line in view.) Tj ET "
HIDDEN = "invisible text was skipped"
GREY = "q 595 0 0 842 0 0 cm BI /W 1 /H 1 /CS /G /BPC 8 ID \x80 EI Q "


def obj(value: object) -> object:
    """Dictionaries, names, strings in brackets and numbers as pypdf has them."""
    if isinstance(value, dict):
        return DictionaryObject({NameObject(k): obj(v) for k, v in value.items()})
    if isinstance(value, list):
        return ArrayObject([obj(v) for v in value])
    if isinstance(value, str):
        return NameObject(value) if value.startswith("/") else create_string_object(value.strip("()"))
    return FloatObject(value) if isinstance(value, int | float) else value


def page(content: str, *, box=(0, 0, 595, 842), fonts=None, catalog=None, annotations=(), **resources) -> bytes:
    """A file of one page that draws this."""
    writer = PdfWriter()
    sheet = writer.add_blank_page(595, 842)
    sheet.cropbox = RectangleObject(box)
    stream = DecodedStreamObject()
    stream.set_data(content.encode("latin-1"))
    sheet[NameObject("/Contents")] = writer._add_object(stream)
    sheet[NameObject("/Resources")] = obj({"/Font": {"/F1": fonts or HELVETICA}} | resources)
    sheet[NameObject("/Annots")] = ArrayObject([writer._add_object(obj(a)) for a in annotations])
    writer.root_object.update(obj(catalog or {}))
    return made.written(writer)


def read(data: bytes) -> Parsed:
    return parse(io.BytesIO(data), ParseJob("made", "pdf"))


UNSEEN = {
    "without ink": "BT 3 Tr /F1 12 Tf 100 600 Td (GHOST) Tj ET",
    "white": "1 g BT /F1 12 Tf 100 600 Td (GHOST) Tj ET",
    "nearly white": "0.97 0.98 1 rg BT /F1 12 Tf 100 600 Td (GHOST) Tj ET",
    "in the colour of a box": "0 0 0.4 rg 90 590 300 40 re f BT /F1 12 Tf 100 600 Td (GHOST) Tj ET",
    "under a black bar": "BT /F1 12 Tf 100 600 Td (GHOST) Tj ET 90 590 300 40 re f",
    "under a white box": "BT /F1 12 Tf 100 600 Td (GHOST) Tj ET 1 g 90 590 300 40 re f",
    "white amid a line": "BT /F1 12 Tf 100 600 Td (Worth ) Tj 1 g (GHOST ) Tj 0 g (100.) Tj ET",
    "transparent": "/G gs BT /F1 12 Tf 100 600 Td (GHOST) Tj ET",
}


@pytest.mark.parametrize("content", UNSEEN.values(), ids=UNSEEN)
def test_text_that_nobody_sees_is_left_out_and_said(content):
    parsed = read(page(LINE + content, **{"/ExtGState": {"/G": {"/ca": 0}}}))
    assert "GHOST" not in parsed.sections[0].text
    assert parsed.sections[0].text.startswith("A line in view.")
    assert [note for note in parsed.notes if HIDDEN in note]


@pytest.mark.parametrize(
    "content",
    [
        "0 0 0.4 rg 90 590 300 40 re f 1 g BT /F1 12 Tf 100 600 Td (SEEN) Tj ET",  # white on a dark box
        "0.85 g BT /F1 60 Tf 100 500 Td (SEEN) Tj ET",  # a watermark
        "BT 1 Tr 1 g /F1 40 Tf 100 500 Td (SEEN) Tj ET",  # outlines
        GREY + "BT 3 Tr /F1 12 Tf 100 600 Td (SEEN) Tj ET",  # recognised on a scan
    ],
)
def test_text_that_is_seen_stays(content):
    parsed = read(page(content + " " + LINE.replace("BT", "BT 0 Tr 0 g")))
    assert "SEEN" in parsed.sections[0].text
    assert parsed.notes == []


def test_what_was_recognised_under_visible_text_does_not_double_it():
    parsed = read(page(GREY + LINE + "BT 3 Tr /F1 12 Tf 100 700 Td (A 1ine in v1ew.) Tj ET"))
    assert parsed.sections[0].text == "A line in view."


@pytest.mark.parametrize(("state", "text"), [("/OFF", "A line in view."), ("/ON", "A line in view.\n\nLayer")])
def test_a_layer_that_is_off_is_not_read(state, text):
    writer = PdfWriter(clone_from=io.BytesIO(page(LINE + "/OC /L BDC BT /F1 12 Tf 100 600 Td (Layer) Tj ET EMC")))
    group = writer._add_object(obj({"/Type": "/OCG", "/Name": "(L)"}))
    writer.pages[0]["/Resources"][NameObject("/Properties")] = DictionaryObject({NameObject("/L"): group})
    off = DictionaryObject({NameObject(state): ArrayObject([group])})
    writer.root_object[NameObject("/OCProperties")] = DictionaryObject(
        {NameObject("/OCGs"): ArrayObject([group]), NameObject("/D"): off}
    )
    parsed = read(made.written(writer))
    assert parsed.sections[0].text.replace("\n", " ").split() == text.split()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (LINE + "BT /F1 12 Tf 700 700 Td (AWAY) Tj ET BT /F1 12 Tf 100 30 Td (SLUG) Tj ET", "A line in view."),
        ("BT /F1 12 Tf 480 700 Td (A word straddles) Tj ET", "A word strad"),
        (LINE + "BT /F1 12 Tf 100 900 Td (ABOVE) Tj ET", "A line in view."),
    ],
)
def test_text_beyond_the_edges_is_left_out_and_said(content, text):
    parsed = read(page(content, box=(50, 100, 545, 800)))
    assert (parsed.sections[0].text, parsed.notes) == (text, ["page 1: text outside the page was skipped"])


def test_a_file_of_unseen_text_alone_says_so():
    with pytest.raises(BadInput) as caught:
        read(page("BT 3 Tr /F1 12 Tf 100 600 Td (GHOST) Tj ET"))
    assert (caught.value.code, "invisible" in caught.value.lines[0]) == ("no_text", True)


@pytest.mark.parametrize(("flags", "is_read"), [(4, True), (0, True), (2, False), (32, False)])
def test_what_was_typed_onto_a_page_is_read_where_it_stands(flags, is_read):
    typed = {"/Subtype": "/FreeText", "/F": flags, "/Rect": [220, 695, 400, 715], "/Contents": "(Ada Lovelace)"}
    comment = {"/Subtype": "/Text", "/F": 4, "/Rect": [100, 640, 120, 660], "/Contents": "(a comment)"}
    parsed = read(page(LINE + "BT /F1 12 Tf 100 600 Td (Below.) Tj ET", annotations=[typed, comment]))
    assert parsed.sections[0].text.split("\n")[0] == "A line in view." + "  Ada Lovelace" * is_read
    assert "comment" not in parsed.sections[0].text


@pytest.mark.parametrize("top", [715, 695])
def test_blank_lines_and_no_height_of_what_was_typed(top):
    typed = {"/Subtype": "/FreeText", "/Rect": [220, 695, 400, top], "/Contents": "(Ada\r\r  \rLovelace)"}
    assert {"Ada", "Lovelace"} <= {*read(page(LINE, annotations=[typed])).sections[0].text.split()}


def test_a_stamp_is_said():
    stamp = {"/Subtype": "/Stamp", "/F": 4, "/Rect": [100, 640, 120, 660]}
    assert "stamp" in read(page(LINE, annotations=[stamp])).notes[0]


def test_a_dynamic_form_is_refused_by_name():
    xfa = {"/NeedsRendering": BooleanObject(True), "/AcroForm": {"/Fields": [], "/XFA": [create_string_object("x")]}}
    with pytest.raises(BadInput) as caught:
        read(page(LINE, catalog=xfa))
    assert caught.value.code == "no_text"
    assert "XFA" in caught.value.lines[0]
    xfa["/NeedsRendering"] = BooleanObject(False)  # older ones do not say so; their page may be real
    assert "XFA" in read(page(LINE, catalog=xfa)).notes[0]


def test_the_files_of_a_portfolio_are_named():
    writer = PdfWriter(clone_from=io.BytesIO(page(LINE)))
    for i in range(10):
        writer.add_attachment(f"part {i}.xlsx", b"data")
    (note,) = read(made.written(writer)).notes
    assert "portfolio" in note
    assert "part 0.xlsx" in note
    assert note.endswith("and 2 more")


def test_a_font_that_does_not_say_its_letters_is_said():
    writer = PdfWriter(clone_from=io.BytesIO(page("BT /F1 12 Tf 80 700 Td (!#$%&!#$%&) Tj ET")))
    glyph = DecodedStreamObject()
    glyph.set_data(b"600 0 0 0 500 700 d1 0 0 500 700 re f")
    drawn = writer._add_object(glyph)
    names = ["!", "#", "$", "%", "&"]
    font = obj(
        {
            "/Type": "/Font",
            "/Subtype": "/Type3",
            "/FontBBox": [0, 0, 1000, 1000],
            "/FontMatrix": [0.001, 0, 0, 0.001, 0, 0],
            "/CharProcs": {f"/g{i}": drawn for i in range(5)},
            "/Encoding": {
                "/Type": "/Encoding",
                "/Differences": [x for i in range(5) for x in (ord(names[i]), f"/g{i}")],
            },
            "/FirstChar": 33,
            "/LastChar": 38,
            "/Widths": [600] * 6,
            "/Resources": {},
        }
    )
    writer.pages[0]["/Resources"]["/Font"][NameObject("/F1")] = font
    assert read(made.written(writer)).unreadable == [1]
    assert "does not name its letters" in document_of(made.written(writer), "a.pdf", ocr="off").notes[0]
