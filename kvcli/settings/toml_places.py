"""Read a TOML file and remember where each key and each value stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tomli

from kvcli.settings.problems import Place, Problem
from kvcli.settings.small_file import Unfit, check_depth, read_small

if TYPE_CHECKING:
    from tree_sitter import Node

Keys = tuple[str, ...]
Level = Literal["built-in", "system", "user", "project", "--config"]
LARGEST = 1 << 20  # bytes; a device or a model given by mistake must not be read to its end


@dataclass(frozen=True, slots=True)
class Mark:
    """Where one key stands: (line, column) of the key and of its value, both from 1, and of the value's end."""

    key: tuple[int, int]
    value: tuple[int, int]
    end: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Document:
    """One parsed file. With problems, `values` is empty."""

    source: str
    text: str
    values: Mapping[str, object]
    problems: tuple[Problem, ...] = ()
    level: Level = "user"

    @cached_property
    def marks(self) -> dict[Keys, Mark]:
        return find_marks(self.text).marks

    def key_place(self, keys: Keys) -> Place:
        """Where the key is written; the nearest table around it when it has no place of its own."""
        return self._place(keys, of_value=False)

    def value_place(self, keys: Keys) -> Place:
        return self._place(keys, of_value=True)

    def _place(self, keys: Keys, of_value: bool) -> Place:
        while keys and keys not in self.marks:
            keys, of_value = keys[:-1], False
        if not keys:
            return self.place(1, 1)
        mark = self.marks[keys]
        return self.place(*(mark.value if of_value else mark.key))

    def place(self, line: int, column: int) -> Place:
        return Place(self.source, self._lines[line - 1] if line <= len(self._lines) else "", line, column)

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")


def read_document(path: Path, source: str, level: Level = "user") -> Document:
    """Read and parse a file; whatever is wrong with it is in `problems`."""
    try:
        raw = read_small(path, LARGEST)
    except Unfit as error:
        return Document(source, "", {}, (Problem(Place(source), str(error)),))
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
        problems = [Problem(Place(source), f"not readable as TOML: {why}")]
    return Document(source, text, {}, tuple(problems))


def toml_value(value: object) -> str:
    """The value as TOML writes it, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_value(v)}" for key, v in value.items()) + "}"
    return str(value)


@dataclass
class Found:
    """What a walk over the syntax tree found."""

    marks: dict[Keys, Mark] = field(default_factory=dict)
    written: dict[Keys, int] = field(default_factory=dict)  # line where a key or table header is written out
    twice: list[tuple[Keys, Mark, int]] = field(default_factory=list)  # a repeat, and the line of the first
    inside: dict[Keys, list[Keys]] = field(default_factory=dict)  # what the last element of an array of tables has


def find_marks(text: str) -> Found:
    """Positions of all keys, by tree-sitter: it goes on after an error, and it knows columns."""
    import tree_sitter
    import tree_sitter_toml

    data = text.encode()
    lines = data.split(b"\n")
    root = tree_sitter.Parser(tree_sitter.Language(tree_sitter_toml.language())).parse(data).root_node
    found = Found()
    for node in root.named_children:
        if node.type == "pair":
            _pair(node, (), lines, found)
        elif node.type in ("table", "table_array_element") and node.named_children:
            _table(node, lines, found)
    return found


def _table(node: Node, lines: list[bytes], found: Found) -> None:
    key, *rest = node.named_children
    keys = _record((), key, None, lines, found, repeatable=node.type == "table_array_element")
    for child in rest:
        if child.type == "pair":
            _pair(child, keys, lines, found)


def _pair(node: Node, above: Keys, lines: list[bytes], found: Found) -> None:
    parts = [child for child in node.named_children if child.type != "comment"]
    if len(parts) != 2:  # a broken line; the TOML parser has its own words for it
        return
    key, value = parts
    keys = _record(above, key, value, lines, found)
    if value.type == "inline_table":
        for child in value.named_children:
            if child.type == "pair":
                _pair(child, keys, lines, found)


def _record(
    above: Keys, key: Node, value: Node | None, lines: list[bytes], found: Found, *, repeatable: bool = False
) -> Keys:
    """Note a key below `above` and the tables that a dotted key names on the way; returns its full path."""
    names = _names(key)
    keys = above + tuple(name for name, _ in names)
    for n, (_, node) in enumerate(names[:-1], len(above) + 1):
        at = _at(node, lines)
        found.marks.setdefault(keys[:n], Mark(at, at))
    at = _at(names[-1][1], lines)
    mark = Mark(at, *((_at(value, lines), _place(value.end_point, lines)) if value is not None else (at,)))
    if repeatable:  # each element of an array of tables may give the same keys
        for inner in [keys, *found.inside.get(keys, ())]:
            found.written.pop(inner, None)
        found.inside[keys] = []
    if keys in found.written:
        found.twice.append((keys, mark, found.written[keys]))
    else:
        found.written[keys] = at[0]
        for n in range(1, len(keys)):
            if keys[:n] in found.inside:
                found.inside[keys[:n]].append(keys)
        found.marks[keys] = mark
    return keys


def _names(key: Node) -> list[tuple[str, Node]]:
    """The names of a key, dotted or not, each with its node."""
    if key.type == "dotted_key":
        return [name for child in key.named_children for name in _names(child)]
    written = (key.text or b"").decode()
    if key.type != "quoted_key":
        return [(written, key)]
    try:
        return [(name, key) for name in tomli.loads(f"{written} = 0")]
    except tomli.TOMLDecodeError:
        return [(written, key)]


def _at(node: Node, lines: list[bytes]) -> tuple[int, int]:
    return _place(node.start_point, lines)


def _place(point: tuple[int, int], lines: list[bytes]) -> tuple[int, int]:
    row, column = point  # the column counts bytes
    return row + 1, len(lines[row][:column].decode(errors="replace")) + 1


def _twice(text: str, source: str) -> list[Problem]:
    try:
        found = find_marks(text)
    except RecursionError:  # then the parser's own words do, which have the line
        return []
    document = Document(source, text, {})
    return [
        Problem(document.place(*mark.key), "given twice", ".".join(keys), f"first given on line {line}")
        for keys, mark, line in found.twice
    ]
