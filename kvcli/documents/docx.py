"""DOCX reader: the text under each heading, tables by rows, and notes after the section that refers to them."""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import IO, Any, NamedTuple
from urllib.parse import unquote

from kvcli.documents.archives import member, open_zip
from kvcli.documents.dehyphenate import tidy, unmarked
from kvcli.documents.document import Parsed, ParseJob, damaged
from kvcli.documents.numerals import numeral, whole
from kvcli.documents.plain import headed_text
from kvcli.documents.superscripts import apart, grouped
from kvcli.documents.xml_tree import first_words, parse_xml

# Parts of a DOCX, each found through the relations of the part before it.

SPACES = (
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "http://purl.oclc.org/ooxml/wordprocessingml/main",  # of the strict format
)
MATH = ("http://schemas.openxmlformats.org/officeDocument/2006/math", "http://purl.oclc.org/ooxml/officeDocument/math")
OFF = ("0", "false", "off")


@cache
def tags(*names: str, spaces: tuple[str, ...] = SPACES) -> frozenset[str]:
    """Return the names in each of their namespaces."""
    return frozenset(f"{{{space}}}{name}" for space in spaces for name in names)


def value(element: Any, *path: str) -> str | None:
    """Return the `w:val` at the end of a path of first children; "" if unset, None if the path ends earlier."""
    for name in path:
        element = next(element.iterchildren("{*}" + name), None)
        if element is None:
            return None
    return attribute(element, "val")


def is_on(element: Any, *path: str) -> bool:
    """True if the path leads to a switch that is not off."""
    return value(element, *path) not in (None, *OFF)


def attribute(element: Any, name: str) -> str:
    """Return an attribute by its name, in any namespace."""
    return next((str(v) for key, v in element.items() if key.rpartition("}")[2] == name), "")


class Parts:
    """An archive of parts. Only requested parts are inflated; pictures, macros and fonts never are."""

    def __init__(self, archive: zipfile.ZipFile, name: str) -> None:
        self._archive = archive
        self._paths = set(archive.namelist())
        self._name = name

    def main(self) -> str:
        """Return the path of the main document part."""
        found = next((path for kind, path in self.relations("") if kind == "officeDocument"), None)
        if found is None:
            raise damaged(self._name, "a DOCX", "it does not name its text file")
        return found

    def relations(self, source: str) -> list[tuple[str, str]]:
        """Return the relations of a part inside the archive, as kind and path; "" is the whole file.

        Links to the web, to bookmarks and to missing parts are left out.
        """
        folder, file = posixpath.split(source)
        root = self.tree(posixpath.join(folder, "_rels", f"{file}.rels"))
        found = []
        for relation in [] if root is None else root.iter("{*}Relationship"):
            path = posixpath.normpath(posixpath.join("/", folder, unquote(relation.get("Target", ""))))[1:]
            if relation.get("TargetMode") != "External" and path in self._paths:
                found.append((relation.get("Type", "").rpartition("/")[2], path))
        return found

    def tree(self, path: str) -> Any:
        """Return a part as XML, or None if it is missing. Refuse document types, because only they declare entities."""
        if path not in self._paths:
            return None
        data = member(self._archive, path, self._name)
        if b"<!DOCTYPE" in data.replace(b"\0", b""):
            raise damaged(self._name, "a DOCX", "it declares a document type, which is refused for safety")
        return parse_xml(data, self._name, "a DOCX")


# Style sheet of a DOCX: heading levels, raised and lowered letters, and how numbers and bullets are counted.

NOTES = {"footnote": "note", "endnote": "endnote"}
BULLET = "-"
PLACE = re.compile(r"%([1-9])")  # placeholder for the number of a level


class Level(NamedTuple):
    """Numbering of a list at one depth."""

    start: int
    form: str
    text: str  # with placeholders for its number and those of the levels above
    restart: int  # the number restarts after each entry above this depth
    is_legal: bool  # all numbers are in digits
    style: str | None  # style whose paragraphs are at this level

    @classmethod
    def of(cls, lvl: Any) -> Level:
        restart = whole(value(lvl, "lvlRestart"), whole(attribute(lvl, "ilvl"), 0))
        form, text = value(lvl, "numFmt") or "decimal", value(lvl, "lvlText") or ""
        return cls(whole(value(lvl, "start"), 0), form, text, restart, is_on(lvl, "isLgl"), value(lvl, "pStyle"))


class Sheet:
    """Style sheet and lists of a DOCX. Paragraphs and notes are counted in the order in which they are requested."""

    def __init__(self, parts: Parts, main: str) -> None:
        roots = [parts.tree(path) for kind, path in parts.relations(main) if kind in ("styles", "numbering")]
        styles, lists, nums = ([e for r in roots for e in r.iter(*tags(n))] for n in ("style", "abstractNum", "num"))
        self._styles = {attribute(style, "styleId"): style for style in styles}
        usual = (s for s in styles if attribute(s, "type") == "paragraph" and attribute(s, "default") not in ("", *OFF))
        self._chains: dict[str, Sequence[Any]] = {"": list(usual)[:1]}
        of_style = {link: found for found in lists if (link := value(found, "styleLink"))}
        named = {attribute(a, "abstractNumId"): of_style.get(value(a, "numStyleLink") or "", a) for a in lists}
        self._lists: dict[str, tuple[str, dict[int, Level], dict[int, int], set[int]]] = {}
        for num in nums:
            found, changes = named.get(value(num, "abstractNumId") or "", ()), list(num.iterfind("{*}lvlOverride"))
            lvls = [e for holder in (found, *changes) for e in holder if e.tag in tags("lvl")]
            starts = {whole(attribute(e, "ilvl"), 0): value(e, "startOverride") for e in changes}
            anew = {at: whole(n, 1) for at, n in starts.items() if n is not None}
            levels = {whole(attribute(e, "ilvl"), 0): Level.of(e) for e in lvls}
            name = attribute(found, "abstractNumId") if levels and found != () else ""
            self._lists[attribute(num, "numId")] = name, levels, anew, {*anew}
        self._counts: dict[Any, dict[int, int]] = {}  # list -> level -> its latest number
        self._notes: Counter[str] = Counter()
        # notes that were referred to: name in the file, and name for the reader
        self.pointed: list[tuple[str, str]] = []

    def level(self, paragraph: Any) -> int:
        """Return the level of a heading, or 0 for other paragraphs. Style names in the file are always English."""
        chain = self._chain(value(paragraph, "pPr", "pStyle") or "")
        for style in (paragraph, *chain):
            said, outline = (value(style, "name") or "").casefold().split(), value(style, "pPr", "outlineLvl")
            if said == ["title"]:
                return int(style is chain[0])  # a style based on the title, a subtitle, is no heading
            if len(said) == 2 and said[0] == "heading" and said[1].isdecimal():
                return max(1, min(6, int(said[1])))
            if outline and outline.isdecimal():
                return min(6, int(outline) + 1) if int(outline) < 9 else 0
        return 0

    def height(self, run: Any) -> str:
        """Return "superscript", "subscript" or "", as set by the run or its style."""
        for style in (run, *self._chain(value(run, "rPr", "rStyle") or " ")):
            if (said := value(style, "rPr", "vertAlign")) is not None:
                return said.removesuffix("baseline")
            if abs(up := whole(value(style, "rPr", "position"), 0)) > 3:  # half points
                return "superscript" if up > 0 else "subscript"
        return ""

    def note(self, pointer: Any, kind: str) -> str:
        """Return the name of a note for the reader. Notes are numbered, except those with a custom sign."""
        is_signed = attribute(pointer, "customMarkFollows") not in ("", *OFF)
        self._notes[kind] += not is_signed
        called = kind if is_signed else f"{kind} {self._notes[kind]}"
        self.pointed.append((f"{kind} {attribute(pointer, 'id')}", called))
        return called

    def lead(self, paragraph: Any) -> str:
        """Return the number or bullet of the next paragraph, with a space; "" for most paragraphs."""
        chain = self._chain(value(paragraph, "pPr", "pStyle") or "")
        num, depth = (
            next((v for s in (paragraph, *chain) if (v := value(s, "pPr", "numPr", name)) is not None), "")
            for name in ("numId", "ilvl")
        )
        root, levels, anew, fresh = self._lists.get(num, ("", {}, {}, set()))
        keys = [attribute(style, "styleId") for style in chain] if levels else []
        at = whole(depth, next((n for key in keys for n, level in levels.items() if level.style == key), 0))
        if at not in levels or num == "0":
            return ""
        counts, first = self._counts.setdefault(root, {}), {n: level.start for n, level in levels.items()} | anew
        if at in fresh:  # a list number that restarts a list does so once
            fresh.remove(at)
            counts.pop(at, None)
        counts[at] = counts.get(at, first[at] - 1) + 1
        for below in [n for n in counts if n > at and (n not in levels or at < levels[n].restart)]:
            del counts[below]
        if levels[at].form == "bullet":
            return f"{'  ' * at}{BULLET} "

        def counted(place: re.Match[str]) -> str:
            n = int(place[1]) - 1
            if n > at or n not in levels:
                return ""
            form = "decimal" if levels[at].is_legal else levels[n].form
            return numeral(counts.setdefault(n, first[n]), form, repeats=True)

        text = PLACE.sub(counted, levels[at].text).strip()
        return f"{text} " if text else ""

    def _chain(self, key: str) -> Sequence[Any]:
        """Return a style and the styles that it is based on."""
        if key not in self._chains:
            chain: dict[str, Any] = {}
            at = key
            while at in self._styles and at not in chain:
                chain[at] = self._styles[at]
                at = value(chain[at], "basedOn") or ""
            self._chains[key] = list(chain.values())
        return self._chains[key]


# Words of a DOCX with all tracked changes accepted: paragraphs, tables, text boxes, equations.

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
