"""An answer as points: bullets, headings and sentences, each with the citations that stand in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcli.summarize.check import Checker
from kvcli.summarize.cites import Bracket, find, without, write
from kvcli.summarize.result import Cite, Point, PointKind
from kvcli.summarize.words import sentences

_BULLET = re.compile(r"(?P<pad>[ \t]*)(?:[-*•–+]|\(?\d{1,3}[.)])[ \t]+(?P<text>\S.*)")
_HEADING = re.compile(r"[ \t]*(?P<signs>#{1,6})[ \t]+(?P<text>\S.*)")
_BOLD = re.compile(r"[ \t]*(?:\*\*|__)(?P<text>[^*_]+?):?(?:\*\*|__):?[ \t]*")
_TALK = re.compile(r"(?:sure|certainly|of course|here (?:is|are)|below is)\b[^.]*:\s*", re.IGNORECASE)
WIDTH = 2  # spaces of one level


@dataclass(frozen=True, slots=True)
class Raw:
    """A point as the model wrote it."""

    text: str
    kind: PointKind
    level: int = 0
    opens: bool = False


def split(answer: str) -> list[Raw]:
    """Bullets and headings a line each, everything else by sentence. A preface ("Here is ...:") is dropped."""
    found: list[Raw] = []
    paragraph: list[str] = []
    is_open = False  # the line before belongs to a bullet, which an indented line goes on with
    for line in [*answer.splitlines(), ""]:
        if (bullet := _BULLET.fullmatch(line)) or (_HEADING.fullmatch(line) or _BOLD.fullmatch(line)):
            found += _sentences(paragraph)
            paragraph = []
        if bullet:
            is_open = True
            level = len(bullet["pad"].expandtabs(WIDTH)) // WIDTH
            found.append(Raw(_plain(bullet["text"]), "bullet", min(level, 5)))
            continue
        if is_open and line.strip() and line[0] in " \t" and not (_HEADING.fullmatch(line) or _BOLD.fullmatch(line)):
            found[-1] = replace(found[-1], text=_plain(f"{found[-1].text} {line.strip()}"))
            continue
        is_open = False
        if heading := _HEADING.fullmatch(line):
            found.append(Raw(_plain(heading["text"].rstrip(" \t#")), "heading", len(heading["signs"]) - 1))
        elif bold := _BOLD.fullmatch(line):
            found.append(Raw(bold["text"].strip(), "heading", 1))
        elif line.strip():
            paragraph.append(line.strip())
        elif paragraph:
            found += _sentences(paragraph)
            paragraph = []
    if found and found[0].kind == "sentence" and _TALK.fullmatch(found[0].text):
        del found[0]
    return [raw for raw in found if without(raw.text, find(raw.text)).strip(" .,;:-")]


def pieces(point: str, brackets: Sequence[Bracket]) -> list[str]:
    """The words that each citation stands for: those since the one before it, or all where that is next to nothing."""
    found, at = [], 0
    whole = without(point, brackets)
    for bracket in brackets:
        piece = point[at : bracket.start].strip(" ,;.")
        at = bracket.end
        found.append(piece if len(piece.split()) >= 3 and len(brackets) > 1 else whole)
    return found


def point_of(raw: Raw, checker: Checker | None, documents: Sequence[str] = (), *, quotes: bool = False) -> Point:
    """One point with its citations checked; without a checker they stay as the model wrote them."""
    brackets = find(raw.text, documents)
    cites: list[Cite] = []
    marked, at = [], 0
    for bracket, claim in zip(brackets, pieces(raw.text, brackets), strict=True):
        if checker is None:
            cites += [Cite(place, False) for place in bracket.places]
            text = write(bracket.places)
        else:
            judged = checker.judge(claim, bracket, quotes=quotes)
            cites += judged.cites
            text = judged.text
        marked.append(raw.text[at : bracket.start] + text)
        at = bracket.end
    marked.append(raw.text[at:])
    return Point(without(raw.text, brackets), "".join(marked), tuple(cites), raw.kind, raw.level, raw.opens)


def _sentences(paragraph: Sequence[str]) -> list[Raw]:
    """Sentences of a paragraph. A citation that stands behind a full stop belongs to the sentence before it."""
    text = " ".join(paragraph)
    spans: list[tuple[int, int]] = []
    inside = [(b.start, b.end) for b in find(text)]
    for start, end in sentences(text):
        lead = next((b for a, b in inside if a == start), None)
        if spans and any(a < start < b for a, b in inside):
            spans[-1] = spans[-1][0], end
        elif spans and lead is not None:
            spans[-1] = spans[-1][0], lead
            if rest := text[lead:end].strip(" .,;"):
                begin = text.index(rest, lead)
                spans.append((begin, end))
        else:
            spans.append((start, end))
    return [Raw(text[a:b].strip(), "sentence", opens=i == 0) for i, (a, b) in enumerate(spans) if text[a:b].strip()]


def _plain(text: str) -> str:
    """Without the stars of a bold or slanted beginning."""
    return re.sub(r"(\*\*|__)(.+?)\1", r"\2", text).strip()
