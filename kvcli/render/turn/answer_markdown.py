"""Markdown of an answer on a terminal: each finished block is rendered, and the running one is shown as written."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

from kvcli.render.terminal.terminal import Wrapper, expand, fold, text_width
from kvcli.safe_output import Styled, neutralise

ROWS = 6  # rows of the running block on the screen, the latest ones
NARROW = 20  # columns of a nested list, at least
# rules that would drop characters of the answer: backslashes, entities, brackets, addresses of images and references
DROPPING = ["escape", "entity", "autolink", "image", "reference"]
ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])( {1,4}|$)")
DEEP = re.compile(r"^ {0,3}>([ \t]*([>*+-]|\d{1,9}[.)])){19}", re.MULTILINE)  # the parser drops deeper text
CODE = r"\x1b\[[\d;]*m"
LOOKS = {"code": "cyan", "h1": "bold", "h2": "bold", "h3": "bold", "h4": "bold", "h5": "bold", "link_url": "underline"}


class MarkdownWrapper(Wrapper):
    """The blocks that are not finished; rendered lines of finished ones have been returned.

    Lines of code are returned as written, however long, so that they can be copied from the terminal.
    """

    def feed(self, text: str, width: int) -> list[str]:
        written = (self.tail.rpartition("\n")[2] + text).split("\n")[:-1]
        self.tail += text
        if all(line[:1] in ("", " ", "\t") for line in written):  # no line of these begins a block
            return []
        lines = neutralise(self.tail).split("\n")
        blocks = self._blocks(lines[:-1])  # the last line may go on
        end = blocks[-1][0] if blocks else 0  # and so may the last block
        self.tail = "\n".join(lines[end:])
        return list(self._rendered(lines[:end], width))

    def rows(self, width: int) -> list[str]:
        return [line for part in self.tail.split("\n")[-ROWS:] for line in map(expand, fold(part, width))][-ROWS:]

    def flush(self, width: int) -> list[str]:
        lines, self.tail = neutralise(self.tail.rstrip()).split("\n"), ""
        return list(self._rendered(lines, width)) if any(lines) else []

    def _blocks(self, lines: list[str]) -> list[tuple[int, Any]]:
        """Return the first line of each block, and its token; each item of a list is a block."""
        tokens = (token for token in self._parser.parse("\n".join(lines)) if token.map and token.nesting >= 0)
        item, *lists = "list_item_open", "bullet_list_open", "ordered_list_open"
        return [(t.map[0], t) for t in tokens if (t.type == item if t.level else t.type not in lists) and t.level < 2]

    def _rendered(self, lines: list[str], width: int) -> Iterator[Styled]:
        """Yield the rendered lines of whole blocks, with one empty line where there are any between two."""
        blocks = self._blocks(lines)
        yield from [Styled("")] * bool(blocks and blocks[0][0])  # the empty line after the block before
        for (start, token), (end, _) in pairwise([*blocks, (len(lines), None)]):
            written = lines[start:end]
            while written and not written[-1].strip():
                written.pop()
            if token.type in ("fence", "code_block"):
                yield from (Styled(filled(expand(line), width + 1)) for line in written)
            elif token.type == "list_item_open" and (mark := ITEM.match(written[0])):
                sign = "• " if mark[1] in "-*+" else f"{mark[1]} "
                inner = [written[0][mark.end() :], *(cut(line, mark.end()) for line in written[1:])]
                for i, line in enumerate(list(self._inner(inner, width - len(sign))) or [""]):
                    yield Styled(((" " * len(sign) if i else sign) + line).rstrip())
            else:
                yield from self._leaf("\n".join(written), width)
            yield from [Styled("")] * bool(start + len(written) < end)

    def _inner(self, lines: list[str], width: int) -> Iterator[str]:
        """Yield the lines of a list item, as written where no columns are left for deeper lists."""
        return self._rendered(lines, width) if width >= NARROW else (s for line in lines for s in fold(line, NARROW))

    def _leaf(self, text: str, width: int) -> Iterator[Styled]:
        """Yield the lines of a paragraph, heading, quote, table or rule; deep quotes as written."""
        if DEEP.search(text):
            yield from (Styled(row) for line in text.split("\n") for row in fold(line, width))
            return
        from rich.console import Console
        from rich.markdown import Markdown
        from rich.theme import Theme

        markdown = Markdown("", hyperlinks=False)
        markdown.parsed = self._parser.parse(text)
        for token in markdown.parsed:
            token.tag = "h2" if token.tag == "h1" else token.tag  # rich would center it
            for child in token.children or ():
                child.type = "hardbreak" if child.type == "softbreak" else child.type  # as written: verses, addresses
        theme = Theme({f"markdown.{name}": look for name, look in LOOKS.items()})
        console = Console(
            file=io.StringIO(), width=width, color_system="standard", force_terminal=True, theme=theme, _environ={}
        )
        with console.capture() as shown:
            console.print(markdown)
        # rich pads lines, and begins and ends a table with an empty one
        lines = (
            re.sub(rf"(?: |{CODE})+$", lambda end: end[0].replace(" ", ""), line) for line in shown.get().split("\n")
        )
        yield from (Styled(line) for line in lines if re.sub(CODE, "", line))

    @cached_property
    def _parser(self) -> Any:
        from markdown_it import MarkdownIt

        return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable(DROPPING)


def filled(line: str, columns: int) -> str:
    """Return the line, one space longer if it fills its last row: a terminal would lose its last character."""
    return line + " " * (bool(line) and text_width(line) % columns == 0)


def cut(line: str, indent: int) -> str:
    """Return the line without its first spaces, at most `indent`."""
    return line[min(indent, len(line) - len(line.lstrip(" "))) :]
