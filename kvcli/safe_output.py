"""Output to terminals: text from anywhere is made harmless, and only `Styled` text may control the terminal."""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import suppress
from typing import TextIO

BROKEN = "\N{REPLACEMENT CHARACTER}"  # character that decoders write for bytes that are not, or not yet, a character

_PICTURES = {c: chr(0x2400 + c) for c in range(32) if c not in (9, 10)} | {127: "\N{SYMBOL FOR DELETE}"}
# C1 controls, line and paragraph separators with overrides, isolates and other invisible format characters, surrogates,
# the byte order mark, and invisible tags except those of flags. Direction marks (RLM, LRM, ALM) and joiners are kept:
# they do no more than a letter of Hebrew, Arabic or Hindi does.
_RANGES = [(0x80, 0xA0), (0x2028, 0x202F), (0x2066, 0x2070), (0xD800, 0xE000), (0xFEFF, 0xFF00), (0xE0000, 0xE0080)]
_FLAGS = re.compile("(\U0001f3f4[\U000e0061-\U000e007a]{3,6}\U000e007f)")
_SIGNS = dict.fromkeys([c for first, end in _RANGES for c in range(first, end)], BROKEN)
_HARMLESS = _PICTURES | _SIGNS
_ONE_LINE = _HARMLESS | {9: " ", 10: "\N{SYMBOL FOR NEWLINE}"}
_ESCAPED = {c: json.dumps(chr(c))[1:-1] for c in (127, *_SIGNS)}
_BARS = re.compile(r"(\r|\x1b\[A|\x1b\[[0-9;]*m)")  # characters that draw progress bars and coloured help


def neutralise(text: str, *, one_line: bool = False) -> str:
    """Make text harmless for a terminal: controls, escapes and direction overrides become visible signs.

    Newlines and tabs are kept, unless `one_line`, which is for names. One sign replaces one character.
    """
    pieces = _FLAGS.split(text)
    signs = _ONE_LINE if one_line else _HARMLESS
    return "".join(piece if i % 2 else piece.translate(signs) for i, piece in enumerate(pieces))


def escaped(document: str) -> str:
    """Return the same JSON, in which characters that would control a terminal are written as \\uXXXX."""
    return document.translate(_ESCAPED)


class Styled(str):
    """Text that may control a terminal. Other strings are neutralised when written, and so are joined ones."""

    __slots__ = ()


class SafeStream(io.TextIOBase):
    """An output stream of the program. Text is unchanged to a file or pipe, and made harmless to a terminal."""

    def __init__(self, stream: TextIO, *, is_vital: bool) -> None:
        """`is_vital`: a failed write is an error. Other streams only carry messages about the work."""
        self.stream, self.is_vital = stream, is_vital
        self.lost: OSError | None = None  # why nothing can be written any more
        self.has_written = False

    def write(self, text: str) -> int:
        """Write text. Characters that the stream cannot encode become `?`."""
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
            # Python retries unwritten text at the end of the program: redirect it to the null device
            with suppress(OSError, ValueError):  # streams of the tests have no number
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
        if self.is_vital or isinstance(error, BrokenPipeError):
            raise error

    def isatty(self) -> bool:
        """True if the stream is a terminal; a closed or missing one is not."""
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
    """Stream for output of libraries: progress bars and coloured help pass, other control characters do not."""

    def __init__(self, outlet: TextIO) -> None:
        super().__init__(outlet, is_vital=True)

    def write(self, text: str) -> int:
        if self.isatty():
            pieces = _BARS.split(text)
            text = Styled("".join(piece if i % 2 else neutralise(piece) for i, piece in enumerate(pieces)))
        self.stream.write(text)
        return len(text)
