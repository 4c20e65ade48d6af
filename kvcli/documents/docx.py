"""DOCX: the text under each heading; tables row by row, notes after the section that points at them."""

from __future__ import annotations

from typing import IO

from kvcli.documents.docx_parts import Parts, attribute, tags
from kvcli.documents.docx_sheet import BULLET, NOTES, Sheet
from kvcli.documents.docx_words import PARAGRAPH, TABLE, inside, nearest, table, words
from kvcli.documents.parsed import Job, Parsed, damaged, no_text, refuse_pages, refuse_too_much
from kvcli.documents.plain import sections_of
from kvcli.documents.repair import clean, unmarked
from kvcli.documents.zipped import open_zip


def read(file: IO[bytes], job: Job) -> Parsed:
    """Sections under headings, or blocks of lines where there are none. Page numbers are not in the file."""
    refuse_pages(job.name, job.spans, "it is a DOCX, whose pages are made by the program that prints it")
    with open_zip(file, job.name) as archive:
        parts = Parts(archive, job.name)
        headed = _headed(parts, job.name)
        title = _title(parts)
    if not headed:
        raise no_text(job.name, "there are only pictures or empty paragraphs in it")
    refuse_too_much(job.name, sum(len(body) for _, body in headed), len(headed), paged=False)
    unit, sections = sections_of(headed)
    return Parsed("docx", unit, sections, title=title)


def _headed(parts: Parts, name: str) -> list[tuple[str, str]]:
    main = parts.main()
    body = next((child for child in parts.tree(main) if child.tag in tags("body")), None)
    if body is None:
        raise damaged(name, "a DOCX", f"there is no text in {main[:80]!r}")
    sheet = Sheet(parts, main)
    notes = _notes(parts, main, sheet)
    found: list[tuple[str, list[str], list[str]]] = [("", [], [])]
    for block in nearest(body, PARAGRAPH | TABLE):
        if block.tag in TABLE:
            text = table(block, sheet)
        else:
            text = words(block, sheet)
            level = sheet.level(block)
            if level and text.strip():
                found.append((" ".join(text.split()).removeprefix(f"{BULLET} "), [], []))
                text = f"{'#' * level} {found[-1][0]}"
        if text.strip():
            found[-1][1].append(text.strip("\n"))
        found[-1][2].extend(f"[{called}] {notes[key]}" for key, called in sheet.pointed if notes.get(key))
        sheet.pointed.clear()
    return [(heading, text) for heading, blocks, under in found if (text := _joined([*blocks, *under]))]


def _joined(blocks: list[str]) -> str:
    lines = [clean(line.rstrip()).rstrip("\u00ad") for block in blocks for line in [*block.split("\n"), ""]]
    return unmarked("\n".join(lines).strip("\n"))


def _notes(parts: Parts, main: str, sheet: Sheet) -> dict[str, str]:
    """Footnotes and endnotes by what points at them."""
    notes = {}
    for kind, path in parts.relations(main):
        if kind.removesuffix("s") not in NOTES:
            continue
        wanted = tags(kind.removesuffix("s"))
        for note in (element for element in parts.tree(path) if element.tag in wanted):
            text = " ".join(inside(note, sheet).split())
            if text and attribute(note, "type") in ("", "normal"):  # the others are rules between text and notes
                notes[f"{NOTES[kind.removesuffix('s')]} {attribute(note, 'id')}"] = text
    return notes


def _title(parts: Parts) -> str | None:
    for path in (path for kind, path in parts.relations("") if kind == "core-properties"):
        for element in parts.tree(path).iter("{http://purl.org/dc/elements/1.1/}title"):
            if text := clean(" ".join("".join(element.itertext()).split())):
                return text
    return None
