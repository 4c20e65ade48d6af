"""EPUB reader: the chapters of the spine in order, each an HTML page in an archive."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any
from urllib.parse import unquote

from kvcli.documents.archives import member, open_zip
from kvcli.documents.document import Parsed, ParseJob, damaged, refuse_too_much
from kvcli.documents.markup import read_markup, rules_of
from kvcli.documents.plain import headed_text
from kvcli.documents.xml_tree import first_words, parse_xml
from kvcli.errors import BadInput

WHAT = "an EPUB"
CONTAINER = "META-INF/container.xml"
LOCKED = "META-INF/encryption.xml"
TYPE = "{http://www.idpf.org/2007/ops}type"
PAGES = ("application/xhtml+xml", "text/html", "application/xml", "text/xml")


def read(file: IO[bytes], job: ParseJob) -> Parsed:
    """Return one section per chapter, named by the book's table of contents or else by its first heading.

    A file with several entries in the table of contents is split at its headings.
    """
    with open_zip(file, job.name) as archive:
        package = _package(archive, job.name)
        book = parse_xml(member(archive, package, job.name), job.name, WHAT)
        items = _items(book, package, job.name)
        spine = _spine(book, items)
        _refuse_locked(archive, spine, job.name)
        names = _contents(archive, items, job.name)
        chapters: list[tuple[str, str]] = []
        size, notes, rules = 0, list[str](), _rules(archive, items, job.name)
        for path in spine:
            title, headed = read_markup(member(archive, path, job.name), job.name, WHAT, notes, rules=rules)
            if not headed:
                continue  # a cover, a picture
            chapters += _chapters(headed, names.get(path, []), title or f"Chapter {len(chapters) + 1}")
            size += sum(len(body) for _, body in headed)
            refuse_too_much(job.name, size, len(chapters), paged=False)
    title = first_words(book.iter("{*}title"))
    return headed_text(job, chapters, "its chapters have only pictures", unit="chapter", title=title, notes=notes)


def _package(archive: zipfile.ZipFile, name: str) -> str:
    roots = parse_xml(member(archive, CONTAINER, name), name, WHAT).iter("{*}rootfile")
    path = next((root.get("full-path") for root in roots), None)
    if not path:
        raise damaged(name, WHAT, f"{CONTAINER} does not name a book")
    return _inside("", path, name)


def _inside(folder: str, href: str, name: str) -> str:
    """Return a link as a path in the archive; refuse a link that leads out of it."""
    path = posixpath.normpath(posixpath.join(folder, unquote(href.partition("#")[0])))
    if path.startswith(("/", "..")) or "\0" in path:
        raise damaged(name, WHAT, f"a path in it leads outside: {href[:80]!r}")
    return path


def _items(book: Any, package: str, name: str) -> dict[str, tuple[str, str, str]]:
    """Return id -> path, media type, properties."""
    folder = posixpath.dirname(package)
    found = {}
    for item in book.iter("{*}item"):
        href = item.get("href")
        if item.get("id") and href and "://" not in href:
            path = _inside(folder, href, name)
            found[item.get("id")] = path, item.get("media-type", ""), item.get("properties", "")
    return found


def _spine(book: Any, items: dict[str, tuple[str, str, str]]) -> list[str]:
    """Return the paths of the chapters in order, without duplicates: naming one a thousand times adds no length."""
    refs = [items.get(ref.get("idref", "")) for ref in book.iter("{*}itemref")]
    return list(dict.fromkeys(item[0] for item in refs if item and item[1] in PAGES))


def _rules(archive: zipfile.ZipFile, items: dict[str, tuple[str, str, str]], name: str) -> dict[str, str]:
    """Return the style sheets' rules for raised letters and lists; a missing or broken style sheet is skipped."""
    rules: dict[str, str] = {}
    for path, kind, _ in items.values():
        with suppress(BadInput):
            rules |= rules_of([member(archive, path, name).decode("utf-8", "replace")] if kind == "text/css" else [])
    return rules


def _refuse_locked(archive: zipfile.ZipFile, spine: list[str], name: str) -> None:
    if LOCKED not in archive.namelist():
        return
    root = parse_xml(member(archive, LOCKED, name), name, WHAT)
    locked = {unquote(e.get("URI", "")) for e in root.iter("{*}CipherReference")}
    if locked & set(spine):
        raise BadInput(f"{name} is encrypted", code="encrypted", lines=["its chapters are copy-protected (DRM)"])


def _chapters(headed: list[tuple[str, str]], names: list[str], title: str) -> list[tuple[str, str]]:
    """Return the sections of one file of the book; text before the first heading is part of the first section."""
    (first, body), *rest = headed
    if len(names) > 1 and rest:
        return headed if first else [(rest[0][0], f"{body}\n\n{rest[0][1]}"), *rest[1:]]
    label = names[0] if names else next((heading for heading, _ in headed if heading), title)
    return [(label, "\n\n".join(body for _, body in headed))]


def _contents(archive: zipfile.ZipFile, items: dict[str, tuple[str, str, str]], name: str) -> dict[str, list[str]]:
    """Return chapter names by path, from the navigation page or the older NCX file; a book may have neither."""
    names: dict[str, list[str]] = {}
    for path, kind, properties in items.values():
        if kind != "application/x-dtbncx+xml" and "nav" not in properties.split():
            continue
        found: dict[str, list[str]] = {}
        with suppress(BadInput):  # the chapters can be read without their names
            for href, label in _entries(parse_xml(member(archive, path, name), name, WHAT)):
                if href and label:
                    labels = found.setdefault(_inside(posixpath.dirname(path), href, name), [])
                    labels += [label] * (label not in labels[:1])
        names = found | names
    return names


def _entries(root: Any) -> Iterator[tuple[str | None, str | None]]:
    """Yield links of the table of contents with their words; lists of printed pages and landmarks are skipped."""
    tables = list(root.iter("{*}nav"))
    contents = next((t for t in tables if "toc" in t.get(TYPE, "").split()), tables[0] if tables else root)
    for link in contents.iter("{*}a"):
        yield link.get("href"), first_words([link])
    for point in root.iter("{*}navPoint"):
        content, words = (next(point.iter("{*}" + tag), None) for tag in ("content", "text"))
        if content is not None and words is not None:
            yield content.get("src"), first_words([words])
