"""Output of a command: the standard stream, and files named by the user."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvcli.errors import BadInput, UsageError, writing
from kvcli.files import try_output
from kvcli.render.terminal.tables import WIDEST, columns, fitting, least
from kvcli.render.terminal.terminal import Terminal
from kvcli.safe_output import escaped, neutralise

if TYPE_CHECKING:
    from kvcli.environment import Environment
    from kvcli.schemas.base import Json

# Printing of JSON documents and tables on stdout.

GLUE = "\ue000"  # between two words that are not wrapped apart


def print_json(world: Environment, document: Json | dict[str, object]) -> None:
    """Print a document on one line. Characters that the stream cannot write or that control a terminal are escaped."""
    plain = document if isinstance(document, dict) else document.document()
    text = escaped(json.dumps(plain, ensure_ascii=not world.is_utf8("stdout")))
    Terminal.of(world, "stdout").write(f"{text}\n")


def print_table(
    world: Environment, rows: Sequence[Sequence[str]], drop: Sequence[str] = (), unbroken: Collection[str] = ()
) -> None:
    """Print table rows under their header; with --plain, only with tabs between the cells.

    On a terminal, words wrap inside their cells, except in the columns `unbroken`. If a word would be cut, columns are
    dropped in the order of `drop`.
    """
    if world.options.plain:
        print_cells(world, rows)
        return
    out = Terminal.of(world, "stdout")
    width = out.width - 1 if out.is_tty else WIDEST
    clean = [[neutralise(cell, one_line=True) for cell in row] for row in rows]
    clean = [[c.replace(" ", GLUE) if h in unbroken else c for c, h in zip(row, rows[0], strict=True)] for row in clean]
    rows = fitting(clean, width, drop, wraps=True)
    # the terminal breaks words that are too long, mostly paths, so that they can be copied
    lines = columns(rows, width if least(rows) <= width else 0, left=range(len(rows[0])))
    out.lines(line.replace(GLUE, " ") for line in lines)


def print_lines(world: Environment, lines: Iterable[str]) -> None:
    """Print lines unchanged."""
    Terminal.of(world, "stdout").lines(lines)


def print_cells(world: Environment, rows: Sequence[Sequence[str]]) -> None:
    """Print table rows for programs: a tab between two cells, and none in them."""
    for row in rows:
        Terminal.of(world, "stdout").write("\t".join(neutralise(cell, one_line=True) for cell in row) + "\n")


# The output file of `-o`. A file that cannot be written is refused before the work starts.

Form = TypeVar("Form", bound=str)


def output_file(world: Environment, typed: str, endings: Mapping[str, Form], form: Form | None) -> tuple[Path, Form]:
    """Return the file and its format: that of --format, else that of the file's suffix."""
    file = world.path(typed)
    form = form or endings.get(file.suffix.lower())
    if form is None:
        names = dict.fromkeys(endings.values())
        raise UsageError(f"-o {typed}: unknown file name extension", try_=[f"--format {name}" for name in names])
    with writing(typed, try_=["-o FILE in another folder"]):
        if file.is_dir() or not file.parent.is_dir():
            what = "it is a folder" if file.is_dir() else "its folder does not exist"
            raise BadInput(f"cannot write {typed}: {what}", code="file_unwritable", try_=["-o FILE in a folder"])
        try_output(file)
    return file, form
