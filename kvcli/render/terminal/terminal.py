"""Capabilities of an output stream: its width, colour, cursor movement and characters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TextIO

from rich.cells import cell_len

from kvcli.environment import Environment, Stream
from kvcli.safe_output import Styled, neutralise

Span = tuple[str, str]  # text and style; a style is one of STYLES, or colours such as "#000000 on #ffcc00"
STYLES = {"": "", "dim": "2", "bold": "1", "red": "1;31", "yellow": "33", "green": "32", "cyan": "36"}

# one character for one, so that a layout keeps its width
ASCII = str.maketrans(
    {
        **dict(zip("▁▂▃▄▅▆▇█", "..:-=+*#", strict=True)),
        **dict(zip("·–—×━╺╸─│≈→…’“”░▒▓↵", '*--x=>>-|~>.\'"".+#|', strict=True)),
        **dict(zip("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\|/-\\|/", strict=True)),
    }
)


@lru_cache(maxsize=4096)
def cells_of(char: str) -> int:
    """Return the columns of one character. U+FE0F widens the character before it, so it counts as one column."""
    return 1 if char == "\N{VARIATION SELECTOR-16}" else cell_len(neutralise(char, one_line=True))


def text_width(text: str) -> int:
    """Return the columns of a text, never too few: too few would tear a line, too many only wrap it early."""
    return len(text) if text.isascii() else sum(map(cells_of, text))


def codes(style: str) -> str:
    """Return the codes of an escape sequence. Callers use RGB colours only if the terminal has them."""
    if style in STYLES:
        return STYLES[style]
    found, target = [], 38
    for word in style.split():
        if word == "on":
            target = 48
        else:
            found.append(";".join([f"{target};2", *(str(int(word[i : i + 2], 16)) for i in (1, 3, 5))]))
    return ";".join(found)


def quoted(line: str) -> Styled:
    """Return a foreign line with control characters escaped; its characters are not replaced by ASCII."""
    return Styled(neutralise(line, one_line=True))


@dataclass(slots=True)
class Terminal:
    """One stream. Only this class and its live region style their output."""

    stream: TextIO
    columns: Callable[[], int]
    is_tty: bool = False
    colour: bool = False
    live: bool = False  # the cursor may move: a terminal that is neither dumb nor NO_COLOR
    unicode: bool = True
    above: Callable[[Styled], None] | None = None  # set while a region is redrawn in place: lines are inserted above it

    @classmethod
    def of(cls, world: Environment, name: Stream) -> Terminal:
        """Create from the environment's information on the stream."""
        is_tty, colour = world.is_tty(name), world.has_color(name)
        can_move = is_tty and colour and world.environ.get("TERM") != "dumb"
        return cls(world.stream(name), lambda: world.width(name), is_tty, colour, can_move, world.is_utf8(name))

    @property
    def width(self) -> int:
        """Current columns, queried each time because the window may have been resized."""
        return max(1, self.columns())

    def write(self, text: str) -> None:
        """Write the text and flush. On a terminal, the stream escapes control characters of unstyled text."""
        self.stream.write(text)
        self.stream.flush()

    def paint(self, spans: Iterable[Span]) -> Styled:
        """Return spans of one line in the stream's colours and characters, with control characters escaped."""
        spans = [(neutralise(text, one_line=True), style) for text, style in spans if text]
        if not self.unicode:
            spans = [(text.translate(ASCII), style) for text, style in spans]
        if not self.colour:
            return Styled("".join(text for text, _ in spans))
        return Styled("".join(f"\x1b[{codes(style)}m{text}\x1b[0m" if style else text for text, style in spans))

    def line(self, *spans: Span) -> None:
        """Print one line of kvcli, above the live region."""
        text = self.paint(spans)
        if self.above is not None:
            self.above(text)
        else:
            self.write(Styled(text + "\n"))
