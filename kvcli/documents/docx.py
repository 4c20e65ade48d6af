"""DOCX: the text under each heading; tables row by row, notes after the section that points at them."""

from __future__ import annotations

from typing import IO, Any

from kvcli.documents.docx_parts import Parts
from kvcli.documents.docx_words import PARAGRAPH, TABLE, attribute, inside, nearest, table, tags, value, words
from kvcli.documents.parsed import Job, Parsed, damaged, no_text, refuse_pages, refuse_too_much
from kvcli.documents.plain import sections_of
from kvcli.documents.repair import clean, unmarked
from kvcli.documents.zipped import open_zip

NOTES = {"footnotes": "note", "endnotes": "endnote"}


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
    notes, levels = _notes(parts, main), _levels(parts, main)
    found: list[tuple[str, list[str], list[str]]] = [("", [], [])]
    for block in nearest(body, PARAGRAPH | TABLE):
        pointed: list[str] = []
        if block.tag in TABLE:
            text = table(block, pointed)
        else:
            text = words(block, pointed)
            level = _outline(block)
            level = levels.get(value(block, "pPr", "pStyle") or "", 0) if level is None else level
            if level and text.strip():
                found.append((" ".join(text.split()), [], []))
                text = f"{'#' * level} {' '.join(text.split())}"
        if text.strip():
            found[-1][1].append(text.strip("\n"))
        found[-1][2].extend(f"[{key}] {notes[key]}" for key in pointed if notes.get(key))
    return [(heading, text) for heading, blocks, under in found if (text := _joined([*blocks, *under]))]


def _joined(blocks: list[str]) -> str:
    lines = [clean(line.rstrip()).rstrip("\u00ad") for block in blocks for line in [*block.split("\n"), ""]]
    return unmarked("\n".join(lines).strip("\n"))


def _levels(parts: Parts, main: str) -> dict[str, int]:
    """Levels of heading styles by their id, 0 for the others. Names are English in the file, whatever the program's."""
    levels: dict[str, int] = {}
    titles, above = [], {}
    for path in (path for kind, path in parts.relations(main) if kind == "styles"):
        for style in parts.tree(path).iter(*tags("style")):
            key, said = attribute(style, "styleId"), (value(style, "name") or "").casefold().split()
            own = _outline(style)
            if len(said) == 2 and said[0] == "heading" and said[1].isdecimal():
                own = max(1, min(6, int(said[1])))
            if said == ["title"]:
                titles.append(key)  # what is based on it, a subtitle, is no heading
            elif own is not None:
                levels[key] = own
            else:
                above[key] = value(style, "basedOn") or ""
    for key in above:
        chain: dict[str, None] = {}
        while key not in levels and key in above and key not in chain:
            chain[key] = None
            key = above[key]
        levels |= dict.fromkeys(chain, levels.get(key, 0))
    return levels | dict.fromkeys(titles, 1)


def _outline(element: Any) -> int | None:
    """The level that a paragraph or a style says itself: 0 for none, None where it leaves it to others."""
    said = value(element, "pPr", "outlineLvl")
    if not said or not said.isdecimal():
        return None
    return min(6, int(said) + 1) if int(said) < 9 else 0


def _notes(parts: Parts, main: str) -> dict[str, str]:
    """Footnotes and endnotes by what points at them."""
    notes = {}
    for kind, path in parts.relations(main):
        if kind not in NOTES:
            continue
        wanted = tags(kind.removesuffix("s"))
        for note in (element for element in parts.tree(path) if element.tag in wanted):
            text = " ".join(inside(note, []).split())
            if text and attribute(note, "type") in ("", "normal"):  # the others are rules between text and notes
                notes[f"{NOTES[kind]} {attribute(note, 'id')}"] = text
    return notes


def _title(parts: Parts) -> str | None:
    for path in (path for kind, path in parts.relations("") if kind == "core-properties"):
        for element in parts.tree(path).iter("{http://purl.org/dc/elements/1.1/}title"):
            if text := clean(" ".join("".join(element.itertext()).split())):
                return text
    return None
