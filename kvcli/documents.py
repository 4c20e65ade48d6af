"""Attached files: read as text or refused with the reason, and put before the question they belong to."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Protocol

from kvcli.errors import BadInput

MAX_BYTES = 64 * 2**20
BUNDLED = "demo:report"  # the example document, by name
SNIFFED = 1 << 16  # bytes looked at to tell text from binary
MAX_CONTROL_SHARE = 0.05  # of the sniffed bytes; text has next to none

# the order matters: the UTF-16 mark is the beginning of the UTF-32 one
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
CONTROLS = bytes(sorted(({*range(32)} | {127}) - set(b"\t\n\v\f\r\b\x1b")))
KNOWN = ((b"%PDF-", "a PDF"), (b"PK\x03\x04", "a zip archive (as docx, epub and xlsx are)"), (b"\x1f\x8b", "gzip data"))


class Counter(Protocol):
    """What a tokenizer must offer to be counted with."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name. `sha256` is that of the bytes it was read from."""

    name: str
    text: str
    sha256: str
    _counts: dict[int, tuple[Counter, int]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def lines(self) -> int:
        return self.text.count("\n") + (not self.text.endswith("\n"))

    def tokens(self, tokenizer: Counter) -> int:
        """Tokens of the text alone; counted once for each tokenizer."""
        key = id(tokenizer)  # not hashable in general; kept beside the count, so that the id stays its own
        if key not in self._counts:
            self._counts[key] = tokenizer, len(tokenizer.encode(self.text, add_special_tokens=False))
        return self._counts[key][1]


def read_document(path: str | Path, *, name: str | None = None, limit: int = MAX_BYTES) -> Document:
    """Read a text or markdown file, or the bundled example `demo:report`. Refuses what is not text, saying why.

    Messages call the file by `name`, as the user typed it; the document is called by its file name.
    """
    name = name or str(path)
    file = _bundled() if str(path) == BUNDLED else Path(path).expanduser()
    try:
        if file.is_dir():
            raise BadInput(f"{name} is a folder, not a file", code="is_a_folder", try_=[f"a file in it: {name}/FILE"])
        if file.is_file() and file.stat().st_size > limit:
            raise too_large(name, file.stat().st_size, limit)
        with file.open("rb") as stream:
            data = stream.read(limit + 1)
    except FileNotFoundError:
        raise BadInput(f"no such file: {name}", code="file_missing", try_=_similar(file)) from None
    except OSError as error:
        raise BadInput(f"cannot read {name}: {error.strerror or error}", code="file_unreadable") from None
    if len(data) > limit:  # a pipe or a device does not tell its size beforehand
        raise too_large(name, len(data), limit)
    return replace(document_of(data, name), name=BUNDLED if str(path) == BUNDLED else file.name)


def document_of(data: bytes, name: str) -> Document:
    """A document from bytes already read, standard input for example."""
    text = decode(data, name)
    if not text.strip():
        raise BadInput(f"{name} is empty", code="empty_file", lines=[f"{len(data):,} bytes, no text in them"])
    return Document(name, text, hashlib.sha256(data).hexdigest())


def decode(data: bytes, name: str) -> str:
    """Bytes to text: UTF-8, or what the byte order mark says. Line ends become newlines."""
    mark, encoding = next(((m, e) for m, e in MARKS if data.startswith(m)), (b"", "utf-8"))
    body = data[len(mark) :]
    if not mark:
        _refuse_binary(body, name)
    try:
        text = body.decode(encoding)
    except UnicodeDecodeError as error:
        raise _bad_encoding(body, len(mark), encoding, error, name) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def with_documents(question: str, documents: Sequence[Document]) -> str:
    """The user message for a question about documents: texts first, then a blank line, then the question.

    A single document stands bare, which is how most models (and the bundled one) were trained. Several get a
    header line each, so that the question can name them. Change the form here; nothing else knows it.
    """
    if not documents:
        return question
    if len(documents) == 1:
        parts = [documents[0].text.strip("\n")]
    else:
        parts = [
            f"=== Document {i}: {document.name} ===\n{document.text.strip(chr(10))}"
            for i, document in enumerate(documents, 1)
        ]
    return "\n\n".join([*parts, question] if question else parts)


def _bundled() -> Path:
    from kvcli.demo import report_path

    return report_path()


def _refuse_binary(data: bytes, name: str) -> None:
    for magic, kind in KNOWN:
        if data.startswith(magic):
            raise BadInput(
                f"{name} is {kind}; only text and markdown can be attached",
                code="not_text",
                try_=[f"pdftotext {quote(name)} text.txt" if magic == b"%PDF-" else "convert it to text first"],
            )
    head = data[:SNIFFED]
    zero = data.find(b"\0")
    if zero >= 0:
        raise BadInput(
            f"{name} is not text: it has a zero byte at offset {zero:,}",
            code="not_text",
            detail={"offset": zero},
            try_=["convert it to UTF-8 text first"],
        )
    odd = len(head) - len(head.translate(None, CONTROLS))
    if odd > MAX_CONTROL_SHARE * len(head):
        raise BadInput(
            f"{name} is not text: {odd / len(head):.0%} of its first bytes are control characters",
            code="not_text",
            detail={"control_bytes": odd, "looked_at": len(head)},
            try_=["convert it to UTF-8 text first"],
        )


def _bad_encoding(body: bytes, start: int, encoding: str, error: UnicodeDecodeError, name: str) -> BadInput:
    newline = "\n".encode(encoding)
    line = body.count(newline, 0, error.start) + 1
    offset = start + error.start
    return BadInput(
        f"{name} is not valid {encoding.upper()}: byte {offset:,}, line {line:,}",
        code="bad_encoding",
        lines=[f"byte 0x{body[error.start]:02x}: {error.reason}"],
        detail={"encoding": encoding, "offset": offset, "line": line},
        try_=[f"iconv -f latin1 -t utf-8 {quote(name)} > utf8.txt" if encoding == "utf-8" else "save it as UTF-8"],
    )


def too_large(name: str, size: int, limit: int) -> BadInput:
    return BadInput(
        f"{name} is too large",
        code="file_too_large",
        lines=[f"{size / 2**20:,.1f} MiB or more, at most {limit / 2**20:,.0f} MiB"],
        detail={"bytes": size, "limit": limit},
        try_=["attach the part you ask about"],
    )


def _similar(file: Path) -> list[str]:
    from difflib import get_close_matches

    try:
        names = [BUNDLED, *(entry.name for entry in file.parent.iterdir())]
    except OSError:
        names = [BUNDLED]
    return [f"did you mean {match}?" for match in get_close_matches(file.name, names, 1)]
