"""TOML reader that records the position of each key and value."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import tomli

from kvcli.settings.problems import Problem, SourcePosition
from kvcli.settings.small_file import Unfit, check_depth, read_small

Keys = tuple[str, ...]
Level = Literal["built-in", "system", "user", "project", "--config"]
LARGEST = 1 << 20  # bytes; a device or a model given by mistake must not be read to its end


@dataclass(frozen=True, slots=True)
class KeyPosition:
    """Position of one key: (line, column) of the key, of its value, and of the value's end, from 1."""

    key: tuple[int, int]
    value: tuple[int, int]
    end: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Document:
    """A parsed file. With problems, `values` is empty."""

    source: str
    text: str
    values: Mapping[str, object]
    problems: tuple[Problem, ...] = ()
    level: Level = "user"

    @cached_property
    def marks(self) -> dict[Keys, KeyPosition]:
        return Scan(self.text).marks

    def key_place(self, keys: Keys) -> SourcePosition:
        """Position of the key; that of the nearest enclosing table if the key has none."""
        return self._place(keys, of_value=False)

    def value_place(self, keys: Keys) -> SourcePosition:
        return self._place(keys, of_value=True)

    def _place(self, keys: Keys, of_value: bool) -> SourcePosition:
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
