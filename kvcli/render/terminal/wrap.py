"""Wrap text at word ends as it arrives; each finished line is returned once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvcli.render.terminal.terminal import Span, cells_of, text_width

TAB = 8  # columns


def expand(line: str) -> str:
    """Replace tabs by spaces, counted in columns: str.expandtabs counts characters and fails after wide ones."""
    if "\t" not in line:
        return line
    done = ""
    for i, piece in enumerate(line.split("\t")):
        if i:
            done += " " * (TAB - text_width(done) % TAB)
        done += piece
    return done


def fold(text: str, width: int) -> list[str]:
    """Split into lines of at most `width` columns, at least one; only the last can still grow.

    Trailing spaces may exceed the width. A word longer than a line is cut, and wide characters break anywhere.
    """
    if "\t" not in text and text_width(text) <= width:
        return [text]
    lines: list[str] = []
    start = gap = column = 0  # start of the line, possible cut, columns so far
    for i, char in enumerate(text):
        size = TAB - column % TAB if char == "\t" else cells_of(char)
        if char in " \t":
            column, gap = column + size, i + 1
            continue
        if size == 2:
            gap = i
        if size and column + size > width and i > start:
            cut = gap if text[start:gap].strip() else i
            lines.append(text[start:cut].rstrip())
            start = gap = cut
            column = text_width(expand(text[start:i]))
        column += size
        if size == 2:
            gap = i + 1
    return [*lines, text[start:]]


def folded(text: str, width: int, indent: int = 0) -> list[str]:
    """Wrap for a terminal of `width` columns, `indent` of which are used: its last column stays free."""
    return [line.rstrip() for line in fold(text, max(20, width - 1 - indent))]


def styled(text: str, width: int, style: str) -> Iterator[list[Span]]:
    """Wrap as `folded` does, and return lines of one style."""
    return ([(line, style)] for line in folded(text, width))


@dataclass(slots=True)
class Wrapper:
    """The unfinished last line; completed lines have been returned."""

    tail: str = ""

    def feed(self, text: str, width: int) -> list[str]:
        """Add text and return the lines it completed. `width` may differ from call to call."""
        *complete, self.tail = (self.tail + text).split("\n")
        lines = [expand(line.rstrip()) for whole in complete for line in fold(whole, width)]
        *folded, self.tail = fold(self.tail, width)
        return lines + [expand(line) for line in folded]

    def shown(self, width: int) -> str:
        """Return the tail as displayed: spaces beyond the width are left out."""
        line = expand(self.tail)
        return line if text_width(line) <= width else line.rstrip()

    def rest(self) -> str:
        """Return and clear the tail at the end of the text."""
        line, self.tail = expand(self.tail).rstrip(), ""
        return line
