"""Style sheet of a DOCX: heading levels, raised and lowered letters, and how numbers and bullets are counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcli.documents.docx_parts import OFF, Parts, attribute, is_on, tags, value
from kvcli.documents.numerals import numeral, whole

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
