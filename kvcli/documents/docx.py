"""DOCX reader: the text under each heading, tables by rows, and notes after the section that refers to them."""

from __future__ import annotations

from typing import IO

from kvcli.documents.archives import open_zip
from kvcli.documents.dehyphenate import tidy, unmarked
from kvcli.documents.docx_parts import Parts, attribute, tags
from kvcli.documents.docx_sheet import BULLET, NOTES, Sheet
from kvcli.documents.docx_words import PARAGRAPH, TABLE, inside, nearest, table, words
from kvcli.documents.parsed import Parsed, ParseJob, damaged
from kvcli.documents.plain import headed_text
from kvcli.documents.xml_tree import first_words


def read(file: IO[bytes], job: ParseJob) -> Parsed:
    """Return sections under headings, or blocks of lines if there are no headings. A DOCX has no page numbers."""
    with open_zip(file, job.name) as archive:
        parts = Parts(archive, job.name)
        headed = _headed(parts, job.name)
        about = [parts.tree(path) for kind, path in parts.relations("") if kind == "core-properties"]
    title = first_words(title for tree in about for title in tree.iter("{http://purl.org/dc/elements/1.1/}title"))
    return headed_text(job, headed, "it has only pictures or empty paragraphs", title=title)


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
    texts = [(heading, unmarked(tidy("\n\n".join([*blocks, *under])).strip("\n"))) for heading, blocks, under in found]
    return [(heading, text) for heading, text in texts if text]


def _notes(parts: Parts, main: str, sheet: Sheet) -> dict[str, str]:
    """Return footnotes and endnotes by the reference to them."""
    notes = {}
    for kind, path in ((kind.removesuffix("s"), path) for kind, path in parts.relations(main)):
        for note in parts.tree(path).iter(*tags(kind)) if kind in NOTES else ():
            text = " ".join(inside(note, sheet).split())
            # other types are separator lines between text and notes
            if text and attribute(note, "type") in ("", "normal"):
                notes[f"{NOTES[kind]} {attribute(note, 'id')}"] = text
    return notes
