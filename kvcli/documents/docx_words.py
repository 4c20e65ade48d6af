"""Words of a DOCX with all tracked changes accepted: paragraphs, tables, text boxes, equations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from kvcli.documents.docx_parts import MATH, is_on, tags, value
from kvcli.documents.docx_sheet import BULLET, NOTES, Sheet
from kvcli.documents.superscripts import apart, grouped

PARAGRAPH, TABLE, ROW, CELL, RUN = tags("p"), tags("tbl"), tags("tr"), tags("tc"), tags("r")
# deleted text, moved text at its old position, and the second copy of a drawing for older programs
SKIPPED = tags("del", "moveFrom") | {"{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"}
HIDING = ("vanish", "strike", "dstrike")  # some authors delete text by striking it out
BOX = tags("txbxContent")
LETTERS = tags("t") | tags("t", spaces=MATH)
SIGNS = {
    tag: sign
    for name, sign in (("tab", " "), ("br", "\n"), ("cr", "\n"), ("noBreakHyphen", "-"), ("softHyphen", ""))
    for tag in tags(name)
}
POINTERS = {tag: NOTES[name] for name in NOTES for tag in tags(f"{name}Reference")}
POWER, FRACTION, FENCED, ROOT = (tags(name, spaces=MATH) for name in ("sup", "f", "d", "rad"))
SCRIPTED = tags("sSup", "sSubSup", spaces=MATH)
RUBY, BASE, READING = tags("ruby"), tags("rubyBase"), tags("rt")


def nearest(holder: Any, wanted: frozenset[str]) -> Iterator[Any]:
    """Yield elements of these names in order at any depth, but none inside another one or in a skipped element."""
    todo = list(reversed(holder))
    while todo:
        element = todo.pop()
        if element.tag in wanted:
            yield element
        elif element.tag not in SKIPPED:
            todo.extend(reversed(element))


def words(paragraph: Any, sheet: Sheet) -> str:
    """Return the text of a paragraph after its number, then the text of boxes anchored in it."""
    letters: list[tuple[str, str]] = []  # (height, text) pairs
    boxes: list[Any] = []
    todo = [(element, "") for element in reversed(paragraph)]
    while todo:
        element, height = todo.pop()
        if element.tag in SKIPPED or _is_hidden(element):
            continue
        if element.tag in LETTERS:
            letters.append((height, element.text or ""))
        elif element.tag in SIGNS:
            letters.append((height, SIGNS[element.tag]))
        elif element.tag in BOX:
            boxes.append(element)
        elif element.tag in POINTERS:
            letters.append(("", f" [{sheet.note(element, POINTERS[element.tag])}]"))
        elif (equation := _equation(element, sheet)) is not None:
            letters.append(("", equation))
        else:
            if element.tag in RUN and not any(child.tag in POINTERS for child in element):
                height = height or sheet.height(element)
            todo.extend((child, height) for child in reversed(element))
    runs = [("", ""), *((h, "".join(text for _, text in run)) for h, run in groupby(letters, lambda pair: pair[0]))]
    text = ""
    for (_, before), (height, run), (_, after) in zip(runs, runs[1:], [*runs[2:], ("", "")], strict=False):
        text += apart(run, before, after, is_below=height == "subscript") if height else run
    if paragraph.tag in PARAGRAPH and (text.strip() or not _is_gone(paragraph)):
        lead = sheet.lead(paragraph)
        text = f"{lead}{text}" if text.strip() or lead.strip() != BULLET else text
    return "\n".join([text, *filter(str.strip, (words(p, sheet) for box in boxes for p in nearest(box, PARAGRAPH)))])


def table(element: Any, sheet: Sheet) -> str:
    """Return one line per table row; a table within a cell is part of the cell's text."""
    lines = []
    for row in nearest(element, ROW):
        cells = [" ".join(inside(cell, sheet).split()) for cell in nearest(row, CELL)]
        if any(cells):
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def inside(holder: Any, sheet: Sheet) -> str:
    """Return the words of all paragraphs in a cell or a note."""
    return " ".join(words(p, sheet) for p in nearest(holder, PARAGRAPH))


def _equation(element: Any, sheet: Sheet) -> str | None:
    """Return a part of an equation or a reading aid as text, with a sign for its layout; None for other elements."""
    if element.tag in FRACTION:
        return "/".join(grouped(words(part, sheet)) for part in element if part.tag.endswith(("}num", "}den")))
    if element.tag in FENCED:
        return _fence(element, "begChr", "(") + words(element, sheet) + _fence(element, "endChr", ")")
    if element.tag in ROOT:
        return "√" + grouped(words(element, sheet))
    if element.tag in RUBY:
        base, reading = (" ".join(words(e, sheet) for e in element if e.tag in names) for names in (BASE, READING))
        return f"{base}({reading})" if reading.strip() else base
    if element.tag in POWER and element.getparent().tag in SCRIPTED:
        return f"^{grouped(words(element, sheet))}"
    return None


def _fence(element: Any, name: str, usual: str) -> str:
    said = value(element, "dPr", name)
    return usual if said is None else said


def _is_hidden(element: Any) -> bool:
    return element.tag in RUN and any(is_on(element, "rPr", name) for name in HIDING)


def _is_gone(paragraph: Any) -> bool:
    """True if the end of a paragraph is deleted, moved away or hidden."""
    return any(is_on(paragraph, "pPr", "rPr", name) for name in ("del", "moveFrom", "vanish"))
