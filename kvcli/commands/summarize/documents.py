"""Documents of `kvcli summarize`, read before a model loads. An unreadable document does not stop the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from kvcli.commands.common.document_files import DocumentFile, ReadOptions, read_file
from kvcli.commands.common.inputs import STDIN, read_stdin
from kvcli.documents import BUNDLED, Document, document_of, split_pages
from kvcli.documents.decode import HEAD, check_type, sniff
from kvcli.errors import BadInput, KvcliError, UsageError

if TYPE_CHECKING:
    from kvcli.chat.document_pack import Pack
    from kvcli.commands.summarize.options import DocumentOptions
    from kvcli.documents.document import Counter
    from kvcli.environment import Environment
    from kvcli.schemas.summary import SourceFacts


@dataclass(frozen=True, slots=True)
class InputDocument:
    """A document, with its name as typed."""

    typed: str
    document: Document

    @property
    def heading(self) -> str:
        """Heading of its summary: the name as typed, so that two files of one name differ."""
        return self.document.name if self.typed == "-" else self.typed


@dataclass
class InputDocuments:
    """Documents that were read, and errors of the others."""

    given: list[InputDocument] = field(default_factory=list)
    failed: list[tuple[str, KvcliError]] = field(default_factory=list)

    @property
    def documents(self) -> list[Document]:
        return [one.document for one in self.given]


def read_all(world: Environment, files: Sequence[DocumentFile], options: DocumentOptions) -> InputDocuments:
    """Read all files in the order typed. A single unreadable file raises BadInput; else errors are collected."""
    password, names = password_of(world, options.password_file), [file.name for file in files]
    how = ReadOptions(options.pages, check_type(options.type_), password, options.ocr)
    if not names:
        raise UsageError(
            "no file is named",
            try_=["kvcli summarize paper.pdf", "kvcli summarize - < paper.pdf", "kvcli summarize demo:pdf"],
        )
    _refuse_twice(world, names)
    documents = InputDocuments()
    for name in names:
        try:
            documents.given.append(InputDocument(name, _read(world, name, how)))
        except BadInput as error:
            documents.failed.append((name, error))
    if not documents.given and len(documents.failed) == 1:
        raise documents.failed[0][1]
    return documents


def of_pack(packed: Pack) -> InputDocuments:
    """Return the documents of a pack, divided by page marks in their text, by markdown headings, or else by lines."""
    given = []
    for document in packed.documents:
        data = document.text.encode(errors="replace")
        kind = "markdown" if sniff(data[:HEAD], document.name) == "markdown" else "text"
        found = document_of(data, document.name, type=kind)
        given.append(InputDocument(document.name, replace(found, text=document.text, sha256=document.sha256)))
    return InputDocuments(given)


def _refuse_twice(world: Environment, names: Sequence[str]) -> None:
    """Refuse the same pages of the same file, however its path is written."""
    first: dict[object, str] = {}
    for name in names:
        file = _file_of(world, name)
        if file in first:
            also = f" (the first time as {first[file]})" if first[file] != name else ""
            raise UsageError(f"{name} is named twice{also}", try_=["name each file once"])
        first[file] = name


def _file_of(world: Environment, name: str) -> object:
    """Return device, inode and pages of a file, or the name alone if the file does not exist."""
    path, pages = split_pages(name)
    if name == "-" or path in BUNDLED:
        return name
    for candidate, which in ((name, None), (path, pages)):
        try:
            found = (world.path(candidate)).stat()
        except OSError:
            continue
        return found.st_dev, found.st_ino, which
    return name


def _read(world: Environment, name: str, how: ReadOptions) -> Document:
    if name == "-":
        return document_of(read_stdin(world), STDIN, **asdict(how), cache=world.paths.cache)
    return read_file(world, name, how)


def facts(given: Sequence[InputDocument], tokenizer: Counter | None = None) -> list[SourceFacts]:
    """Return the sources of one summary by the names in its citations, with token counts if there is a tokenizer."""
    from kvcli.summarize.document import source_facts
    from kvcli.summarize.parts import names_of

    return [
        source_facts(one.document, one.typed, one.document.tokens(tokenizer) if tokenizer else None, name=name)
        for one, name in zip(given, names_of([one.document for one in given]), strict=True)
    ]


def password_of(world: Environment, file: str | None) -> str | None:
    """Return the first line of the file."""
    if file is None:
        return None
    path = world.path(file)
    try:
        with path.open("rb") as stream:
            line = stream.readline(4096).decode("utf-8-sig").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BadInput(
            f"cannot read the password in {file}: {why}", code="file_unreadable", try_=["--password-file FILE"]
        ) from None
    if not line:
        raise BadInput(f"{file} has no password in its first line", code="empty_file", try_=["--password-file FILE"])
    return line
