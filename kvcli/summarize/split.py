"""An answer as raw points, line by line: what later lines can still change is held back.

A bullet or a heading is a line, prose goes by sentences. A citation alone on a line belongs to the point above it;
where the first one stands above its text, as marks in the prompt do, so do all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvcli.summarize.cites import Bracket, find, without
from kvcli.summarize.result import PointKind
from kvcli.summarize.words import sentences

_SIGN = r"(?:[-*•–+]|\(?\d{1,3}[.)])"
_BULLET = re.compile(rf"(?P<pad>[ \t]*){_SIGN}[ \t]+(?P<text>\S.*)")
_HEADING = re.compile(r"[ \t]*(?P<signs>#{1,6})[ \t]+(?P<text>\S.*)")
_BOLD = re.compile(r"[ \t]*(?:\*\*|__)(?P<text>[^*_]+?):?(?:\*\*|__):?[ \t]*")
_TALK = re.compile(r"(?:sure|certainly|of course|here (?:is|are)|below is)\b[^.]*:\s*", re.IGNORECASE)
_CERTAIN = re.compile(rf"[ \t]*(?:(?:{_SIGN}|#{{1,6}})[ \t]+[*_]{{0,2}}[^\W_]|[^\W\d_])")
_THINKS, _THOUGHT = re.compile(r"\s*<think(?:ing)?>", re.IGNORECASE), re.compile(r"</think(?:ing)?>", re.IGNORECASE)
WIDTH = 2  # spaces of one level
DEEPEST = 5


@dataclass(frozen=True, slots=True)
class Raw:
    """A point as the model wrote it."""

    text: str
    kind: PointKind
    level: int = 0
    opens: bool = False


def split(answer: str, documents: Sequence[str] = ()) -> list[Raw]:
    """All points of an answer. A preface ("Here is ...:") and what the model thought before it are dropped."""
    splitter = Splitter(documents)
    for line in answer.splitlines():
        splitter.feed(line)
    splitter.end()
    return splitter.found


@dataclass
class Splitter:
    """Takes an answer by line. `found`: the points that no later line changes."""

    documents: Sequence[str] = ()
    found: list[Raw] = field(default_factory=list)
    _held: Raw | None = None  # may still get the citation of a line of its own
    _bullet: Raw | None = None  # begun, still without its text
    _lines: list[str] = field(default_factory=list)  # of the bullet or else of a paragraph
    _lead: str = ""  # citations that wait for their text
    _leads: bool = False  # such citations stand above their text, not below it
    _is_first: bool = True
    _begun: bool = False
    _thinks: bool = False

    def feed(self, line: str) -> None:
        """The next line, without its end."""
        if not self._begun and (thinks := _THINKS.match(line)):
            self._thinks, line = True, line[thinks.end() :]
        if self._thinks:
            thought = _THOUGHT.search(line)
            self._begun = True
            if thought is None:
                return
            self._thinks, line = False, line[thought.end() :]
        self._begun = self._begun or bool(line.strip())
        self._take(line)

    def end(self) -> None:
        """No line follows."""
        self._close()
        if self._held is not None and self._lead:
            self._held = replace(self._held, text=f"{self._held.text} {self._lead}")
        self._release()

    def after(self, begun: str) -> list[Raw]:
        """What will be found once a line is whole that so far begins like this."""
        if not _CERTAIN.match(begun):
            return []
        copy = replace(self, found=[], _lines=list(self._lines))
        copy.feed(begun)
        return copy.found

    def _take(self, line: str) -> None:
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
        elif self._goes_on(line):
            self._lines.append(line.strip())
        else:
            self._close()
            self._begin(line.strip())

    def _goes_on(self, line: str) -> bool:
        """Whether a plain line belongs to what the lines before it began."""
        if not self._bullet:
            return bool(self._lines)
        return line[0] in " \t" or (not self._leads and _is_bare(line, self.documents))

    def _begin(self, text: str) -> None:
        """A point begins like this; if with a word, it is more than a citation, and the one before it is done."""
        self._lines = [text]
        if text.lstrip("*_")[:1].isalnum():
            self._release()

    def _close(self) -> None:
        """The bullet or the paragraph ends here."""
        if self._bullet:
            raws = [replace(self._bullet, text=_plain(" ".join(self._lines)))]
        else:
            raws = _sentences(self._lines, self.documents)
        self._bullet, self._lines = None, []
        for raw in raws:
            self._put(raw)

    def _put(self, raw: Raw) -> None:
        if not _says(raw.text, self.documents):
            if find(raw.text, self.documents):
                self._put_citation(raw)
            return
        is_first, self._is_first = self._is_first, False
        if is_first and raw.kind == "sentence" and _TALK.fullmatch(raw.text):
            return
        if raw.kind == "heading":
            self._leads = bool(self._lead)
        elif self._lead:
            raw, self._lead = replace(raw, text=f"{self._lead} {raw.text}"), ""
        self._release()
        self._held = raw

    def _put_citation(self, raw: Raw) -> None:
        if raw.kind == "heading" or self._held is None or self._held.kind == "heading":
            self._leads = True
        if self._leads or self._held is None:
            self._lead = f"{self._lead} {raw.text}".strip()
        else:
            self._held = replace(self._held, text=f"{self._held.text} {raw.text}")

    def _release(self) -> None:
        self.found += [self._held] if self._held else []
        self._held = None


def _says(text: str, documents: Sequence[str]) -> bool:
    """Whether there is more than citations and signs."""
    return any(c.isalnum() for c in without(text, find(text, documents)))


def _is_bare(line: str, documents: Sequence[str]) -> bool:
    """Whether there are citations and nothing else."""
    return bool(find(line, documents)) and not _says(line, documents)


def _sentences(paragraph: Sequence[str], documents: Sequence[str]) -> list[Raw]:
    """Sentences of a paragraph. A citation behind a full stop belongs to the sentence before it.

    Where the paragraph begins with a citation, each belongs to the sentence behind it.
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
    """The text with a word in place of each citation: a dot in one ends no sentence."""
    kept, at = [], 0
    for bracket in brackets:
        kept += [text[at : bracket.start], "_" * (bracket.end - bracket.start)]
        at = bracket.end
    return "".join([*kept, text[at:]])


def _plain(text: str) -> str:
    """Without the stars of a bold or slanted beginning."""
    return re.sub(r"(\*\*|__)(.+?)\1", r"\2", text).strip()
