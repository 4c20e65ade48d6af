"""Words as they were before they were typeset: ligatures, soft hyphens, and words broken at the end of a line."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

from kvcli.documents.reading_order import CJK, Line

SOFT = "\u00ad"
LONGEST = 100  # letters of the beginning of a broken word that are looked at
BREAK = "\ufffe"  # what pdfium writes for a hyphen at the end of a line
HYPHENS = "-\u2010" + SOFT + BREAK
# ligatures of Latin type, and the shapes that letters of Arabic and Hebrew take in print
SHAPES = re.compile("[\ufb00-\ufb06\ufb13-\ufb17\ufb1d-\ufdff\ufe70-\ufeff]+")
# controls but tab and newline, and signs that steer direction or mark the order of bytes
PAIR = re.compile("[\ud800-\udfff]")
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]")
WORD = re.compile(r"[^\W\d_]+(?:[-’'][^\W\d_]+)*")
BROKEN = re.compile(rf"(?<![^\W\d_])[^\W\d_]+[{HYPHENS}]$(?:\n+ *[^\W\d_]+)?", re.M)  # and how it goes on
HEAD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")  # of a line read backwards: to look for it from the left takes squares
TAIL = re.compile(r"[^\W_]+(?:[-’'][^\W_]+)*")
PUNCTUATION = re.compile(r"[^\w\s]*")
SUSPENDS = frozenset("and or to und oder bis et ou y o".split())  # between short- and long-term, Ein- und Ausfuhr
MARKS = re.compile(r"^\[((?:p\.|§|l\.) [^\]\n]*)\](?=[ \t]*$)", re.M)


def clean(text: str) -> str:
    """Letters for ligatures and shapes, no soft hyphens, no signs that nobody sees; breaks of words stay marked."""
    if text.isascii() and text.isprintable():
        return text
    if PAIR.search(text):  # letters beyond the first plane, as two halves
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    text = SHAPES.sub(lambda m: unicodedata.normalize("NFKC", m[0]), text.replace("\u00a0", " ").replace("\t", " "))
    if text.endswith((SOFT, BREAK)):
        return UNSEEN.sub("", text[:-1].replace(SOFT, "")) + SOFT
    return unicodedata.normalize("NFC", UNSEEN.sub("", text.replace(SOFT, "")))


def tidy(text: str) -> str:
    """Each line clean, without room at its end, nor a hyphen that nothing follows."""
    return "\n".join(clean(line.rstrip()).rstrip(SOFT) for line in text.split("\n"))


def unmarked(text: str) -> str:
    """A text none of whose lines can be taken for one of our marks, whatever a page spells."""
    return MARKS.sub(r"(\1)", text) if "[" in text else text


class Words:
    """The words of a document, which decide whether a hyphen at the end of a line is part of one."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, lines: Iterable[str]) -> None:
        """Take in lines; they are counted when the first broken word asks."""
        self._lines.extend(lines)

    @cached_property
    def seen(self) -> Counter[str]:
        """How often each word stands in the lines; the halves of one that is broken count for nothing."""
        return Counter(WORD.findall(BROKEN.sub("", "\n".join(self._lines).casefold())))

    def joint(self, head: str, tail: str) -> str:
        """What stands between the halves of a word: nothing, the hyphen it is written with, or that and a space."""
        a, b = head.casefold(), tail.casefold()
        whole, written = self.seen[a + b], self.seen[f"{a}-{b}"]
        if whole or written:
            return "" if whole >= written else "-"
        if b in SUSPENDS:
            return "- "
        if not (head[-1].isalpha() and tail[0].isalpha()) or (tail[0].isupper() and not head.isupper()):
            return "-"  # 2019-2020, A-4, Anglo-Saxon
        last, first = a.rpartition("-")[2], b.partition("-")[0]
        if "-" in a:  # mother-in- law: goes on as it began
            return "-" if self.seen[first] else ""
        # two words of their own, each long enough to be no syllable: well-known
        return "-" if len(last) > 2 and len(first) > 2 and self.seen[last] and self.seen[first] else ""


def mended(paragraphs: Sequence[Sequence[Line]], words: Words) -> str:
    """Lines in paragraphs as text: broken words whole again, and lines that ended for want of room in one."""
    lines: list[str] = []
    goes_on = False
    for i, paragraph in enumerate(paragraphs):
        broken = bool(lines and _broken(lines[-1]) and paragraph and paragraph[0].text[:1].islower())
        if i and not broken:
            lines.append("")
            goes_on = False
        for line in paragraph:
            text = line.text.strip()
            rest = _joined(lines, text, words) if lines else text
            if rest and goes_on and lines:
                lines[-1] += rest if CJK.match(lines[-1][-1:]) and CJK.match(rest) else f" {rest}"
            elif rest:
                lines.append(line.text.rstrip() if rest == text else rest)
            goes_on = line.goes_on
    return unmarked("\n".join(line.rstrip(SOFT) + ("-" if line.endswith(SOFT) else "") for line in lines))


def _broken(line: str) -> str | None:
    """The beginning of the word that breaks at the end of a line."""
    found = HEAD.match(line[-2:-LONGEST:-1]) if len(line) > 1 and line.endswith(tuple(HYPHENS)) else None
    return found[0][::-1] if found else None


def _joined(lines: list[str], line: str, words: Words) -> str:
    """Completes the word at the end of the lines so far, and returns what is left of the next line."""
    head = _broken(lines[-1])
    tail = TAIL.match(line) if head else None
    if not head or not tail:
        return line
    if "/" in lines[-1].rsplit(None, 1)[-1]:  # an address or a path, whose hyphens are its own
        hyphen, end = "-", len(line.split(None, 1)[0])
    else:
        punctuation = PUNCTUATION.match(line, tail.end())
        hyphen, end = words.joint(head, tail[0]), punctuation.end() if punctuation else tail.end()
    lines[-1] = lines[-1][:-1] + hyphen + line[:end]
    return line[end:].lstrip()
