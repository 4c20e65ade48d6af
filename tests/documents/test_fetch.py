"""Documents behind web addresses, from a server on this machine: what decides their kind, and what is refused."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from socket import getaddrinfo
from typing import ClassVar

import pytest

from kvcli.documents import fetch
from kvcli.documents.fetch import read_address
from kvcli.errors import BadInput
from tests.documents import made

PAGES = {  # path -> content type, body
    "/paper.pdf": ("application/octet-stream", made.plain(Random(1)).data),
    "/page": ("text/html; charset=iso-8859-2", "<h1>Łódź</h1><p>The bridge.</p>".encode("iso-8859-2")),
    "/notes.md": ("text/plain; charset=utf-8", b"# One\n\nfirst\n\n# Two\n\nsecond\n"),
    "/source.html": ("text/plain", b"<html><b>not read as a page</b>"),
    "/packed": ("text/plain", b"\x1f\x8b"),
    "/image": ("image/png", b"\x89PNG\r\n\x1a\n\0"),
}
MOVED = {"/moved": "/notes.md", "/round": "/round", "/away": "file:///etc/passwd", "/user": "http://a:b@127.0.0.1/"}
MOVED["/inside"] = "http://127.0.0.1:1/"


class Site(BaseHTTPRequestHandler):
    asked: ClassVar[list[dict]] = []

    def do_GET(self):
        self.asked.append(dict(self.headers))
        if self.path in MOVED:
            self.send_response(302)
            self.send_header("Location", MOVED[self.path])
            self.end_headers()
            return
        if self.path == "/slow":
            self.server.may_end.wait(10)
        kind, body = PAGES.get(self.path, ("text/plain", b"nothing"))
        self.send_response(200 if self.path in PAGES else 404)
        self.send_header("Content-Type", kind)
        if self.path == "/packed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.may_end = threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.may_end.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("/page", "html", "Łódź"),
        ("/notes.md", "markdown", "first"),
        ("/source.html", "text", "<b>not read as a page</b>"),
    ],
)
def test_the_content_type_decides_the_kind(site, path, kind, words):
    document = read_address(site + path)
    assert document.kind == kind
    assert words in document.text
    assert document.name == site.removeprefix("http://") + path


def test_pages_of_a_pdf_and_a_port_that_is_no_page(site):
    document = read_address(site + "/paper.pdf:2")
    assert [section.label for section in document.sections] == ["2"]
    assert document.name.endswith("/paper.pdf")
    with pytest.raises(BadInput, match="404"):
        read_address(site)  # the port is not a page


def test_a_redirect_is_followed_and_said(site):
    document = read_address(site + "/moved")
    assert document.text.startswith("# One")
    assert document.notes[0].endswith(f"was fetched from {site}/notes.md")
    assert not {"Cookie", "Authorization", "Referer"} & set(Site.asked[-1])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/none", "HTTP Error 404: Not Found"),
        ("/round", "infinite loop"),
        ("/away", "not allowed"),
        ("/user", "a user name or a password"),
        ("/packed", "compressed (gzip)"),
        ("/image", "is an image (PNG)"),
    ],
)
def test_what_cannot_be_fetched(site, path, words):
    with pytest.raises(BadInput) as caught:
        read_address(site + path)
    assert words in str(caught.value)


def test_no_public_address_redirects_to_a_local_one(site, monkeypatch):
    public = [(0, 0, 0, "", ("192.0.43.10", 0))]
    monkeypatch.setattr(fetch, "getaddrinfo", lambda h, p: public if h == "localhost" else getaddrinfo(h, p))
    with pytest.raises(BadInput, match="on a local network"):
        read_address(site.replace("127.0.0.1", "localhost") + "/inside")


def test_size_and_time_are_bounded(site, monkeypatch):
    monkeypatch.setattr(fetch, "most_bytes", lambda head, name: 10)
    with pytest.raises(BadInput, match="too large"):
        read_address(site + "/notes.md")
    monkeypatch.setattr(fetch, "SECONDS", 0.05)
    with pytest.raises(BadInput, match="not complete after"):
        read_address(site + "/slow")


@pytest.mark.parametrize(
    "address", ["http://a:b@127.0.0.1/x", "http://", "http://127.0.0.1:1/x", "https://[::1/x", "http://[::1"]
)
def test_an_address_that_is_not_fetched_says_so_without_its_password(address):
    with pytest.raises(BadInput) as caught:
        read_address(address)
    assert caught.value.code == "not_fetched"
    assert "a:b" not in str(caught.value)
