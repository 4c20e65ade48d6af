"""DOCX: the text under each heading; tables row by row, notes after the section that points at them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from typing import IO, Any

import docx
from docx.oxml.ns import qn
from docx.oxml.parser import parse_xml
from lxml import etree

from kvcli.documents.parsed import Job, Parsed, damaged, no_text, refuse_pages, refuse_too_much
from kvcli.documents.plain import sections_of
from kvcli.documents.repair import clean, unmarked
from kvcli.documents.zipped import member, open_zip

NOTES = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/"
KINDS = {"footnote": "note", "endnote": "endnote"}
# deleted text, text moved away, and the second copy of a drawing for older programs
SKIPPED = {qn("w:del"), qn("w:moveFrom"), "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"}
BOX = qn("w:txbxContent")
SIGNS = {qn("w:tab"): " ", qn("w:br"): "\n", qn("w:cr"): "\n", qn("w:noBreakHyphen"): "-", qn("w:softHyphen"): ""}


def read(file: IO[bytes], job: Job) -> Parsed:
    """Sections under headings, or blocks of lines where there are none. Page numbers are not in the file."""
    refuse_pages(job.name, job.spans, "it is a DOCX, whose pages are made by the program that prints it")
    with open_zip(file, job.name) as archive:
        _refuse_dtd(archive, job.name)
    file.seek(0)
    try:
        document = docx.Document(file)
        headed = _headed(document)
        title = clean(" ".join((document.core_properties.title or "").split())) or None
    except Exception as error:  # the library trusts its input: what is missing in it shows as errors of every kind
        raise damaged(job.name, "a DOCX", f"{type(error).__name__}: {error}"[:200]) from None
    if not headed:
        raise no_text(job.name, "there are only pictures or empty paragraphs in it")
    refuse_too_much(job.name, sum(len(body) for _, body in headed), len(headed))
    unit, sections = sections_of(headed)
    return Parsed("docx", unit, sections, title=title)


def _refuse_dtd(archive: zipfile.ZipFile, name: str) -> None:
    """The format knows no document types, and entities are declared nowhere else."""
    for path in archive.namelist():
        is_xml = path.endswith((".xml", ".rels"))
        if is_xml and b"<!DOCTYPE" in member(archive, path, name)[:4096].replace(b"\0", b""):
            raise damaged(name, "a DOCX", "it declares a document type, which can be made to fill memory")


def _headed(document: Any) -> list[tuple[str, str]]:
    notes = _notes(document.part)
    levels = _levels(document)
    parts: list[tuple[str, list[str], list[str]]] = [("", [], [])]
    for block in _blocks(document.element.body):
        pointed: list[str] = []
        if block.tag == qn("w:tbl"):
            text = _table(block, pointed)
        else:
            text = _words(block, pointed)
            level = levels.get(_style(block), _outline(block))
            if level and text.strip():
                parts.append((" ".join(text.split()), [], []))
                text = f"{'#' * level} {' '.join(text.split())}"
        if text.strip():
            parts[-1][1].append(text.strip("\n"))
        parts[-1][2].extend(f"[{key}] {notes[key]}" for key in pointed if notes.get(key))
    found = []
    for heading, paragraphs, under in parts:
        lines = [clean(line.rstrip()).rstrip("\u00ad") for p in [*paragraphs, *under] for line in [*p.split("\n"), ""]]
        if body := "\n".join(lines).strip("\n"):
            found.append((heading, unmarked(body)))
    return found


def _blocks(parent: Any) -> Iterator[Any]:
    """Paragraphs and tables in order, those inside content controls and insertions too."""
    for child in parent:
        if child.tag in (qn("w:p"), qn("w:tbl")):
            yield child
        elif child.tag in (qn("w:sdt"), qn("w:sdtContent"), qn("w:ins"), qn("w:moveTo"), qn("w:customXml")):
            yield from _blocks(child)


def _words(paragraph: Any, pointed: list[str]) -> str:
    """The text of a paragraph as it stands after all changes, then that of boxes anchored in it."""
    letters: list[str] = []
    boxes: list[Any] = []
    todo = list(reversed(paragraph))
    while todo:
        element = todo.pop()
        if element.tag in SKIPPED or _is_hidden(element):
            continue
        if element.tag == qn("w:t"):
            letters.append(element.text or "")
        elif element.tag in SIGNS:
            letters.append(SIGNS[element.tag])
        elif element.tag == BOX:
            boxes.append(element)
        elif element.tag in (qn("w:footnoteReference"), qn("w:endnoteReference")):
            key = f"{KINDS[etree.QName(element).localname.removesuffix('Reference')]} {element.get(qn('w:id'))}"
            pointed.append(key)
            letters.append(f" [{key}]")
        else:
            todo.extend(reversed(element))
    inner = [_words(p, pointed) for box in boxes for p in box.iter(qn("w:p"))]
    return "\n".join(["".join(letters), *filter(str.strip, inner)])


def _is_hidden(element: Any) -> bool:
    if element.tag != qn("w:r"):
        return False
    properties = element.find(qn("w:rPr"))
    vanish = None if properties is None else properties.find(qn("w:vanish"))
    return vanish is not None and vanish.get(qn("w:val"), "true") not in ("0", "false", "off")


def _table(table: Any, pointed: list[str]) -> str:
    """A line a row; a table within a cell is part of the cell's text."""
    lines = []
    for row in table.iter(qn("w:tr")):
        if next(row.iterancestors(qn("w:tbl"))) is not table:
            continue
        cells = []
        for cell in row.iter(qn("w:tc")):
            if next(cell.iterancestors(qn("w:tr"))) is row:
                words = [_words(p, pointed) for p in cell.iter(qn("w:p"))]
                cells.append(" ".join(" ".join(words).split()))
        if any(cells):
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _levels(document: Any) -> dict[str, int]:
    """Heading styles by their id; the names are English in the file, whatever the language of the program."""
    levels = {}
    for style in document.styles.element.iter(qn("w:style")):
        name = style.find(qn("w:name"))
        words = ("" if name is None else name.get(qn("w:val"), "")).casefold().split()
        if words == ["title"]:
            levels[style.get(qn("w:styleId"))] = 1
        elif len(words) == 2 and words[0] == "heading" and words[1].isdecimal():
            levels[style.get(qn("w:styleId"))] = max(1, min(6, int(words[1])))
        elif level := _outline(style):
            levels[style.get(qn("w:styleId"))] = level
    return levels


def _outline(element: Any) -> int | None:
    found = next((e for p in element.findall(qn("w:pPr")) for e in p.findall(qn("w:outlineLvl"))), None)
    value = "" if found is None else found.get(qn("w:val"), "")
    return min(6, int(value) + 1) if value.isdecimal() and int(value) < 9 else None


def _style(paragraph: Any) -> str:
    found = next((e for p in paragraph.findall(qn("w:pPr")) for e in p.findall(qn("w:pStyle"))), None)
    return "" if found is None else str(found.get(qn("w:val"), ""))


def _notes(part: Any) -> dict[str, str]:
    """Footnotes and endnotes by what points at them."""
    notes = {}
    for relation in part.rels.values():
        kind = relation.reltype.removeprefix(NOTES).removesuffix("s")
        if relation.is_external or not relation.reltype.startswith(NOTES) or kind not in KINDS:
            continue
        try:
            root = parse_xml(relation.target_part.blob)
        except etree.XMLSyntaxError:
            continue  # the text itself can be read
        for note in root.findall(qn(f"w:{kind}")):
            words = " ".join(" ".join(_words(p, []) for p in note.iter(qn("w:p"))).split())
            if words and note.get(qn("w:type")) is None:
                notes[f"{KINDS[kind]} {note.get(qn('w:id'))}"] = words
    return notes
