"""Reader of small untrusted files: regular, of bounded size and depth, UTF-8, finite numbers."""

from __future__ import annotations

import json
import math
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

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
