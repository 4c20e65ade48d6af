"""Reader of small untrusted files: regular, of bounded size and depth, UTF-8, finite numbers."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import tomli

from kvcli.settings.problems import Problem, SourcePosition

DEEPEST = 64  # levels of JSON; nobody writes this many by hand, and JSON readers recurse
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class Unfit(ValueError):
    """Error of an unusable file. The message is the end of a sentence that begins with the file's name."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. A pipe is refused, because it would block the reader. Raises Unfit."""
    try:
        # without O_NONBLOCK the call itself waits until somebody writes to a pipe
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = "is a folder, not a file" if os.path.isdir(path) else f"cannot be read: {_said(error)}"
        raise Unfit(why) from error
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise Unfit(f"is {_KINDS.get(kind, 'a device')}, not a file")
    return os.fdopen(handle, "rb")


def read_small(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes. Raises Unfit."""
    with open_regular(path) as file:
        try:
            raw = file.read(most + 1)
        except OSError as error:
            raise Unfit(f"cannot be read: {_said(error)}") from error
    if len(raw) > most:
        raise Unfit(f"is larger than {most >> 20} MiB")
    return raw


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse bytes as a JSON object. Raises Unfit."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_float=_finite)
        check_depth(value)
    except (ValueError, RecursionError) as error:  # from JSON, from UTF-8, or from a number with thousands of digits
        raise Unfit(f"is not JSON: {_TOO_DEEP if isinstance(error, RecursionError) else error}") from error
    if not isinstance(value, dict):
        raise Unfit("holds no JSON object")
    return value


def check_depth(value: object) -> None:
    """Raise Unfit if lists and tables are nested too deeply for recursive code."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner for v in level if isinstance(v, dict | list) for inner in (v.values() if isinstance(v, dict) else v)
        ]
        if not level:
            return
    raise Unfit(_TOO_DEEP)


_TOO_DEEP = f"it is nested deeper than {DEEPEST} levels"


def _finite(text: str) -> float:
    """Parse a number and refuse 1e999. `Infinity` is allowed, because Python writes it; users of a number check it."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


# TOML reader that records the position of each key and value.

Keys = tuple[str, ...]
Level = Literal["built-in", "system", "user", "project", "--config", "typed"]
LARGEST = 1 << 20  # bytes; a device or a model given by mistake must not be read to its end


@dataclass(frozen=True, slots=True)
class KeyPosition:
    """Position of one key: (line, column) of the key, of its value, and of the value's end, from 1."""

    key: tuple[int, int]
    value: tuple[int, int]
    end: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Document:
    """A parsed file, or typed text of one line. With problems, `values` is empty."""

    source: str
    text: str
    values: Mapping[str, object]
    problems: tuple[Problem, ...] = ()
    level: Level = "user"
    profile: str = ""  # its name, if the whole file is a profile
    value_column: int = 1  # of typed text, whose key is at its beginning

    @cached_property
    def marks(self) -> dict[Keys, KeyPosition]:
        return Scan(self.text).marks

    def place_of(self, keys: Keys, *, of_value: bool = False) -> SourcePosition:
        """Position of the key or its value; that of the nearest enclosing table if the key has none."""
        if self.level == "typed":
            column = self.value_column if of_value else 1
            return SourcePosition(self.source, self.text, column=column, is_file=False)
        while keys and keys not in self.marks:
            keys, of_value = keys[:-1], False
        if not keys:
            return self.place(1, 1)
        mark = self.marks[keys]
        return self.place(*(mark.value if of_value else mark.key))

    def place(self, line: int, column: int) -> SourcePosition:
        return SourcePosition(self.source, self._lines[line - 1] if line <= len(self._lines) else "", line, column)

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")


def read_document(path: Path, source: str, level: Level = "user") -> Document:
    """Read and parse a file; errors are in `problems`."""
    try:
        raw = read_small(path, LARGEST)
    except Unfit as error:
        return Document(source, "", {}, (Problem(SourcePosition(source), str(error)),))
    return decode_document(raw, source, level)


def decode_document(raw: bytes, source: str, level: Level = "user") -> Document:
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8-sig")
        text = raw.decode("utf-8-sig", errors="replace")
        at = Document(source, text, {}).place(before.count("\n") + 1, len(before) - before.rfind("\n"))
        byte = f"byte 0x{raw[error.start]:02x} is not UTF-8 text"
        return Document(source, text, {}, (Problem(at, byte, hint="save the file as UTF-8"),))
    return parse_document(text, source, level)


def parse_document(text: str, source: str, level: Level = "user") -> Document:
    try:
        values = tomli.loads(text)
        check_depth(values)
        return Document(source, text, values, level=level)
    except tomli.TOMLDecodeError as error:
        problems = _twice(text, source) if error.msg.startswith("Cannot") else []
        if not problems:
            at = Document(source, text, {}).place(error.lineno, error.colno)
            problems = [Problem(at, f"not valid TOML: {error.msg[:1].lower()}{error.msg[1:]}")]
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets thousands deep
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        problems = [Problem(SourcePosition(source), f"not readable as TOML: {why}")]
    return Document(source, text, {}, tuple(problems))


def toml_value(value: object) -> str:
    """Format a value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_value(v)}" for key, v in value.items()) + "}"
    return str(value)


STRING = r"""'{3}.*?'{3,5}|'[^'\n]*'|"{3}(?:\\.|[^\\])*?"{3,5}|"(?:\\.|[^"\\\n])*\""""
BLANK = re.compile(r"(?:[\s,\]]|#[^\n]*)*")  # between two keys
NAME = re.compile(rf"[ \t]*({STRING}|[\w-]+)[ \t]*(\.?)", re.DOTALL)
VALUE = re.compile(rf"=[ \t]*({STRING}|[\[{{]|[^,\]}}#\n]*)", re.DOTALL)  # for a value in brackets, the bracket
TOKEN = re.compile(rf"{STRING}|#[^\n]*|[\[{{]|[\]}}]", re.DOTALL)  # tokens of a value in brackets


class Scan:
    """Positions of keys and values of a TOML text, found in one pass that continues after a broken line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.marks: dict[Keys, KeyPosition] = {}
        self.twice: list[tuple[Keys, KeyPosition, int]] = []  # a repeat, and the line of the first
        self._lines = [0, *(newline.end() for newline in re.finditer("\n", text))]  # start of each line
        self._written: dict[Keys, int] = {}  # line where a key or table header is written out
        self._inside: dict[Keys, list[Keys]] = {}  # keys of the last element of an array of tables
        self._read(0, len(text), ())

    def _read(self, at: int, end: int, table: Keys) -> None:
        """Record the keys between two offsets: those of the file, or those of a table in braces."""
        text = self.text
        while (at := BLANK.match(text, at).end()) < end:  # type: ignore[union-attr]  # it matches an empty string too
            brackets = 2 if text.startswith("[[", at) else int(text.startswith("[", at))
            names, at = self._names(at + brackets)
            if names and brackets:
                table = self._note((), names, None, repeatable=brackets == 2)
            elif names and (value := VALUE.match(text, at)):
                start = value.start(1)
                at = self._closing(start) if value[1] in ("[", "{") else start + len(value[1].rstrip())
                keys = self._note(table, names, (start, at))
                if value[1] == "{":
                    self._read(value.end(), at - 1, keys)
            else:  # the TOML parser reports broken lines
                at = (text.find("\n", at) + 1) or len(text)

    def _names(self, at: int) -> tuple[list[tuple[str, int]], int]:
        """Parse the names of a key, dotted or not, each with its offset; and return the end of the key."""
        names: list[tuple[str, int]] = []
        while match := NAME.match(self.text, at):
            try:
                (name,) = tomli.loads(f"{match[1]} = 0")
            except tomli.TOMLDecodeError:
                name = match[1]
            names.append((name, match.start(1)))
            at = match.end()
            if not match[2]:
                break
        return names, at

    def _closing(self, at: int) -> int:
        """Offset at which the brackets that open at an offset are closed."""
        depth = 0
        for token in TOKEN.finditer(self.text, at):
            depth += (token[0] in "[{") - (token[0] in "]}")
            if not depth:
                return token.end()
        return len(self.text)

    def _note(
        self, table: Keys, names: list[tuple[str, int]], value: tuple[int, int] | None, *, repeatable: bool = False
    ) -> Keys:
        """Record a key of a table and the tables that a dotted key passes through; return its full path."""
        keys = table + tuple(name for name, _ in names)
        for n, (_, offset) in enumerate(names[:-1], len(table) + 1):
            self.marks.setdefault(keys[:n], KeyPosition(self._place(offset), self._place(offset)))
        at = self._place(names[-1][1])
        mark = KeyPosition(at, *(map(self._place, value) if value else (at,)))
        if repeatable:  # each element of an array of tables may have the same keys
            for inner in [keys, *self._inside.get(keys, ())]:
                self._written.pop(inner, None)
            self._inside[keys] = []
        if keys in self._written:
            self.twice.append((keys, mark, self._written[keys]))
            return keys
        self._written[keys], self.marks[keys] = at[0], mark
        for n in range(1, len(keys)):
            if keys[:n] in self._inside:
                self._inside[keys[:n]].append(keys)
        return keys

    def _place(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self._lines, offset)
        return line, offset - self._lines[line - 1] + 1


def _twice(text: str, source: str) -> list[Problem]:
    try:
        found = Scan(text)
    except RecursionError:  # the TOML parser reports this error, with its line
        return []
    document = Document(source, text, {})
    return [
        Problem(document.place(*mark.key), "given twice", ".".join(keys), f"first given on line {line}")
        for keys, mark, line in found.twice
    ]
