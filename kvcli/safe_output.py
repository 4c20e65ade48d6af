"""The one way to a terminal: text from anywhere becomes harmless there, and only what is `Styled` steers it."""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import suppress
from typing import TextIO

BROKEN = "\N{REPLACEMENT CHARACTER}"  # how decoders write bytes that are not, or not yet, a character

_PICTURES = {c: chr(0x2400 + c) for c in range(32) if c not in (9, 10)} | {127: "\N{SYMBOL FOR DELETE}"}
# C1 controls, separators of lines and paragraphs with overrides, isolates and what else is unseen format, halves of
# characters, the mark of byte order, and tags, which nobody sees, but for those of flags. Marks of direction (RLM, LRM,
# ALM) and joiners stay: they do no more than a letter of Hebrew, Arabic or Hindi does.
_RANGES = [(0x80, 0xA0), (0x2028, 0x202F), (0x2066, 0x2070), (0xD800, 0xE000), (0xFEFF, 0xFF00), (0xE0000, 0xE0080)]
_FLAGS = re.compile("(\U0001f3f4[\U000e0061-\U000e007a]{3,6}\U000e007f)")
_SIGNS = dict.fromkeys([c for first, end in _RANGES for c in range(first, end)], BROKEN)
_HARMLESS = _PICTURES | _SIGNS
_ONE_LINE = _HARMLESS | {9: " ", 10: "\N{SYMBOL FOR NEWLINE}"}
_ESCAPED = {c: json.dumps(chr(c))[1:-1] for c in (127, *_SIGNS)}
_BARS = re.compile(r"(\r|\x1b\[A|\x1b\[[0-9;]*m)")  # what progress bars and coloured help are drawn with


def neutralise(text: str, *, one_line: bool = False) -> str:
    """Text that cannot steer a terminal: controls, escapes and direction overrides become visible signs.

    Newlines and tabs stay, unless `one_line`, which is for names. One sign for one character.
    """
    pieces = _FLAGS.split(text)
    signs = _ONE_LINE if one_line else _HARMLESS
    return "".join(piece if i % 2 else piece.translate(signs) for i, piece in enumerate(pieces))


def escaped(document: str) -> str:
    """The same JSON, in which what would steer a terminal is written as \\uXXXX."""
    return document.translate(_ESCAPED)


class Styled(str):
    """Text that may steer a terminal. Any other string is neutralised where it is written; what joins two is other."""

    __slots__ = ()


class SafeStream(io.TextIOBase):
    """One output stream of the program. To a file or a pipe text goes as it is, to a terminal it goes harmless."""

    def __init__(self, stream: TextIO, *, is_vital: bool) -> None:
        """`is_vital`: a write that fails is an error. What else is lost is words about the work, not the work."""
        self.stream, self.is_vital = stream, is_vital
        self.lost: OSError | None = None  # why nothing can be written any more
        self.has_written = False

    def write(self, text: str) -> int:
        """Write it. What the stream cannot encode becomes `?`."""
        if not isinstance(text, Styled) and self.isatty():
            text = neutralise(text.replace("\r\n", "\n"))
        if self.lost is not None:
            self._failed(self.lost)
        self.has_written = True
        try:
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                encoding = self.encoding or "utf-8"
                self.stream.write(text.encode(encoding, "replace").decode(encoding))
        except OSError as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        if self.lost is not None:
            self._failed(self.lost)
        try:
            self.stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if self.lost is None:
            self.lost = error
            error.filename = error.filename or "the output"
            # Python keeps what it could not write and tries again at the end of the program: let that go nowhere
            with suppress(OSError, ValueError):  # streams of the tests have no number
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
        if self.is_vital or isinstance(error, BrokenPipeError):
            raise error

    def isatty(self) -> bool:
        """Whether the stream is a terminal; a closed or missing one is not."""
        try:
            return self.stream.isatty()
        except (AttributeError, ValueError):
            return False

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "ascii"


class LibraryStream(SafeStream):
    """What libraries write to an outlet: they draw bars and colour help, and nothing else of theirs steers."""

    def __init__(self, outlet: TextIO) -> None:
        super().__init__(outlet, is_vital=True)

    def write(self, text: str) -> int:
        if self.isatty():
            pieces = _BARS.split(text)
            text = Styled("".join(piece if i % 2 else neutralise(piece) for i, piece in enumerate(pieces)))
        self.stream.write(text)
        return len(text)
