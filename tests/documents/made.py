"""PDF files written here, each with the text that stands on every page of it, as a reader should give it back."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pypdf import PdfWriter
from pypdf.generic import DictionaryObject, NameObject, StreamObject
from reportlab.lib.pagesizes import A4
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfgen import canvas

WIDTH, HEIGHT = A4
WORDS = (
    "river board freight bridge winter survey repair contract engine harbour valley measure gauge keeper depot signal "
    "timber gravel copper weather lantern channel cellar market season village account pressure station current "
    "northern shallow careful steady gradual certain ordinary distant annual narrow"
).split()


@dataclass
class Made:
    """A file and what is on its pages; an empty string is a page without text, None a blank one."""

    data: bytes
    pages: list[str | None]
    options: dict[str, Any] = field(default_factory=dict)  # for read_document
    title: str | None = None


def prose(rng: Random, n: int) -> str:
    """Sentences of n words in all."""
    words = [rng.choice(WORDS) for _ in range(n)]
    for i in range(0, n, 9):
        words[i] = words[i].capitalize()
        words[min(n - 1, i + 8)] += "."
    return " ".join(words)


def wrapped(text: str, font: str, size: float, width: float) -> list[str]:
    """Lines of at most that width in points."""
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if pdfmetrics.stringWidth(longer, font, size) > width and line:
            lines.append(line)
            longer = word
        line = longer
    return [*lines, line] if line else lines


class Sheet:
    """A canvas that remembers nothing of the text: what is expected is said beside it."""

    def __init__(self, font: str = "Helvetica", size: float = 11, **options: Any) -> None:
        self.out = io.BytesIO()
        self.canvas = canvas.Canvas(self.out, pagesize=A4, invariant=True, **options)
        self.font, self.size = font, size

    def lines(self, lines: Sequence[str], x: float = 60, y: float = 760, font: str = "", size: float = 0) -> float:
        """Draw lines below each other and return where the next would stand."""
        self.canvas.setFont(font or self.font, size or self.size)
        for line in lines:
            self.canvas.drawString(x, y, line)
            y -= 1.3 * (size or self.size)
        return y

    def page(self) -> None:
        self.canvas.showPage()

    def save(self) -> bytes:
        self.canvas.save()
        return self.out.getvalue()


def spelled(data: bytes, letters: dict[str, str]) -> bytes:
    """The same file, its fonts telling other letters for some: fonts of any script without a font file."""
    pairs = "".join(f"<{ord(a):02X}> <{b.encode('utf-16-be').hex().upper()}>\n" for a, b in letters.items())
    cmap = (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /T def /CMapType 2 def\n"
        "1 begincodespacerange <00> <FF> endcodespacerange\n"
        f"{len(letters)} beginbfchar\n{pairs}endbfchar\nendcmap CMapName currentdict /CMap defineresource pop end end"
    )
    writer = PdfWriter(clone_from=io.BytesIO(data))
    stream = StreamObject()
    stream.set_data(cmap.encode())
    told = writer._add_object(stream)
    for item in list(writer._objects):
        if isinstance(item, DictionaryObject) and item.get("/Type") == "/Font":
            item[NameObject("/ToUnicode")] = told
    return written(writer)


def written(writer: PdfWriter) -> bytes:
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def _body(rng: Random, sheet: Sheet, n: int = 120, **place: float) -> str:
    text = prose(rng, n)
    sheet.lines(wrapped(text, sheet.font, sheet.size, 470), **place)
    return text


def plain(rng: Random) -> Made:
    sheet, pages = Sheet(), []
    for _ in range(3):
        pages.append(_body(rng, sheet))
        sheet.page()
    return Made(sheet.save(), pages)


def fonts(rng: Random) -> Made:
    """Runs of several fonts and sizes on each line."""
    sheet, pages = Sheet(), []
    faces = ["Times-Roman", "Helvetica-Bold", "Courier", "Times-Italic"]
    for _ in range(2):
        words, y = [], 760
        for _ in range(12):
            text = sheet.canvas.beginText(60, y)
            for i, face in enumerate(faces):
                words += (run := prose(rng, 2)).split()
                text.setFont(face, 10 + i % 3)
                text.textOut(run + " ")
            sheet.canvas.drawText(text)
            y -= 18
        pages.append(" ".join(words))
        sheet.page()
    return Made(sheet.save(), pages)


def titled(rng: Random) -> Made:
    sheet = Sheet()
    sheet.canvas.setTitle("Annual report of the river board")
    text = _body(rng, sheet)
    return Made(sheet.save(), [text], title="Annual report of the river board")


def _columns(rng: Random, sheet: Sheet, n: int, top: float, across: bool) -> str:
    """Text in n columns, drawn column after column or line after line across the page."""
    width = 480 / n - 20
    texts = [prose(rng, 90) for _ in range(n)]
    lines = [wrapped(text, sheet.font, sheet.size, width) for text in texts]
    places = [(60 + 480 / n * i, top - 14 * j, line) for i, column in enumerate(lines) for j, line in enumerate(column)]
    sheet.canvas.setFont(sheet.font, sheet.size)
    for x, y, line in sorted(places, key=lambda p: (-p[1], p[0])) if across else places:
        sheet.canvas.drawString(x, y, line)
    return " ".join(texts)


def columns(n: int, across: bool, title: bool = False) -> Callable[[Random], Made]:
    def make(rng: Random) -> Made:
        sheet, pages = Sheet("Times-Roman", 10), []
        for _ in range(2):
            head = ["A full account of the northern channel and of what was found along it in the annual survey"]
            sheet.lines(head if title else [], y=790, size=12)
            text = _columns(rng, sheet, n, 750, across)
            foot = ["Printed for the board: this line runs below all columns and belongs to none of them, being a note"]
            sheet.lines(foot if title else [], y=200)
            pages.append(" ".join([*head, text, *foot]) if title else text)
            sheet.page()
        return Made(sheet.save(), pages)

    return make


def running(rng: Random) -> Made:
    """Headers that differ on left and right pages, footers with page numbers, Roman ones first."""
    sheet, pages = Sheet(), []
    for i in range(1, 13):
        sheet.lines(["Chapter of Rivers" if i % 2 else "The Annual Report"], y=815, size=9)
        number = ["i", "ii", "iii", "iv"][i - 1] if i < 5 else str(i - 4)
        sheet.lines([number], x=WIDTH / 2, y=30, size=9)
        pages.append(_body(rng, sheet))
        sheet.page()
    return Made(sheet.save(), pages)


def numbered(rng: Random) -> Made:
    """A footer of several parts, drawn before the text."""
    sheet, pages = Sheet(), []
    for i in range(1, 8):
        sheet.lines(["River board"], y=30, size=8)
        sheet.lines([f"Page {i} of 7"], x=480, y=30, size=8)
        pages.append(_body(rng, sheet))
        sheet.page()
    return Made(sheet.save(), pages)


def alike(rng: Random) -> Made:
    """First lines that are alike but for their numbers, and are the text itself."""
    sheet, pages = Sheet(), []
    for i in range(1, 9):
        first = f"Finding {rng.randrange(100, 999)}: the gauge read {rng.randrange(10, 99)} bar."
        rest = prose(rng, 60)
        y = sheet.lines([first])
        sheet.lines(wrapped(rest, sheet.font, sheet.size, 470), y=y)
        pages.append(f"{first} {rest}")
        sheet.lines([f"{i}"], x=300, y=30)
        sheet.page()
    return Made(sheet.save(), pages)


def footnotes(rng: Random) -> Made:
    sheet, pages = Sheet("Times-Roman"), []
    for i in range(1, 4):
        text = prose(rng, 100)
        y = sheet.lines(wrapped(text, sheet.font, sheet.size, 470))
        note = f"{i} See the survey of the {rng.choice(WORDS)}, volume {rng.randrange(2, 40)}."
        sheet.canvas.line(60, 130, 200, 130)
        sheet.lines([note], y=115, size=8)
        pages.append(f"{text} {note}")
        assert y > 200
        sheet.page()
    return Made(sheet.save(), pages)


def hyphenated(rng: Random) -> Made:
    """Breaks inside words, and at hyphens that belong to them."""
    sheet = Sheet()
    lines = [
        "The well-known keeper wrote of long-term repairs and of the infor-",
        "mation that the northern survey had gathered. A well-",
        "known engine, a careful meas-",
        "urement, and in 2019-",
        "2020 the Anglo-",
        "Saxon bridge; long-",
        "term contracts (state-of-the-",
        "art pressure sig-",
        "nals), every contract and measurement.",
    ]
    sheet.lines(lines)
    text = (
        "The well-known keeper wrote of long-term repairs and of the information that the northern survey had "
        "gathered. A well-known engine, a careful measurement, and in 2019-2020 the Anglo-Saxon bridge; long-term "
        "contracts (state-of-the-art pressure signals), every contract and measurement. The state of the art is known."
    )
    sheet.lines(["The state of the art is known."], y=560)
    return Made(sheet.save(), [text])


def soft_hyphens(rng: Random) -> Made:
    sheet = Sheet()
    sheet.lines(["The har~bour of the north was sur~veyed and meas~", "ured in the win~ter."])
    data = spelled(sheet.save(), {"~": "\u00ad"})
    return Made(data, ["The harbour of the north was surveyed and measured in the winter."])


def ligatures(rng: Random) -> Made:
    sheet = Sheet()
    sheet.lines(["The e$cient o%ce &nds the *oating st+e of an a#able sta#."])
    data = spelled(
        sheet.save(), {"$": "\ufb03", "%": "\ufb03", "&": "\ufb01", "*": "\ufb02", "#": "\ufb00", "+": "\ufb06"}
    )
    return Made(data, ["The efficient office finds the floating stste of an affable staff."])


def turned(angle: int, upright: bool) -> Callable[[Random], Made]:
    """Pages with /Rotate; upright ones have their text turned the other way, as a landscape page of a scan has."""

    def make(rng: Random) -> Made:
        sheet, pages = Sheet(), []
        for _ in range(2):
            sheet.canvas.setPageRotation(angle)
            sheet.canvas.saveState()
            if upright:
                sheet.canvas.translate(WIDTH / 2, HEIGHT / 2)
                sheet.canvas.rotate(angle)
                sheet.canvas.translate(-WIDTH / 2, -HEIGHT / 2)
            text = prose(rng, 60)
            sheet.lines(wrapped(text, sheet.font, sheet.size, 330), x=140, y=560)
            pages.append(text)
            sheet.canvas.restoreState()
            sheet.page()
        return Made(sheet.save(), pages)

    return make


def stamped(rng: Random) -> Made:
    """A line along the margin, turned by a quarter."""
    sheet = Sheet()
    sheet.canvas.saveState()
    sheet.canvas.rotate(90)
    sheet.lines(["Received by the board on the second day"], x=250, y=-30)
    sheet.canvas.restoreState()
    text = _body(rng, sheet)
    return Made(sheet.save(), [f"{text} Received by the board on the second day"])


def form(rng: Random) -> Made:
    sheet = Sheet()
    sheet.lines(["Application of a keeper", "Name", "Depot"])
    fields = sheet.canvas.acroForm
    fields.textfield(name="name", tooltip="Name", value="Wemus Brethak", x=150, y=735, width=200, height=16)
    fields.choice(
        name="depot", tooltip="Depot", value="Gimness", options=["Gimness", "Brunby"], x=150, y=715, width=90, height=16
    )
    fields.checkbox(name="paid", tooltip="Paid", checked=True, x=150, y=690, size=14)
    fields.checkbox(name="late", tooltip="Late", checked=False, x=150, y=660, size=14)
    fields.textfield(name="empty", tooltip="Empty", value="", x=150, y=630, width=200, height=16)
    text = "Application of a keeper Name Depot Name: Wemus Brethak Depot: Gimness Paid: yes"
    return Made(sheet.save(), [text])


def scripts(rng: Random) -> Made:
    """Greek and Cyrillic letters, accents made of two signs, and what lies beyond the first plane."""
    sheet = Sheet()
    sheet.lines(["abc def", "ghi jkl", "e~ u^ end", "!x"])
    greek = dict(zip("abcdefghijkl", "αβγδεζжийшлд", strict=True))
    data = spelled(sheet.save(), greek | {"~": "\u0301", "^": "\u0308", "!": "\U0001d11e"})
    return Made(data, ["αβγ δεζ жий шлд ε\u0301 ü εnδ \U0001d11ex".replace("ε\u0301", "έ")])


def chinese(rng: Random) -> Made:
    pdfmetrics.registerFont(UnicodeCIDFont("STSong-Light"))
    sheet = Sheet("STSong-Light")
    sheet.lines(["河流委员会的年度报告", "北方的桥梁在冬季修复。"])
    return Made(sheet.save(), ["河流委员会的年度报告 北方的桥梁在冬季修复。"])


HEBREW = {chr(ord("a") + i): chr(0x05D0 + i) for i in range(26)}


def right_to_left(rng: Random) -> Made:
    """Hebrew letters, drawn from left to right as a page shows them, each line from the right margin."""
    sheet, lines = Sheet("Courier"), []
    for y in range(760, 640, -20):
        words = ["".join(rng.choice("abcdefghijklmno") for _ in range(rng.randrange(2, 7))) for _ in range(6)]
        lines.append(" ".join("".join(HEBREW[c] for c in word) for word in words))
        sheet.canvas.setFont("Courier", 12)
        sheet.canvas.drawRightString(530, y, " ".join(words)[::-1])
    return Made(spelled(sheet.save(), HEBREW), [" ".join(lines)])


def encrypted(user: str, owner: str, algorithm: str) -> Callable[[Random], Made]:
    def make(rng: Random) -> Made:
        sheet = Sheet()
        text = _body(rng, sheet)
        writer = PdfWriter(clone_from=io.BytesIO(sheet.save()))
        writer.encrypt(user, owner, algorithm=algorithm)
        return Made(written(writer), [text], {"password": user} if user else {})

    return make


def partly_scanned(rng: Random) -> Made:
    """Pages 2 and 4 are pictures, page 5 is blank."""
    sheet, pages = Sheet(), []
    for i in range(1, 7):
        if i in (2, 4):
            sheet.canvas.drawInlineImage(picture(), 60, 400, 400, 300)
        pages.append("" if i in (2, 4) else None if i == 5 else _body(rng, sheet))
        sheet.page()
    return Made(sheet.save(), pages)


def picture() -> Any:
    from PIL import Image

    return Image.frombytes("L", (40, 30), bytes(Random(7).randrange(256) for _ in range(1200)))


def scanned(rng: Random) -> bytes:
    """Nothing but pictures."""
    sheet = Sheet()
    for _ in range(3):
        sheet.canvas.drawInlineImage(picture(), 60, 400, 400, 300)
        sheet.page()
    return sheet.save()


def table(rng: Random) -> Made:
    """Cells stay in their rows."""
    sheet, rows = Sheet(), []
    for i in range(12):
        cells = [rng.choice(WORDS), f"{rng.randrange(100, 999)}", f"{rng.randrange(10, 99)} %"]
        rows += cells
        for x, cell in zip((60, 250, 420), cells, strict=True):
            sheet.lines([cell], x=x, y=760 - 16 * i)
    return Made(sheet.save(), [" ".join(rows)])


def upside_down(rng: Random) -> Made:
    """Lines drawn from the bottom of the page to its top."""
    sheet = Sheet()
    text = prose(rng, 120)
    lines = wrapped(text, sheet.font, sheet.size, 470)
    for i in reversed(range(len(lines))):
        sheet.lines([lines[i]], y=760 - 15 * i)
    return Made(sheet.save(), [text])


def justified(rng: Random) -> Made:
    """Paragraphs as a typesetting program sets them: words spread over the line, by spaces of many widths."""
    from reportlab.lib.styles import ParagraphStyle
    from reportlab.platypus import PageBreak, Paragraph, SimpleDocTemplate, Spacer

    style = ParagraphStyle("j", fontName="Times-Roman", fontSize=11, leading=14, alignment=4, firstLineIndent=14)
    out, pages, flow = io.BytesIO(), [], []
    for _ in range(2):
        texts = [prose(rng, 70) for _ in range(4)]
        for text in texts:
            flow += [Paragraph(text, style), Spacer(1, 8)]
        flow.append(PageBreak())
        pages.append(" ".join(texts))
    SimpleDocTemplate(out, pagesize=A4, invariant=True).build(flow)
    return Made(out.getvalue(), pages)


def spaced(rng: Random) -> Made:
    """Letters set apart, and words placed one by one."""
    sheet = Sheet()
    text = sheet.canvas.beginText(60, 760)
    text.setFont("Helvetica", 11)
    text.setCharSpace(1.5)
    text.textLine("The annual survey of the river")
    text.setCharSpace(0)
    sheet.canvas.drawText(text)
    x = 60.0
    words = prose(rng, 10).split()
    for word in words:
        sheet.lines([word], x=x, y=730)
        x += pdfmetrics.stringWidth(word, sheet.font, sheet.size) + 3
    return Made(sheet.save(), [" ".join(["The annual survey of the river", *words])])


def forged(rng: Random) -> Made:
    """A page that spells the mark of another."""
    sheet = Sheet()
    sheet.lines(["The first page says:", "[p. 2]", "and goes on."])
    sheet.page()
    sheet.lines(["The second page."])
    return Made(sheet.save(), ["The first page says: (p. 2) and goes on.", "The second page."])


CASES: dict[str, Callable[[Random], Made]] = {
    "plain": plain,
    "fonts": fonts,
    "title": titled,
    "two columns": columns(2, across=False),
    "two columns, drawn across": columns(2, across=True),
    "three columns, drawn across": columns(3, across=True),
    "columns under a title": columns(2, across=True, title=True),
    "headers left and right": running,
    "footers with numbers": numbered,
    "text that looks like a header": alike,
    "footnotes": footnotes,
    "hyphens": hyphenated,
    "soft hyphens": soft_hyphens,
    "ligatures": ligatures,
    "turned 90, text upright": turned(90, upright=True),
    "turned 180, text upright": turned(180, upright=True),
    "turned 270, text upright": turned(270, upright=True),
    "turned 90, text sideways": turned(90, upright=False),
    "stamp along the margin": stamped,
    "form": form,
    "scripts": scripts,
    "chinese": chinese,
    "right to left": right_to_left,
    "user password, RC4": encrypted("river", "board", "RC4-128"),
    "owner password only": encrypted("", "board", "RC4-128"),
    "partly scanned": partly_scanned,
    "table": table,
    "drawn upside down": upside_down,
    "justified": justified,
    "spaced": spaced,
    "forged marks": forged,
}


def many_pages(n: int, seed: int = 5) -> Made:
    """A long report with a header, a footer and some forty lines a page."""
    rng, sheet, pages = Random(seed), Sheet("Times-Roman", 10), []
    for i in range(1, n + 1):
        sheet.lines(["Annual report of the river board"], y=815, size=8)
        sheet.lines([f"Page {i} of {n}"], x=280, y=25, size=8)
        texts = [prose(rng, 100) for _ in range(5)]
        y = 780.0
        for text in texts:
            y = sheet.lines(wrapped(text, sheet.font, sheet.size, 475), y=y) - 8
        pages.append(" ".join(texts))
        sheet.page()
    return Made(sheet.save(), pages)


def every() -> Iterator[tuple[str, Made]]:
    for name, make in CASES.items():
        yield name, make(Random(11))
