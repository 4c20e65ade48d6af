"""Fetch a document from a web address: by http or https, without cookies or passwords, bounded in size and time."""

from __future__ import annotations

import codecs
import re
from dataclasses import replace
from http.client import HTTPException
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from socket import getaddrinfo
from threading import Thread
from typing import Any
from urllib import request
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit, urlunsplit

from kvcli.documents.decode import HEAD, check_type, codec_of, named_kind
from kvcli.documents.document import Document, is_address, split_pages
from kvcli.documents.read import CHUNK, document_of, most_bytes, too_large
from kvcli.errors import BadInput
from kvcli.version import __version__

SECONDS = 120.0  # for the whole document
SILENCE = 20.0  # seconds without a byte
REDIRECTS = 5
TYPES = {  # content type -> kind; for others the content decides
    "application/pdf": "pdf",
    "text/html": "html",
    "application/xhtml+xml": "html",
    "application/epub+zip": "epub",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
    "message/rfc822": "mail",
    "multipart/related": "mhtml",
    "application/x-ipynb+json": "notebook",
    "text/markdown": "markdown",
    "text/plain": "text",
}


def read_address(address: str, *, pages: str | None = None, type: str | None = None, **options: Any) -> Document:
    """Fetch and read a document. Its kind is `type`, or that of the server's content type, or that of its content.

    `https://example.org/paper.pdf:3-9` reads those pages. Other options are those of `document_of`. Raises BadInput.
    """
    refuse_address(address)
    kind, bare, named = check_type(type), *split_pages(address)
    if named is None or not urlsplit(bare).path:  # `http://host:8080` names a port
        bare, named = address, None
    data, answer = _fetched(bare)
    name = re.sub(r"^https?://", "", bare, flags=re.IGNORECASE).partition("#")[0].rstrip("/")
    declared = answer.headers.get_content_type() if "Content-Type" in answer.headers else ""
    kind = kind or TYPES.get(declared)
    suffix = named_kind(urlsplit(bare).path)
    if kind == "text" and not type and suffix in ("markdown", "notebook"):
        kind = suffix  # servers send these as plain text
    codec = codec_of(answer.headers.get_content_charset() or "")
    if codec not in (None, "utf-8") and kind in ("html", "text", "markdown"):
        data = codecs.BOM_UTF8 + data.decode(codec, "replace").encode()  # the server's word counts more than the page's
    document = document_of(data, name, pages=pages or named, type=kind, **options)
    if urlsplit(answer.url)[:3] == urlsplit(bare)[:3]:
        return document
    return replace(document, notes=(f"{name} was fetched from {answer.url}", *document.notes))


def _fetched(address: str) -> tuple[bytes, Any]:
    """Return the bytes behind an address, and the response. A thread fetches, so that no server can delay for ever."""
    refuse_address(address)
    ended: SimpleQueue[tuple[bytes, Any] | BaseException] = SimpleQueue()

    def fetch() -> None:
        try:
            ended.put(_get(address))
        except BaseException as error:
            ended.put(error)

    Thread(target=fetch, daemon=True).start()
    try:
        found = ended.get(timeout=SECONDS)
    except Empty:
        raise _failed(address, f"it was not complete after {SECONDS:.0f} seconds") from None
    if isinstance(found, OSError | HTTPException | ValueError):
        why = found if isinstance(found, HTTPError) else getattr(found, "reason", found)
        raise _failed(address, str(getattr(why, "strerror", None) or why or type(found).__name__)) from None
    if isinstance(found, BaseException):
        raise found
    return found


def _get(address: str) -> tuple[bytes, Any]:
    opener = request.OpenerDirector()
    for each in (request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.HTTPErrorProcessor):
        opener.add_handler(each())
    opener.add_handler(request.HTTPDefaultErrorHandler())
    opener.add_handler(_Redirects())
    parts = urlsplit(address)
    host, rest = parts.netloc.encode("idna").decode(), [quote(part, safe="%/:=&?~+!$,;'@()*") for part in parts[2:4]]
    plain = urlunsplit((parts.scheme, host, *rest, ""))
    asked = request.Request(plain, headers={"User-Agent": f"kvcli/{__version__}"})
    with opener.open(asked, timeout=SILENCE) as answer:
        if (packed := answer.headers.get("Content-Encoding", "identity")) != "identity":
            raise _failed(address, f"the server sent it compressed ({packed}), which was not asked for")
        chunk = answer.read(HEAD)
        data, most = bytearray(), most_bytes(chunk, address)
        promised = answer.headers.get("Content-Length", "")
        if promised.isdecimal() and int(promised) > most:
            raise too_large(address, int(promised), most)
        while chunk:
            data += chunk
            if len(data) > most:
                raise too_large(address, len(data), most)
            chunk = answer.read(CHUNK)
        return bytes(data), answer


class _Redirects(request.HTTPRedirectHandler):
    """Follows a few redirects, to addresses that could have been typed, and from https to https alone."""

    max_redirections = REDIRECTS

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        refuse_address(newurl)
        if req.full_url.lower().startswith("https:") and not newurl.lower().startswith("https:"):
            raise _failed(req.full_url, f"it redirects to {newurl}, which is not encrypted", newurl)
        if _is_local(newurl) and not _is_local(req.full_url):
            raise _failed(req.full_url, f"it redirects to {newurl}, which is on a local network", newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_local(address: str) -> bool:
    """True if the host is on this machine or a private network; False if its name is unknown here."""
    try:
        return any(not ip_address(each[4][0]).is_global for each in getaddrinfo(urlsplit(address).hostname, None))
    except (OSError, UnicodeError):
        return False


def refuse_address(address: str) -> None:
    """Raise BadInput for an address that is not fetched."""
    try:
        parts = urlsplit(address)
        host, _, user = parts.hostname, parts.port, parts.username
    except ValueError as error:
        raise _failed(address, str(error)) from None
    if not is_address(address) or not host:
        raise _failed(address, "only http:// and https:// addresses with a host are fetched")
    if user is not None:
        raise _failed(f"https://...@{host}", "addresses with a user name or a password are not fetched")


def _failed(address: str, why: str, try_: str = "save it from the browser, then -f FILE") -> BadInput:
    return BadInput(f"cannot fetch {address}", code="not_fetched", lines=[why], try_=[try_])
