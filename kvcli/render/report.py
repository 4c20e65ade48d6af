"""Blocks of a report, made once, and their writers: lines for a terminal, and Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcli.render.terminal.tables import columns, widest
from kvcli.render.terminal.terminal import fold
from kvcli.safe_output import neutralise

NONE = "–"  # cell without a value


@dataclass(frozen=True)
class Text:
    """A sentence or more. A heading is above its table, and a caption below it; items and notes are lists."""

    kind: Literal["title", "heading", "caption", "paragraph", "code", "item", "note"]
    text: str

    def terminal(self, width: int) -> list[str]:
        return fold(f"note: {self.text}" if self.kind == "note" else self.text, width)

    def markdown(self) -> list[str]:
        text = self.text if self.kind == "code" else _cell(self.text)
        forms = {"title": "**{}**\n", "heading": "\n{}:", "paragraph": "\n{}", "code": "\n```\n{}\n```\n"}
        return [forms.get(self.kind, "{}" if self.kind == "caption" else "- {}").format(text)]


@dataclass(frozen=True)
class ReportTable:
    """Lines of cells, the header first. One that is too wide for a terminal is split, or else its words wrap."""

    lines: Sequence[Sequence[str]]
    is_split: bool = True
    kind: ClassVar[str] = "table"

    def terminal(self, width: int) -> list[str]:
        return stacked(self.lines, width) if self.is_split else columns(self.lines, width)

    def markdown(self) -> list[str]:
        head, *rest = (f"| {' | '.join(map(_cell, line))} |" for line in self.lines)
        return ["", head, "|---" + "|---:" * (len(self.lines[0]) - 1) + "|", *rest, ""]


Block = Text | ReportTable


def terminal_lines(blocks: Iterable[Block], width: int) -> list[str]:
    """Return the lines of a report, each at most `width` columns wide."""
    lines, before = list[str](), ""
    for block in blocks:
        is_below = before in ("table", "caption") and block.kind != "caption"
        is_apart = is_below or block.kind in ("heading", "paragraph")
        lines += [*([""] if lines and is_apart else []), *block.terminal(width)]
        before = block.kind
    return lines


def markdown(blocks: Iterable[Block]) -> str:
    """Return a report in Markdown, with a newline at the end."""
    text = "\n".join(line for block in blocks for line in block.markdown())
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def stacked(lines: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return a table, split into pieces below each other if it is too wide; each piece has the first column."""
    done, out = 1, list[str]()
    while done < len(lines[0]):
        end = len(lines[0])
        while end > done + 1 and widest(columns(_piece(lines, done, end))) > width:
            end -= 1
        out += [*([""] if out else []), *columns(_piece(lines, done, end), width)]
        done = end
    return out


def _piece(lines: Sequence[Sequence[str]], start: int, end: int) -> list[list[str]]:
    return [[line[0], *line[start:end]] for line in lines]


def _cell(text: str) -> str:
    return neutralise(text, one_line=True).replace("|", "\\|")
