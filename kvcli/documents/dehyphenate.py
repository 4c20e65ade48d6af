"""Restore words as they were before typesetting: ligatures, soft hyphens, and words broken at the end of a line."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

from kvcli.documents.reading_order import CJK, Line

SOFT = "\u00ad"
LONGEST = 100  # letters that are searched backwards for the beginning of a broken word
BREAK = "\ufffe"  # pdfium's code for a hyphen at the end of a line
HYPHENS = "-\u2010" + SOFT + BREAK
# ligatures of Latin type, and presentation forms of Arabic and Hebrew letters
SHAPES = re.compile("[\ufb00-\ufb06\ufb13-\ufb17\ufb1d-\ufdff\ufe70-\ufeff]+")
# controls except tab and newline, direction signs and byte order marks
PAIR = re.compile("[\ud800-\udfff]")
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]")
WORD = re.compile(r"[^\W\d_]+(?:[-’'][^\W\d_]+)*")
# with its continuation on the next line
BROKEN = re.compile(rf"(?<![^\W\d_])[^\W\d_]+[{HYPHENS}]$(?:\n+ *[^\W\d_]+)?", re.M)
HEAD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")  # matched on the reversed line: searching from the left takes quadratic time
TAIL = re.compile(r"[^\W_]+(?:[-’'][^\W_]+)*")
PUNCTUATION = re.compile(r"[^\w\s]*")
SUSPENDS = frozenset("and or to und oder bis et ou y o".split())  # between short- and long-term, Ein- und Ausfuhr
MARKS = re.compile(r"^\[((?:p\.|§|l\.) [^\]\n]*)\](?=[ \t]*$)", re.M)


def clean(text: str) -> str:
    """Replace ligatures and presentation forms, drop soft hyphens and invisible characters; word breaks stay marked."""
    if text.isascii() and text.isprintable():
        return text
    if PAIR.search(text):  # letters beyond the Basic Multilingual Plane, as two surrogates
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    text = SHAPES.sub(lambda m: unicodedata.normalize("NFKC", m[0]), text.replace("\u00a0", " ").replace("\t", " "))
    if text.endswith((SOFT, BREAK)):
        return UNSEEN.sub("", text[:-1].replace(SOFT, "")) + SOFT
    return unicodedata.normalize("NFC", UNSEEN.sub("", text.replace(SOFT, "")))


def tidy(text: str) -> str:
    """Clean each line and strip trailing spaces and a final soft hyphen."""
    return "\n".join(clean(line.rstrip()).rstrip(SOFT) for line in text.split("\n"))


def unmarked(text: str) -> str:
    """Return the text with every line that looks like a kvcli mark changed, so that a page cannot imitate one."""
    return MARKS.sub(r"(\1)", text) if "[" in text else text


class Words:
    """Words of a document. They decide whether a hyphen at the end of a line belongs to the word."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, lines: Iterable[str]) -> None:
        """Add lines. They are counted when the first broken word is resolved."""
        self._lines.extend(lines)

    @cached_property
    def seen(self) -> Counter[str]:
        """Count of each word in the lines; halves of broken words are not counted."""
        return Counter(WORD.findall(BROKEN.sub("", "\n".join(self._lines).casefold())))

    def joint(self, head: str, tail: str) -> str:
        """Return the text between the halves of a word: empty, its hyphen, or hyphen and space."""
        a, b = head.casefold(), tail.casefold()
        whole, written = self.seen[a + b], self.seen[f"{a}-{b}"]
        if whole or written:
            return "" if whole >= written else "-"
        if b in SUSPENDS:
            return "- "
        if not (head[-1].isalpha() and tail[0].isalpha()) or (tail[0].isupper() and not head.isupper()):
            return "-"  # 2019-2020, A-4, Anglo-Saxon
        last, first = a.rpartition("-")[2], b.partition("-")[0]
        if "-" in a:  # mother-in- law: keep the hyphen as before
            return "-" if self.seen[first] else ""
        # two separate words, each too long to be a syllable: well-known
        return "-" if len(last) > 2 and len(first) > 2 and self.seen[last] and self.seen[first] else ""


def mended(paragraphs: Sequence[Sequence[Line]], words: Words) -> str:
    """Return lines in paragraphs as text, with broken words joined and wrapped lines merged."""
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
    """Return the beginning of the word that breaks at the end of a line."""
    found = HEAD.match(line[-2:-LONGEST:-1]) if len(line) > 1 and line.endswith(tuple(HYPHENS)) else None
    return found[0][::-1] if found else None


def _joined(lines: list[str], line: str, words: Words) -> str:
    """Complete the word at the end of the lines so far, and return the rest of the next line."""
    head = _broken(lines[-1])
    tail = TAIL.match(line) if head else None
    if not head or not tail:
        return line
    if "/" in lines[-1].rsplit(None, 1)[-1]:  # a URL or a path: its hyphens are kept
        hyphen, end = "-", len(line.split(None, 1)[0])
    else:
        punctuation = PUNCTUATION.match(line, tail.end())
        hyphen, end = words.joint(head, tail[0]), punctuation.end() if punctuation else tail.end()
    lines[-1] = lines[-1][:-1] + hyphen + line[:end]
    return line[end:].lstrip()
