"""Split an answer into raw points, line by line; points that later lines can change are held back.

A bullet or a heading is one line, and prose is split into sentences. A citation alone on a line belongs to the point
above it. If the first citation is above its text, as marks in the prompt are, all are. Each then applies to all points
up to the next citation, a heading, or a point with a citation of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvcli.summarize.citations import Bracket, find, without
from kvcli.summarize.claim_words import sentences
from kvcli.summarize.result import PointKind

_SIGN = r"(?:[-*•–+]|\(?\d{1,3}[.)])"
_BULLET = re.compile(rf"(?P<pad>[ \t]*){_SIGN}[ \t]+(?P<text>\S.*)")
_HEADING = re.compile(r"[ \t]*(?P<signs>#{1,6})[ \t]+(?P<text>\S.*)")
_BOLD = re.compile(r"[ \t]*(?:\*\*|__)(?P<text>[^*_]+?):?(?:\*\*|__):?[ \t]*")
_NOD = r"(?:sure(?: thing)?|certainly|of course|absolutely|okay|ok)"
_NODS = re.compile(rf"{_NOD}\s*[.!,]?\s*", re.IGNORECASE)
_TALK = re.compile(
    rf"(?:{_NOD}|here(?: is| are|['’]s)|(?:below|the following) (?:is|are)|this is)\b(?!\s*:)", re.IGNORECASE
)
_ABOUT = re.compile(
    r"\b(?:summar(?:y|ies)|points|overview|list|outline|abstract|synopsis|recap|findings|takeaways|highlights)\b",
    re.IGNORECASE,
)
_CLOSED = re.compile(r"[.!?…\u3002\uff01\uff1f][\"')\]”’»*_]*\Z")
_CERTAIN = re.compile(rf"[ \t]*(?:(?:{_SIGN}|#{{1,6}})[ \t]+[*_]{{0,2}}[^\W_]|[^\W\d_])")
WIDTH = 2  # spaces per level
DEEPEST = 5
LONGEST_TITLE = 8  # words of a first line without a full stop; a longer line is a statement
# characters of citations that several points share: otherwise long rows of them would take quadratic time
LONGEST_LEAD = 120


@dataclass(frozen=True, slots=True)
class Raw:
    """A point as the model wrote it."""

    text: str
    kind: PointKind
    level: int = 0
    opens: bool = False


def split(answer: str, documents: Sequence[str] = ()) -> list[Raw]:
    """Return all points of an answer. A preface ("Here is ...:") is dropped."""
    splitter = Splitter(documents)
    for line in answer.splitlines():
        splitter.feed(line)
    splitter.end()
    return splitter.found


@dataclass
class Splitter:
    """Line parser of an answer. `found`: the points that no later line can change."""

    documents: Sequence[str] = ()
    found: list[Raw] = field(default_factory=list)
    _held: Raw | None = None  # point that may still get a citation from a line of its own
    _bullet: Raw | None = None  # bullet without its text yet
    _lines: list[str] = field(default_factory=list)  # lines of the bullet, or of a paragraph
    _is_title: bool = False  # the held point is a title; a citation below is not about it
    _lead: str = ""  # citations above their text
    _is_spent: bool = False  # a point has used the lead citations
    _leads: bool = False  # citations are above their text, not below it
    _is_tight: bool = False  # no empty line between
    _is_first: bool = True

    def feed(self, line: str) -> None:
        """Parse the next line, without its line end."""
        if bullet := _BULLET.fullmatch(line):
            level = len(bullet["pad"].expandtabs(WIDTH)) // WIDTH
            self._close()
            self._bullet = Raw("", "bullet", min(level, DEEPEST))
            self._begin(bullet["text"])
        elif heading := _HEADING.fullmatch(line):
            self._close()
            self._put(Raw(_plain(heading["text"].rstrip(" \t#")), "heading", len(heading["signs"]) - 1))
        elif bold := _BOLD.fullmatch(line):
            self._close()
            self._put(Raw(bold["text"].strip(), "heading", 1))
        elif not line.strip():
            self._close()
            self._is_tight = self._is_tight and (self._is_spent or not self._lead)
        elif self._goes_on(line):
            self._lines.append(line.strip())
        else:
            self._close()
            self._begin(line.strip())

    def end(self) -> None:
        """Finish after the last line."""
        self._close()
        if self._held is not None and self._held.kind != "heading" and self._lead and not self._is_spent:
            self._held = replace(self._held, text=f"{self._held.text} {self._lead}")
        self._release()

    def after(self, begun: str) -> list[Raw]:
        """Return the points that will be found once a line with this beginning is complete."""
        if not _CERTAIN.match(begun):
            return []
        copy = replace(self, found=[], _lines=list(self._lines))
        copy.feed(begun)
        return copy.found

    def _goes_on(self, line: str) -> bool:
        """True if a plain line continues the bullet or paragraph before it."""
        if not self._bullet:
            return bool(self._lines)
        leads = self._leads and self._is_tight
        return line[0] in " \t" or (not leads and _is_bare(line, self.documents))

    def _begin(self, text: str) -> None:
        """Begin a point. If it begins with a word, it is more than a citation, and the point before it is final."""
        self._lines = [text]
        if text.lstrip("*_")[:1].isalnum():
            self._release()

    def _close(self) -> None:
        """End the bullet or the paragraph."""
        lines, bullet = self._lines, self._bullet
        self._bullet, self._lines = None, []
        if bullet:
            self._put(replace(bullet, text=_plain(" ".join(lines))))
            return
        is_marked = len(lines) > 1 and _is_bare(lines[0], self.documents)
        for raw in _sentences(lines, self.documents):
            self._put(raw)
            if is_marked and (lead := _lead_of(raw.text, self.documents)):
                self._lead, self._is_spent = lead, True

    def _put(self, raw: Raw) -> None:
        if not _says(raw.text, self.documents):
            if find(raw.text, self.documents):
                self._put_citation(raw)
            return
        if self._is_first and _is_talk(raw):
            return
        self._is_title = raw.kind == "heading" or (self._is_first and _names_all(raw, self.documents))
        self._is_first = False
        self._release()
        self._held = self._led(raw)

    def _put_citation(self, raw: Raw) -> None:
        if raw.kind == "heading" or self._held is None or self._is_title:
            self._leads = True
        if self._leads or self._held is None:
            waiting = "" if self._is_spent else self._lead
            self._lead, self._is_spent = f"{waiting} {raw.text}".strip(), False
            self._is_tight = raw.kind != "heading"
        else:
            self._held = replace(self._held, text=f"{self._held.text} {raw.text}")

    def _led(self, raw: Raw) -> Raw:
        """Return the point with the citations above it, if it has none itself."""
        if raw.kind == "heading":
            self._lead = "" if self._is_spent else self._lead
            self._leads = bool(self._lead)
            return raw
        if find(raw.text, self.documents) or (self._is_spent and len(self._lead) > LONGEST_LEAD):
            self._lead = ""
        if not self._lead:
            return raw
        self._is_spent = True
        return replace(raw, text=f"{self._lead} {raw.text}")

    def _release(self) -> None:
        self.found += [self._held] if self._held else []
        self._held = None


def _says(text: str, documents: Sequence[str]) -> bool:
    """True if the text has more than citations and signs."""
    return any(c.isalnum() for c in without(text, find(text, documents)))


def _is_bare(line: str, documents: Sequence[str]) -> bool:
    """True if the line has citations and nothing else."""
    return bool(find(line, documents)) and not _says(line, documents)


def _lead_of(text: str, documents: Sequence[str]) -> str:
    """Return the citation that begins a sentence, if it has no other."""
    brackets = find(text, documents)
    return text[: brackets[0].end] if len(brackets) == 1 and brackets[0].start == 0 else ""


def _is_talk(raw: Raw) -> bool:
    """True if the model talks about its answer: "Sure!", "Here is a summary:". A heading has lost its colon."""
    if raw.kind == "bullet":
        return False
    ends = raw.kind == "heading" or raw.text.endswith(":")
    return bool(_NODS.fullmatch(raw.text) or (ends and _TALK.match(raw.text) and _ABOUT.search(raw.text)))


def _names_all(raw: Raw, documents: Sequence[str]) -> bool:
    """True if a first sentence is a title: "Overview:"."""
    is_short = not _CLOSED.search(raw.text) and len(raw.text.split()) <= LONGEST_TITLE
    return raw.kind == "sentence" and is_short and not find(raw.text, documents)


def _sentences(paragraph: Sequence[str], documents: Sequence[str]) -> list[Raw]:
    """Return the sentences of a paragraph. A citation after a full stop belongs to the sentence before it.

    If the paragraph begins with a citation, each citation belongs to the sentence after it.
    """
    text = " ".join(paragraph)
    brackets = find(text, documents)
    ends = {bracket.start: bracket.end for bracket in brackets}
    leads = bool(brackets) and not any(c.isalnum() for c in text[: brackets[0].start])
    spans: list[tuple[int, int]] = []
    for start, end in sentences(_masked(text, brackets)):
        behind = ends.get(start, start)
        rest = text[behind:end].strip(" .,;")
        if spans and behind > start and not (leads and rest):
            spans[-1] = spans[-1][0], behind
            if not rest:
                continue
            start = text.index(rest, behind)
        spans.append((start, end))
    return [Raw(text[a:b].strip(), "sentence", opens=i == 0) for i, (a, b) in enumerate(spans) if text[a:b].strip()]


def _masked(text: str, brackets: Sequence[Bracket]) -> str:
    """Return the text with a word in place of each citation, because a dot in a citation ends no sentence."""
    kept, at = [], 0
    for bracket in brackets:
        kept += [text[at : bracket.start], "_" * (bracket.end - bracket.start)]
        at = bracket.end
    return "".join([*kept, text[at:]])


def _plain(text: str) -> str:
    """Return the text without the stars of a bold or italic beginning."""
    return re.sub(r"(\*\*|__)(.+?)\1", r"\2", text).strip()
