"""Capabilities of an output stream: its width, colour, cursor movement and characters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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

    def lines(self, texts: Iterable[str], style: str = "") -> None:
        """Print lines of one style."""
        for text in texts:
            self.line((text, style))


# Wrap text at word ends as it arrives; each finished line is returned once.

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

    def rows(self, width: int) -> list[str]:
        """Return the tail as displayed, at least one row: spaces beyond the width are left out."""
        line = expand(self.tail)
        return [line if text_width(line) <= width else line.rstrip()]

    def flush(self, width: int) -> list[str]:
        """Return the lines that were held back, before a line of other text; there are none."""
        return []

    def rest(self) -> str:
        """Return and clear the tail at the end of the text."""
        line, self.tail = expand(self.tail).rstrip(), ""
        return line


# Number formats for people: counts, sizes and times.

KIB, UNITS = 1024, "KMGTP"
TIERS = {"cpu": "host", "cuda": "GPU", "mps": "GPU", "packed": "quantized", "packed cuda": "quantized GPU"}
ORDERS = {"chunks": "in chunks", "layers": "layer by layer"}


def count(n: int) -> str:
    return f"{n:,}"


def plural(n: int, noun: str) -> str:
    """Return `1 line`, `1,024 lines`."""
    return f"{count(n)} {noun}{'' if n == 1 else 's'}"


def long_size(n: float) -> str:
    """Return `17.1 MiB` in the largest unit that keeps the value above 1; the smallest unit is a KiB."""
    value, unit = n / KIB, UNITS[0]
    for unit in UNITS:
        # 999.5, not 1024: "1,012 MiB" is wider than any other figure and would make the layout jump
        if value < 999.5 or unit == UNITS[-1]:
            break
        value /= KIB
    digits = 1 if unit != "K" and value < 99.95 else 0
    return f"{value:.{digits}f} {unit}iB"


def tiers(kv: Mapping[str, int]) -> str:
    """Return `17.1 MiB` for one tier, `4.4 MiB GPU + 12.0 MiB host` for several."""
    used = [(TIERS.get(name, name), size) for name, size in kv.items() if size]
    if len(used) < 2:
        return long_size(sum(size for _, size in used))
    return " + ".join(f"{long_size(size)} {name}" for name, size in used)


def seconds(s: float) -> str:
    """Return `0.88 s`, `2.9 s`, `2 min 05 s`."""
    if s < 0.995:
        return f"{s:.2f} s"
    if s < 99.95:
        return f"{s:.1f} s"
    minutes, rest = divmod(round(s), 60)
    return f"{minutes} min {rest:02d} s"


def clock(s: float) -> str:
    """Return the remaining time: `0:07`, `12:05`, `1:00:09`."""
    minutes, rest = divmod(max(0, round(s)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def rate(per_second: float) -> str:
    """Return `24.1 tok/s` below a thousand, `1,760 tok/s` above."""
    return f"{per_second:.1f} tok/s" if per_second < 999.95 else f"{per_second:,.0f} tok/s"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"
