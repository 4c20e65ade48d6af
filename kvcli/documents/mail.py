"""Mail (one message or a mailbox) and web archives: the part that a reader sees, and the names of attachments."""

from __future__ import annotations

import re
from email.errors import HeaderParseError
from email.header import decode_header
from email.message import Message
from email.parser import BytesParser
from typing import IO, Any

from kvcli.documents.decode import codec_of, page_text
from kvcli.documents.dehyphenate import clean
from kvcli.documents.document import Parsed, ParseJob
from kvcli.documents.markup import read_markup, rules_of
from kvcli.documents.plain import headed_text

HEADERS = ("From", "To", "Cc", "Date", "Subject")
# first line of a message in a mailbox
POSTED = re.compile(rb"(?:\A|(?<=\n\n)|(?<=\n\r\n))From [^\n]*\d:\d\d[^\n]*\n(?=[A-Za-z-]+:)")
QUOTED = re.compile(rb"^>(>*From )", re.M)  # the same line quoted within a message
LONGEST = 10_000  # characters of a header
NAMED = 20  # attachments named in a note

Headed = list[tuple[str, str]]


def read(file: IO[bytes], job: ParseJob) -> Parsed:
    """Return sections by headings and messages. Of a web archive only the page itself is read, without its frames."""
    data, found, notes, attached = file.read(), Headed(), list[str](), list[str]()
    title = None
    is_box = POSTED.match(data)
    for raw in filter(bytes.strip, POSTED.split(data)) if is_box else [data]:
        message = BytesParser().parsebytes(QUOTED.sub(rb"\1", raw) if is_box else raw)
        title = title or _header(message, "Subject") or None
        found += _message(message, job, notes, attached) if job.kind == "mail" else _archive(message, job, notes)
    if attached:
        more = f" and {len(attached) - NAMED:,} more" if len(attached) > NAMED else ""
        notes.append(f"attachments of {job.name}, not read: {', '.join(attached[:NAMED])}{more}")
    return headed_text(job, found, "it has only attachments", title=title, notes=notes)


def _message(message: Any, job: ParseJob, notes: list[str], attached: list[str]) -> Headed:
    """Return the headers that mail programs show, and the body."""
    own: list[str] = []
    body = _texts(message, job, notes, own)
    attached += own
    lines = [f"{name}: {said}" for name in HEADERS if (said := _header(message, name))]
    lines += [f"Attached: {name}" for name in own]
    found = [(_header(message, "Subject"), "\n".join(lines))]
    for heading, text in body:
        if heading:
            found.append((heading, text))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n\n{text}")
    return found


def _archive(message: Any, job: ParseJob, notes: list[str]) -> Headed:
    parts = {kind: [p for p in message.walk() if p.get_content_type() == kind] for kind in ("text/html", "text/css")}
    rules = rules_of(page_text(_bytes(part), job.name, _charset(part))[0] for part in parts["text/css"])
    pages = parts["text/html"][:1]
    return [pair for page in pages for pair in _markup(page, job, notes, rules)]


def _texts(part: Any, job: ParseJob, notes: list[str], attached: list[str]) -> Headed:
    kind, is_attached = part.get_content_type(), part.get_content_disposition() == "attachment"
    if kind == "message/rfc822" and part.is_multipart():
        return [("Forwarded", ""), *_message(part.get_payload(0), job, notes, attached)]
    if part.is_multipart():
        children = part.get_payload()
        if kind == "multipart/alternative":  # mail programs show the richest version that they can
            rich = [child for child in children if any(p.get_content_type() == "text/html" for p in child.walk())]
            children = (rich or [c for c in children if c.get_content_type() == "text/plain"] or children)[-1:]
        return [pair for child in children for pair in _texts(child, job, notes, attached)]
    if kind == "text/html" and not is_attached:
        return _markup(part, job, notes, {})
    if kind == "text/plain" and not is_attached:
        text, guessed = page_text(_bytes(part), job.name, _charset(part))
        notes += guessed
        return [("", text.replace("\r\n", "\n").strip("\n"))]
    if is_attached or not (part.get("Content-ID") and kind.startswith("image/")):  # pictures of the page have an id
        attached.append(f"{_plain(part.get_filename() or 'without a name')} ({kind}, {len(_bytes(part)):,} bytes)")
    return []


def _markup(part: Any, job: ParseJob, notes: list[str], rules: dict[str, str]) -> Headed:
    return read_markup(_bytes(part), job.name, "mail", notes, said=_charset(part), rules=rules)[1]


def _bytes(part: Any) -> bytes:
    return part.get_payload(decode=True) or b""


def _charset(part: Any) -> str:
    return str(part.get_content_charset() or "")


def _header(message: Message, name: str) -> str:
    raw = next((str(value)[:LONGEST] for key, value in message.raw_items() if key.lower() == name.lower()), "")
    return _plain(raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def _plain(said: str) -> str:
    """Decode a header; words in an unknown encoding stay unchanged."""
    try:
        parts = decode_header(said)
    except HeaderParseError:
        parts = [(said, None)]
    words = [
        p if isinstance(p, str) else p.decode((codec_of(code) or "utf-8") if code else "raw-unicode-escape", "replace")
        for p, code in parts
    ]
    return clean(" ".join("".join(words).split()))
