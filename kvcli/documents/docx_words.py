"""The words of a DOCX as they stand after all changes: paragraphs, tables, boxes, equations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import groupby
from typing import Any

from kvcli.documents.raised import grouped, raised

SPACES = (
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "http://purl.oclc.org/ooxml/wordprocessingml/main",  # of the strict form
)
MATH = (
    "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "http://purl.oclc.org/ooxml/officeDocument/math",
)


@cache
def tags(*names: str, spaces: tuple[str, ...] = SPACES) -> frozenset[str]:
    """The names with each of their namespaces."""
    return frozenset(f"{{{space}}}{name}" for space in spaces for name in names)


PARAGRAPH, TABLE, ROW, CELL, RUN = tags("p"), tags("tbl"), tags("tr"), tags("tc"), tags("r")
# deleted text, text moved away, and the second copy of a drawing for older programs
SKIPPED = tags("del", "moveFrom") | {"{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"}
HIDING = ("vanish", "strike", "dstrike")  # struck out is how text is deleted by hand
BOX = tags("txbxContent")
LETTERS = tags("t") | tags("t", spaces=MATH)
SIGNS = {
    tag: sign
    for name, sign in (("tab", " "), ("br", "\n"), ("cr", "\n"), ("noBreakHyphen", "-"), ("softHyphen", ""))
    for tag in tags(name)
}
KINDS = {"footnoteReference": "note", "endnoteReference": "endnote"}
POINTERS = {tag: KINDS[name] for name in KINDS for tag in tags(name)}
POWER, FRACTION, FENCED, ROOT = (tags(name, spaces=MATH) for name in ("sup", "f", "d", "rad"))
FENCES = tags("dPr", spaces=MATH)
SCRIPTED = tags("sSup", "sSubSup", spaces=MATH)


def nearest(holder: Any, wanted: frozenset[str]) -> Iterator[Any]:
    """Elements of these names in order, at any depth below, but none inside another or in what is skipped."""
    todo = list(reversed(holder))
    while todo:
        element = todo.pop()
        if element.tag in wanted:
            yield element
        elif element.tag not in SKIPPED:
            todo.extend(reversed(element))


def value(element: Any, *path: str) -> str | None:
    """The `w:val` at the end of a path of first children; "" where it is not said, None where the path ends before."""
    for name in path:
        names = tags(name)
        element = next((child for child in element if child.tag in names), None)
        if element is None:
            return None
    return attribute(element, "val")


def attribute(element: Any, name: str) -> str:
    """An attribute by its name, in whichever namespace."""
    return next((str(v) for key, v in element.items() if key.rpartition("}")[2] == name), "")


def words(paragraph: Any, pointed: list[str]) -> str:
    """The text of a paragraph, then that of boxes anchored in it. The notes it points at are added to `pointed`."""
    letters: list[tuple[bool, str]] = []  # whether they are raised
    boxes: list[Any] = []
    todo = [(element, False) for element in reversed(paragraph)]
    while todo:
        element, up = todo.pop()
        if element.tag in SKIPPED or _is_hidden(element):
            continue
        if element.tag in LETTERS:
            letters.append((up, element.text or ""))
        elif element.tag in SIGNS:
            letters.append((up, SIGNS[element.tag]))
        elif element.tag in BOX:
            boxes.append(element)
        elif element.tag in POINTERS:
            pointed.append(f"{POINTERS[element.tag]} {attribute(element, 'id')}")
            letters.append((False, f" [{pointed[-1]}]"))
        elif (equation := _equation(element, pointed)) is not None:
            letters.append((False, equation))
        else:
            up = up or _is_raised(element)
            todo.extend((child, up) for child in reversed(element))
    inner = [words(p, pointed) for box in boxes for p in nearest(box, PARAGRAPH)]
    runs = (("".join(text for _, text in run), up) for up, run in groupby(letters, key=lambda pair: pair[0]))
    return "\n".join(["".join(raised(text) if up else text for text, up in runs), *filter(str.strip, inner)])


def table(element: Any, pointed: list[str]) -> str:
    """A line a row; a table within a cell is part of the cell's text."""
    lines = []
    for row in nearest(element, ROW):
        cells = [" ".join(inside(cell, pointed).split()) for cell in nearest(row, CELL)]
        if any(cells):
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def inside(holder: Any, pointed: list[str]) -> str:
    """The words of all paragraphs in a cell or a note."""
    return " ".join(words(p, pointed) for p in nearest(holder, PARAGRAPH))


def _equation(element: Any, pointed: list[str]) -> str | None:
    """The parts of an equation whose place on the paper carries meaning, with a sign for it; None for all else."""
    if element.tag in FRACTION:
        return "/".join(grouped(words(part, pointed)) for part in element if part.tag.endswith(("}num", "}den")))
    if element.tag in FENCED:
        return _fence(element, "begChr", "(") + words(element, pointed) + _fence(element, "endChr", ")")
    if element.tag in ROOT:
        return "√" + grouped(words(element, pointed))
    if element.tag in POWER and element.getparent().tag in SCRIPTED:
        return f"^{grouped(words(element, pointed))}"
    return None


def _fence(element: Any, name: str, usual: str) -> str:
    said = (sign for part in element if part.tag in FENCES for sign in part if sign.tag in tags(name, spaces=MATH))
    found = next(said, None)
    return usual if found is None else attribute(found, "val")


def _is_hidden(element: Any) -> bool:
    if element.tag not in RUN:
        return False
    said = [value(element, "rPr", name) for name in HIDING]
    return any(v is not None and v not in ("0", "false", "off") for v in said)


def _is_raised(element: Any) -> bool:
    """Whether it is a run above the line, and not the sign of a note."""
    if element.tag not in RUN or value(element, "rPr", "vertAlign") != "superscript":
        return False
    return not any(child.tag in POINTERS for child in element)
