"""Documents of a command line: files, folders, patterns like `*.txt` and web addresses, found, counted and read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from glob import iglob
from itertools import islice
from pathlib import Path

from kvcli.commands.common.inputs import tell, tell_notes, well_formed
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
    """A file to read by its name. `is_typed` is False for a file of a folder or a pattern."""

    name: str
    is_typed: bool = True


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
    found, matched = list[DocumentFile](), many if len(many) > 1 else ()
    matched = [name for name in matched if os.path.lexists(world.cwd / os.path.expanduser(name))]
    for name in (*names, *(name for name in many if name not in matched)):
        path = world.cwd / os.path.expanduser(name)
        if is_address(name) or name in BUNDLED:
            found.append(DocumentFile(name))
            continue
        with reading(name):
            if path.is_dir():
                inside = [os.path.join(name, entry.name) for entry in path.iterdir()]
            elif set(name) & set("*?[") and not os.path.lexists(path):
                matching = iglob(os.path.expanduser(name), root_dir=world.cwd, recursive=True)
                inside = [*islice(matching, MANY)]
            else:
                found.append(DocumentFile(name))
                continue
        found += [DocumentFile(file, is_typed=False) for file in _documents(world, name, inside)]
    if matched:
        found += [DocumentFile(file, is_typed=False) for file in _documents(world, "attached files", matched)]
    if len(found) > MOST:
        raise _too_many(f"{len(found):,} documents are named", f"{MOST} documents")
    return found


def _documents(world: Environment, name: str, inside: Iterable[str]) -> list[str]:
    """Return the documents among files of a folder or pattern; the others are named in a note."""
    documents, left, size = list[str](), list[str](), 0
    for file in sorted(inside, key=natural):
        path = Path(world.cwd / os.path.expanduser(file))
        if (why := _no_document(path)) is None:
            documents.append(file)
            size += path.stat().st_size
        else:
            left.append(f"{path.name} ({why})")
    if left:
        more = f" and {len(left) - FEW:,} more" if len(left) > FEW else ""
        tell(world, f"{name}: not read: {', '.join(left[:FEW])}{more}")
    if not documents:
        raise BadInput(
            f"{name}: no documents in it", code="file_count", try_=["-f FILE", "-f FOLDER", "-f 'FOLDER/*.txt'"]
        )
    if len(documents) > MOST:
        raise _too_many(f"{name} has {len(documents):,} documents", f"{MOST} documents")
    if size > MOST_BYTES:
        raise _too_many(f"{name} has {size / 2**20:,.0f} MiB of documents", f"{MOST_BYTES >> 20:,} MiB")
    return documents


def _no_document(path: Path) -> str | None:
    """Return why a file of a folder is no document to read, or None."""
    try:
        if path.name.startswith("."):
            return "hidden"
        if path.is_dir():
            return "a folder"
        return None if path.is_file() and looks_readable(path) else "no document"
    except OSError as error:
        return str(error.strerror or error)


def _too_many(what: str, most: str) -> BadInput:
    hint = "-f 'FOLDER/A*', in quotes, for a part of them"
    return BadInput(f"{what}, and at most {most} can be attached at once", code="file_count", try_=[hint])


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
            tell(world, f"not attached: {error.message}")
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

            return read_address(name, **asdict(how), on_page=on_page)
        path = name if split_pages(name)[0] in BUNDLED else world.cwd / os.path.expanduser(name)
        return read_document(path, name=name, **asdict(how), on_page=on_page)


def read_system(world: Environment, text: str | None, file: str | None) -> str | None:
    """Return the system message from the flag or from a file."""
    if text is not None and file is not None:
        raise UsageError("--system and --system-file exclude each other", try_=["only one of them"])
    if file is not None:
        return read_file(world, file).text.rstrip("\n")
    return well_formed(text, "the system text") if text else None
