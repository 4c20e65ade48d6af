"""Documents of a command line: files, folders, patterns like `*.txt` and web addresses, found, counted and read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from glob import iglob
from itertools import islice

from kvcli.commands.common.inputs import tell_notes, tell_of_file, well_formed
from kvcli.documents import BUNDLED, Document, is_address, read_document, split_pages
from kvcli.documents.decode import looks_readable
from kvcli.documents.document import Ocr
from kvcli.environment import Environment
from kvcli.errors import BadInput, UsageError, reading

MOST = 200  # documents attached at once
MOST_BYTES = 1 << 30  # of the files of a folder or a pattern together
MANY = 20_000  # files that a pattern may match
FEW = 5  # names that a note lists


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """A file to read by its name. `is_typed` is False for a file of a folder or a pattern, which alone has a size."""

    name: str
    is_typed: bool = True
    size: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options that hold for all documents of a command."""

    pages: str | None = None
    type: str | None = None
    password: str | None = None
    ocr: Ocr = "auto"


PLAIN = ReadOptions()


def find_files(world: Environment, names: Sequence[str], many: Sequence[str] = ()) -> list[DocumentFile]:
    """Return the files of names. A folder stands for its documents, a pattern for its matches, in natural order.

    `many` are more names, of which the shell may have made a pattern. Files that are left out are named in a note.
    Raises BadInput for a name without documents, and for too many.
    """
    matched = [name for name in many if len(many) > 1 and os.path.lexists(world.path(name))]
    found = list[DocumentFile]()
    for name in (*names, *(name for name in many if name not in matched)):
        inside = _inside(world, name)
        found += [DocumentFile(name)] if inside is None else _documents(world, name, inside)
    found += _documents(world, "attached files", matched) if matched else []
    size = sum(file.size for file in found)
    if len(found) > MOST or size > MOST_BYTES:
        most = f"at most {MOST} ({MOST_BYTES >> 20:,} MiB) can be attached at once"
        raise BadInput(
            f"{len(found):,} documents ({size >> 20:,} MiB) are too many: {most}",
            code="file_count",
            try_=["-f 'FOLDER/A*', in quotes, for a part of them"],
        )
    return found


def _inside(world: Environment, name: str) -> list[str] | None:
    """Return the files of a folder or pattern; None for a name of one document."""
    if is_address(name):  # before a note repeats the password of one
        from kvcli.documents.fetch import refuse_address

        refuse_address(split_pages(name)[0])
        return None
    with reading(name):
        if not name or not (set(name) & set("*?[") or world.path(name).is_dir()):
            return None
        if world.path(name).is_dir():
            return [os.path.join(name, entry.name) for entry in world.path(name).iterdir()]
        matching = iglob(os.path.expanduser(name), root_dir=world.cwd, recursive=True)
        return None if os.path.lexists(world.path(name)) else [*islice(matching, MANY)]


def _documents(world: Environment, name: str, inside: Iterable[str]) -> list[DocumentFile]:
    """Return the documents among files of a folder or pattern; the others are named in a note."""
    documents, left = list[DocumentFile](), list[str]()
    for file in sorted(inside, key=natural):
        path = world.path(file)
        try:
            is_document = path.is_file() and looks_readable(path) and not path.name.startswith(".")
            why = "hidden" if path.name.startswith(".") else "a folder" if path.is_dir() else "no document"
            documents += [DocumentFile(file, False, path.stat().st_size)] if is_document else []
        except OSError as error:
            is_document, why = False, str(error.strerror or error)
        left += [] if is_document else [f"{path.name} ({why})"]
    if left:
        more = f" and {len(left) - FEW:,} more" if len(left) > FEW else ""
        tell_of_file(world, f"{name}: not read: {', '.join(left[:FEW])}{more}")
    if not documents:
        hints = ["-f FILE", "-f FOLDER", "-f 'FOLDER/*.txt'"]
        raise BadInput(f"{name}: no documents in it", code="file_count", try_=hints)
    return documents


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which `2.txt` is before `10.txt`."""
    parts = re.split(r"([0-9]+)", name.casefold())
    numbers = [part.lstrip("0") if i % 2 else part for i, part in enumerate(parts)]
    return [(len(part) if i % 2 else 0, part) for i, part in enumerate(numbers)]


def read_files(world: Environment, files: Sequence[DocumentFile], how: ReadOptions = PLAIN) -> list[Document]:
    """Read files. One of a folder or pattern that cannot be read is left out, with a note; another raises its error."""
    documents: list[Document] = []
    for file in files:
        try:
            documents.append(read_file(world, file.name, how))
        except BadInput as error:
            if file.is_typed or len(files) == 1:
                raise
            tell_of_file(world, f"not attached: {error.message}")
        else:
            tell_notes(world, documents[-1])
    if files and not documents:
        raise BadInput(f"none of {len(files):,} documents could be read", code="file_unreadable")
    return documents


def read_file(world: Environment, name: str, how: ReadOptions = PLAIN) -> Document:
    """Read a document by its path, relative to the user's folder, its web address, or the name of a bundled one.

    `paper.pdf:3-9` selects pages.
    """
    if name == "-":
        hint = "leave out -f -: with -p, standard input is attached automatically"
        raise UsageError("--file takes a path, not -", try_=[hint, "./- for a file of that name"])
    from kvcli.render.terminal.screen import Screen
    from kvcli.render.turn.status_row import busy
    from kvcli.render.turn.turn_view import busy_word

    word = f"reading {name}"

    def on_page(n: int, of: int) -> None:
        nonlocal word
        word = f"reading {name}: page {n:,} of {of:,} by OCR"

    with busy_word(Screen.of(world), word, lambda since, width: busy(word, since, width)):
        if is_address(name):
            if world.options.offline:
                raise BadInput(f"cannot fetch {name}: --offline is set", code="not_fetched", try_=["leave it out"])
            from kvcli.documents.fetch import read_address

            return read_address(name, **asdict(how), on_page=on_page, cache=world.paths.cache)
        path = name if split_pages(name)[0] in BUNDLED else world.path(name)
        return read_document(path, name=name, **asdict(how), on_page=on_page, cache=world.paths.cache)


def read_system(world: Environment, text: str | None, file: str | None) -> str | None:
    """Return the system message from the flag or from a file."""
    if text is not None and file is not None:
        raise UsageError("--system and --system-file exclude each other", try_=["only one of them"])
    if file is not None:
        return read_file(world, file).text.rstrip("\n")
    return None if text is None else well_formed(text, "the system text")
