"""DOCX as Word and others write them: parts, boxes, raised letters, equations, headings."""

from __future__ import annotations

import io

import pytest

from kvcli.documents import document_of
from kvcli.documents.document import ParseJob
from kvcli.documents.docx import read
from kvcli.errors import BadInput
from tests.documents.books import WORD, paragraph, relations, word, zipped

STRICT = "http://purl.oclc.org/ooxml/"


def text_of(data: bytes) -> str:
    """Read in this process: what a reader raises is seen as it is."""
    return "\n\n".join(s.text for s in read(io.BytesIO(data), ParseJob("a.docx", "docx")).sections)


def run(inner: str, properties: str = "") -> str:
    return f"<w:r><w:rPr>{properties}</w:rPr>{inner}</w:r>"


def letters(text: str, properties: str = "") -> str:
    return run(f'<w:t xml:space="preserve">{text}</w:t>', properties)


@pytest.mark.parametrize(
    "data",
    [
        word(paragraph("Words."), targets={"image": "../NULL"}),
        word(paragraph("Words."), targets={"hyperlink": "#_Toc123"}),
        word(paragraph("Words."), targets={"image": "media/gone.png", "footnotes": "gone.xml"}),
        word(paragraph("Words."), main="word/document2.xml"),
        word(paragraph("Words."), main="word/doc/text.xml"),
        word(paragraph("Words."), space=f"{STRICT}wordprocessingml/main", base=f"{STRICT}officeDocument/relationships"),
        zipped(
            {
                "[Content_Types].xml": "application/vnd.ms-word.document.macroEnabled.main+xml",
                "_rels/.rels": relations({"officeDocument": "/word/document.xml"}),
                "word/document.xml": f'<w:document xmlns:w="{STRICT}wordprocessingml/main"><w:body>'
                f"{paragraph('Words.')}</w:body></w:document>",
                "word/vbaProject.bin": "x",
            }
        ),
    ],
    ids=["NULL", "bookmark", "missing parts", "another name", "another folder", "strict", "docm"],
)
def test_what_word_opens_is_read(data):
    document = document_of(data, "standard input")
    assert (document.kind, document.text, document.title) == ("docx", "Words.\n", None)


def test_a_style_sheet_of_the_strict_form_heads_sections():
    styles = '<w:style w:styleId="H1"><w:name w:val="heading 1"/></w:style>'
    body = paragraph("One", style="H1") + paragraph("a") + paragraph("Two", style="H1") + paragraph("b")
    base = f"{STRICT}officeDocument/relationships"
    document = document_of(word(body, styles=styles, space=f"{STRICT}wordprocessingml/main", base=base), "a.docx")
    assert [s.label for s in document.sections] == ["One", "Two"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            zipped({"_rels/.rels": relations({"officeDocument": "word/gone.xml"}), "word/a.xml": "<a/>"}),
            "name its text file",
        ),
        (zipped({"_rels/.rels": "<a", "word/a.xml": "<a/>"}), "XML is invalid"),
        (word("<w:p>", files={"word/document.xml": "<a/>"}), "no text in"),
        (word(paragraph("x"), files={"word/styles.xml": "<w:styles"}), "XML is invalid"),
    ],
)
def test_a_damaged_one_says_why(data, words):
    with pytest.raises(BadInput) as caught:
        document_of(data, "a.docx")
    assert caught.value.code == "damaged_file"
    assert words in caught.value.lines[0]


def test_no_reader_takes_a_lack_of_memory_for_damage(monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr("kvcli.documents.docx.parse_xml", full)
    with pytest.raises(MemoryError):
        text_of(word(paragraph("x")))


# --- boxes and tables


def box(inner: str) -> str:
    """A box of text as Word writes it: for today's programs, and once more for older ones."""
    held = f"<w:txbxContent>{inner}</w:txbxContent>"
    either = f"<mc:Choice><w:drawing>{held}</w:drawing></mc:Choice><mc:Fallback><w:pict>{held}</w:pict></mc:Fallback>"
    return f"<w:p><w:r><mc:AlternateContent>{either}</mc:AlternateContent></w:r></w:p>"


def test_text_in_nested_boxes_is_read_once():
    inner = paragraph("BOX")
    for _ in range(4):
        inner = box(inner)
    assert text_of(word(paragraph("before") + inner)).split() == ["before", "BOX"]


def test_a_box_in_a_cell_is_read_once():
    cell = f"<w:tc>{paragraph('cell')}{box(paragraph('BOX'))}</w:tc>"
    assert text_of(word(f"<w:tbl><w:tr>{cell}</w:tr></w:tbl>")) == "| cell BOX |"


def test_a_table_in_a_cell_is_part_of_it():
    inner = f"<w:tbl><w:tr><w:tc>{paragraph('a')}</w:tc><w:tc>{paragraph('b')}</w:tc></w:tr></w:tbl>"
    outer = f"<w:tbl><w:tr><w:tc>{paragraph('x')}{inner}</w:tc><w:tc>{paragraph('y')}</w:tc></w:tr></w:tbl>"
    assert text_of(word(outer)) == "| x a b | y |"


def test_paragraphs_that_have_a_second_form_are_read_in_the_first():
    either = f"<mc:Choice>{paragraph('new')}</mc:Choice><mc:Fallback>{paragraph('old')}</mc:Fallback>"
    assert text_of(word(f"<mc:AlternateContent>{either}</mc:AlternateContent>{paragraph('end')}")) == "new\n\nend"


# --- letters


UP = '<w:vertAlign w:val="superscript"/>'


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        (letters("3 x 10") + letters("6", UP), "3 x 10^6"),
        (letters("10") + letters("-", UP) + letters("12", UP) + letters(" m"), "10^-12 m"),
        (letters("x") + letters("n + 1", UP), "x^(n + 1)"),
        (letters("the 1") + letters("st", UP) + letters(" day"), "the 1st day"),
        (letters("so*") + letters("*", UP), "so**"),
        (letters("H") + letters("2", '<w:vertAlign w:val="subscript"/>') + letters("O"), "H2O"),
        (letters("10") + letters("6", '<w:rStyle w:val="Up"/>') + letters("5"), "10^6 5"),
        (letters("10") + letters("6", '<w:position w:val="8"/>') + letters(" m"), "10^6 m"),
        (letters("101") + letters("2", '<w:vertAlign w:val="subscript"/>'), "101_2"),
        (letters("3") + letters("1", UP) + letters("/2"), "3 1/2"),
        (letters("80") + letters("100", "<w:strike/>"), "80"),
        (letters("80") + letters("100", '<w:strike w:val="0"/>'), "80100"),
    ],
)
def test_raised_letters_and_struck_ones_change_no_number(runs, text):
    styles = f'<w:style w:styleId="Base"><w:rPr>{UP}</w:rPr></w:style>'
    styles += '<w:style w:styleId="Up"><w:basedOn w:val="Base"/></w:style>'
    assert text_of(word(f"<w:p>{runs}</w:p>", styles=styles)) == text


def test_a_reading_stands_behind_its_word():
    ruby = f"<w:ruby><w:rt>{letters('かんじ')}</w:rt><w:rubyBase>{letters('漢字')}</w:rubyBase></w:ruby>"
    assert text_of(word(f"<w:p>{run(ruby)}{letters('を')}</w:p>")) == "漢字(かんじ)を"


def test_the_raised_sign_of_a_note_is_no_power():
    pointer = run('<w:footnoteReference w:id="2"/>', UP)
    note = f'<w:footnotes xmlns:w="{WORD}"><w:footnote w:id="2">{paragraph("See there.")}</w:footnote></w:footnotes>'
    body = f"<w:p>{letters('said')}{pointer}</w:p>"
    data = word(body, targets={"footnotes": "footnotes.xml"}, files={"word/footnotes.xml": note})
    assert text_of(data) == "said [note 1]\n\n[note 1] See there."


def test_rules_between_text_and_notes_are_no_notes():
    """Nor where something points at one, and whatever stands in it."""
    kinds = {0: "separator", 1: "continuationSeparator", 2: "continuationNotice", 3: "normal", 4: ""}
    each = "".join(
        f'<w:footnote w:id="{n}" w:type="{kind}">{paragraph(f"Note of {n}.")}</w:footnote>' for n, kind in kinds.items()
    ).replace(' w:type=""', "")
    notes = f'<w:footnotes xmlns:w="{WORD}">{each}</w:footnotes>'
    pointers = "".join(letters("said") + run(f'<w:footnoteReference w:id="{n}"/>', UP) for n in kinds)
    data = word(f"<w:p>{pointers}</w:p>", targets={"footnotes": "footnotes.xml"}, files={"word/footnotes.xml": notes})
    under = [line for line in text_of(data).split("\n") if "Note of" in line]
    assert [line.partition("] ")[2] for line in under] == ["Note of 3.", "Note of 4."]


def test_equations_keep_powers_fractions_and_brackets():
    def m(text: str) -> str:
        return f"<m:r><m:t>{text}</m:t></m:r>"

    power = f"<m:sSup><m:e>{m('c')}</m:e><m:sup>{m('2')}</m:sup></m:sSup>"
    fraction = f"<m:f><m:num>{m('1')}</m:num><m:den>{m('a+b')}</m:den></m:f>"
    fenced = f"<m:d><m:dPr><m:endChr m:val='['/></m:dPr><m:e>{m('x')}</m:e></m:d>"
    whole = f"<m:oMath>{m('E=m')}{power}{m(' or ')}{fraction}{fenced}</m:oMath>"
    assert text_of(word(f"<w:p>{letters('So ')}{whole}</w:p>")) == "So E=mc^2 or 1/(a+b)(x["


# --- numbers


def lvl(depth: int, form: str, text: str, start: int = 1, more: str = "") -> str:
    inner = f'<w:start w:val="{start}"/><w:numFmt w:val="{form}"/>{more}<w:lvlText w:val="{text}"/>'
    return f'<w:lvl w:ilvl="{depth}">{inner}</w:lvl>'


def numbered(paragraphs: str, lists: dict[int, str], nums: dict[int, tuple[int, str]], styles: str = "") -> bytes:
    """A DOCX whose lists are these levels; a number names its list and what it changes there."""
    held = "".join(f'<w:abstractNum w:abstractNumId="{key}">{levels}</w:abstractNum>' for key, levels in lists.items())
    held += "".join(
        f'<w:num w:numId="{key}"><w:abstractNumId w:val="{of}"/>{more}</w:num>' for key, (of, more) in nums.items()
    )
    numbering = f'<w:numbering xmlns:w="{WORD}">{held}</w:numbering>'
    return word(
        paragraphs, styles=styles, targets={"numbering": "numbering.xml"}, files={"word/numbering.xml": numbering}
    )


def entry(text: str, num: int, depth: int = 0, mark: str = "") -> str:
    place = f'<w:numPr><w:ilvl w:val="{depth}"/><w:numId w:val="{num}"/></w:numPr>'
    return f"<w:p><w:pPr>{place}<w:rPr>{mark}</w:rPr></w:pPr>{letters(text) if text else ''}</w:p>"


LEGAL = (
    lvl(0, "decimal", "%1.")
    + lvl(1, "decimal", "%1.%2")
    + lvl(2, "lowerLetter", "(%3)")
    + lvl(3, "upperRoman", "%4:", 3)
)
AGAIN = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="1"/></w:lvlOverride>'


@pytest.mark.parametrize(
    ("places", "leads"),
    [  # number of a list and depth of each paragraph, and what stands before it
        ("10 11 11 12 13 13 12 10 11 12", "1. 1.1 1.2 (a) III: IV: (b) 2. 2.1 (a)"),
        ("10 10 20 10 30 30 30", "1. 2. 3. 4. 1. 2. 3."),  # a second number of one list counts on, a third begins anew
        ("11 10 11", "1.1 2. 2.1"),  # a number that is named has been counted
        ("40 41 41 40 41", "I. I.A I.B II. II.C"),  # a level that never begins anew
        ("50 50 50", "08 09 10"),
        ("60 60", "第一条 第二条"),
        ("00 99 70", "  "),  # no list, one that is not there, and one that is not in the file
        ("80 80", "- -"),
    ],
)
def test_paragraphs_are_numbered_as_their_list_says(places, leads):
    own = lvl(0, "upperRoman", "%1.") + lvl(1, "upperLetter", "%1.%2", more='<w:lvlRestart w:val="0"/>')
    lists = {0: LEGAL, 1: own, 2: lvl(0, "decimalZero", "%1", 8)}
    lists |= {3: lvl(0, "chineseCounting", "第%1条"), 4: lvl(0, "bullet", "\uf0b7")}
    nums = {1: (0, ""), 2: (0, ""), 3: (0, AGAIN), 4: (1, ""), 5: (2, ""), 6: (3, ""), 7: (9, ""), 8: (4, "")}
    body = "".join(entry("x", int(num), int(depth)) for num, depth in map(list, places.split()))
    assert text_of(numbered(body, lists, nums)).split("\n\n") == [f"{lead} x".lstrip() for lead in leads.split(" ")]


def test_a_legal_level_has_digits_and_an_override_its_own_form():
    lists = {0: lvl(0, "upperRoman", "Article %1") + lvl(1, "decimal", "Section %1.%2", more="<w:isLgl/>")}
    over = f'<w:lvlOverride w:ilvl="0">{lvl(0, "lowerLetter", "%1)", 27)}</w:lvlOverride>'
    body = entry("a", 1) + entry("b", 1, 1) + entry("c", 2)
    assert text_of(numbered(body, lists, {1: (0, ""), 2: (0, over)})) == "Article I a\n\nSection 1.1 b\n\nb) c"
    body = entry("c", 2) + entry("d", 2)
    assert text_of(numbered(body, lists, {2: (0, over)})) == "aa) c\n\nbb) d"


def test_numbers_come_by_style_into_headings_cells_and_citations():
    levels = lvl(0, "decimal", "%1", more='<w:pStyle w:val="H1"/>') + lvl(
        1, "decimal", "%1.%2", more='<w:pStyle w:val="H2"/>'
    )
    linked = "<w:numStyleLink w:val='Clauses'/>"
    lists = {0: levels, 1: f"<w:styleLink w:val='Clauses'/>{LEGAL}", 2: linked}
    of_list = '<w:pPr><w:numPr><w:numId w:val="{}"/></w:numPr></w:pPr>'
    styles = "".join(
        f'<w:style w:styleId="{key}"><w:name w:val="{name}"/><w:basedOn w:val="{base}"/>'
        f"{of_list.format(num) * bool(num)}</w:style>"
        for key, name, base, num in (
            ("H1", "heading 1", "", 1),
            ("H2", "heading 2", "H1", 0),
            ("Clause", "Clause", "", 2),
            ("Own", "Own", "Clause", 0),
        )
    )
    cells = "".join(f"<w:tr><w:tc>{entry('', 2)}</w:tc><w:tc>{paragraph(t)}</w:tc></w:tr>" for t in "pq")
    body = paragraph("River", style="H1") + paragraph("Ice", style="H2") + paragraph("held", style="Own")
    body += f"<w:tbl>{cells}</w:tbl>" + paragraph("Bridge", style="H1") + paragraph("Bolts", style="H2")
    document = document_of(numbered(body, lists, {1: (0, ""), 2: (2, "")}, styles), "a.docx")
    assert [(s.label, s.text) for s in document.sections] == [
        ("1 River", "# 1 River"),
        ("1.1 Ice", "## 1.1 Ice\n\n1. held\n\n| 2. | p |\n| 3. | q |"),
        ("2 Bridge", "# 2 Bridge"),
        ("2.1 Bolts", "## 2.1 Bolts"),
    ]


def test_a_paragraph_that_is_deleted_is_not_counted():
    body = entry("a", 1) + entry("", 1, mark="<w:del/>") + entry("", 1, mark="<w:vanish/>") + entry("b", 1)
    assert text_of(numbered(body, {0: LEGAL}, {1: (0, "")})) == "1. a\n\n2. b"


def test_notes_are_counted_but_for_those_with_a_sign_of_their_own():
    def pointed(key: int, more: str = "", sign: str = "") -> str:
        return letters("in 1848") + run(f'<w:footnoteReference w:id="{key}" {more}/>{sign}', UP)

    each = "".join(f'<w:footnote w:id="{n}">{paragraph(f"Note of {n}.")}</w:footnote>' for n in (4, 5, 9))
    notes = f'<w:footnotes xmlns:w="{WORD}">{each}</w:footnotes>'
    signed = pointed(4, 'w:customMarkFollows="1"', "<w:t>*</w:t>")
    body = f"<w:p>{pointed(9)}{signed}{pointed(5)}</w:p>"
    data = word(body, targets={"footnotes": "footnotes.xml"}, files={"word/footnotes.xml": notes})
    assert text_of(data) == (
        "in 1848 [note 1]in 1848 [note]*in 1848 [note 2]\n\n"
        "[note 1] Note of 9.\n\n[note] Note of 4.\n\n[note 2] Note of 5."
    )


# --- headings


def style(key: str, name: str, based: str = "", level: str = "") -> str:
    outline = f'<w:pPr><w:outlineLvl w:val="{level}"/></w:pPr>' if level else ""
    return f'<w:style w:styleId="{key}"><w:name w:val="{name}"/><w:basedOn w:val="{based}"/>{outline}</w:style>'


STYLES = (
    style("H1", "heading 1")
    + style("Own", "Chapter", "H1")
    + style("Below", "Sub chapter", "Own", "1")
    + style("Toc", "TOC Heading", "H1", "9")
    + style("A", "a", "B")
    + style("B", "b", "A")
    + style("Title", "Title")
    + style("Subtitle", "Subtitle", "Title")
)


def test_styles_based_on_a_heading_are_headings():
    kinds = ("Own", "Below", "Toc", "A", "Subtitle", "H1")
    body = "".join(paragraph(f"{k}.", style=k) + paragraph("text") for k in kinds)
    document = document_of(word(body, styles=STYLES), "a.docx")
    assert [s.label for s in document.sections] == ["Own.", "Below.", "H1."]
    assert document.sections[1].text.startswith("## Below.\n\ntext\n\nToc.")


def test_a_paragraph_may_say_that_it_is_no_heading():
    plain = '<w:p><w:pPr><w:pStyle w:val="H1"/><w:outlineLvl w:val="9"/></w:pPr><w:r><w:t>no</w:t></w:r></w:p>'
    body = paragraph("One", style="H1") + plain + paragraph("Two", style="H1") + paragraph("b")
    assert [s.label for s in document_of(word(body, styles=STYLES), "a.docx").sections] == ["One", "Two"]


# --- archives


def test_a_picture_that_packs_well_is_no_bomb():
    data = word(paragraph("Words."), files={"word/media/white.bmp": "\xff" * 6_000_000})
    assert document_of(data, "a.docx").text == "Words.\n"


def test_a_bomb_is_called_one_in_a_part_that_is_read(monkeypatch):
    monkeypatch.setattr("kvcli.documents.archives.MAX_MEMBER", 1 << 20)
    with pytest.raises(BadInput) as caught:
        text_of(word(paragraph(" ".join(map(str, range(300_000))))))
    assert caught.value.code == "document_too_heavy"
