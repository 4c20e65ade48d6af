"""Detect the kind of a file from its content, and from its name only if the content is ambiguous."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from kvcli.documents.decode import PDF_HEADER
from kvcli.errors import UsageError

NAMED = {  # kind -> suffixes of such files
    "pdf": "pdf",
    "html": "html htm xhtml",
    "epub": "epub",
    "docx": "docx",
    "mail": "eml mbox",
    "mhtml": "mhtml mht",
    "notebook": "ipynb",
    "markdown": "md markdown",
    "text": "txt text",
}
KINDS = tuple(NAMED)
SUFFIXES = {f".{end}": kind for kind, ends in NAMED.items() for end in ends.split()}
WORDS = {"pdf": "PDF", "html": "HTML", "epub": "EPUB", "docx": "DOCX", "markdown": "markdown", "text": "text"}
WORDS |= {"mail": "mail", "mhtml": "MHTML", "notebook": "a notebook"}
HEAD = 4096  # bytes examined
PDF_WITHIN = 1024  # bytes before the header that PDF readers tolerate
COMMENTS = rb"(<!--((?!-->).){0,2000}-->\s*)*"  # one way to match each comment: no exponential backtracking
HTML = re.compile(rb"\s*(<\?xml[^>]{0,200}>\s*)?" + COMMENTS + rb"(<!doctype\s+html|<html[\s>])", re.I | re.S)
TAG = re.compile(rb"\s*(<\?xml[^>]{0,200}>\s*)?<[!a-zA-Z]", re.S)
HEADERS = re.compile(rb"(?:From [^\n]*\n)?(?:[A-Za-z][\w-]*:[^\n]*(?:\n|\Z)(?:[ \t][^\n]*(?:\n|\Z))*)+")
# headers that people do not write by hand
POSTED = {b"message-id", b"received", b"mime-version", b"return-path", b"delivered-to"}
USUAL = POSTED | {b"from", b"to", b"date", b"subject", b"content-type", b"dkim-signature", b"arc-seal"}
NOTEBOOK = re.compile(rb'\s*\{\s*"(cells|metadata|nbformat|worksheets)"\s*:')
HEADING = re.compile(rb"^#{1,6} \S.*\n\s*\n", re.M)


def named_kind(name: str) -> str | None:
    """Return the kind that the file suffix indicates."""
    return SUFFIXES.get(PurePath(name).suffix.lower())


def check_type(type: str | None) -> str | None:
    """Return a kind as typed; refuse an unknown word."""
    kind = SUFFIXES.get(f".{type}", type) if type else None
    if kind is not None and kind not in KINDS:
        raise UsageError(f"there is no type {type!r}", code="unknown_type", try_=[f"--type {k}" for k in KINDS])
    return kind


def sniff(head: bytes, name: str) -> str:
    """Return the kind of a file from its first bytes: one of KINDS, or "zip" if only the archive's index shows it."""
    promised = named_kind(name)
    body = head.removeprefix(b"\xef\xbb\xbf")
    if promised in ("markdown", "text"):
        is_pdf = bool(PDF_HEADER.match(body))
    else:
        is_pdf = body.lstrip().startswith(b"%PDF-") or (promised == "pdf" and b"%PDF-" in head[:PDF_WITHIN])
    if is_pdf:
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if HTML.match(_narrow(body)) or (promised == "html" and TAG.match(_narrow(body))):
        return "html"
    if (posted := _posted(body, promised)) is not None:
        return posted
    if NOTEBOOK.match(body) and (promised == "notebook" or b'"cell_type"' in body or b'"nbformat"' in body):
        return "notebook"
    if promised in ("markdown", "text"):
        return promised
    if PurePath(name).suffix == "" and not body.startswith(b"#!") and len(HEADING.findall(body)) > 1:
        return "markdown"
    return "text"


def looks_readable(file: Path) -> bool:
    """True if the first bytes of an unnamed file of a folder look like a document."""
    with file.open("rb") as stream:
        head = stream.read(HEAD)
    kind, promised = sniff(head, file.name), named_kind(file.name)
    return bool(promised) or kind in ("pdf", "html") or (kind != "zip" and b"\0" not in head and bool(head.strip()))


def _posted(head: bytes, promised: str | None) -> str | None:
    """Return "mail" or "mhtml" from the headers, or None without such headers."""
    found = HEADERS.match(head)
    names = {name.lower() for name in re.findall(rb"^([\w-]+):", found[0], re.M)} if found else set()
    if promised not in ("mail", "mhtml") and (len(names & USUAL) < 3 or not names & POSTED):
        return None
    if b"multipart/related" in head and (promised == "mhtml" or not names & {b"to", b"received", b"message-id"}):
        return "mhtml"
    return "mail" if names else None


def disagreement(name: str, kind: str) -> str | None:
    """Return a note if the name indicates another kind than the content."""
    promised = named_kind(name)
    if promised in (None, kind) or {promised, kind} == {"markdown", "text"}:
        return None
    return f"{name} is named {PurePath(name).suffix} but its content is {WORDS[kind]}; read as {WORDS[kind]}"


def _narrow(head: bytes) -> bytes:
    """Return UTF-16 markup as single bytes, which suffices for its first tag."""
    return head[2:].replace(b"\0", b"") if head[:2] in (b"\xff\xfe", b"\xfe\xff") else head
