"""Parts of a DOCX, each found through the relations of the part before it."""

from __future__ import annotations

import posixpath
import zipfile
from functools import cache
from typing import Any
from urllib.parse import unquote

from kvcli.documents.archives import member
from kvcli.documents.parsed import damaged
from kvcli.documents.xml_tree import parse_xml

SPACES = (
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "http://purl.oclc.org/ooxml/wordprocessingml/main",  # of the strict format
)
MATH = (
    "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "http://purl.oclc.org/ooxml/officeDocument/math",
)
OFF = ("0", "false", "off")


@cache
def tags(*names: str, spaces: tuple[str, ...] = SPACES) -> frozenset[str]:
    """Return the names in each of their namespaces."""
    return frozenset(f"{{{space}}}{name}" for space in spaces for name in names)


def value(element: Any, *path: str) -> str | None:
    """Return the `w:val` at the end of a path of first children; "" if unset, None if the path ends earlier."""
    for name in path:
        element = next(element.iterchildren("{*}" + name), None)
        if element is None:
            return None
    return attribute(element, "val")


def is_on(element: Any, *path: str) -> bool:
    """True if the path leads to a switch that is not off."""
    return value(element, *path) not in (None, *OFF)


def attribute(element: Any, name: str) -> str:
    """Return an attribute by its name, in any namespace."""
    return next((str(v) for key, v in element.items() if key.rpartition("}")[2] == name), "")


class Parts:
    """An archive of parts. Only requested parts are inflated; pictures, macros and fonts never are."""

    def __init__(self, archive: zipfile.ZipFile, name: str) -> None:
        self._archive = archive
        self._paths = set(archive.namelist())
        self._name = name

    def main(self) -> str:
        """Return the path of the main document part."""
        found = next((path for kind, path in self.relations("") if kind == "officeDocument"), None)
        if found is None:
            raise damaged(self._name, "a DOCX", "it does not name its text file")
        return found

    def relations(self, source: str) -> list[tuple[str, str]]:
        """Return the relations of a part inside the archive, as kind and path; "" is the whole file.

        Links to the web, to bookmarks and to missing parts are left out.
        """
        folder, file = posixpath.split(source)
        root = self.tree(posixpath.join(folder, "_rels", f"{file}.rels"))
        found = []
        for relation in [] if root is None else root.iter("{*}Relationship"):
            path = posixpath.normpath(posixpath.join("/", folder, unquote(relation.get("Target", ""))))[1:]
            if relation.get("TargetMode") != "External" and path in self._paths:
                found.append((relation.get("Type", "").rpartition("/")[2], path))
        return found

    def tree(self, path: str) -> Any:
        """Return a part as XML, or None if it is missing. Refuse document types, because only they declare entities."""
        if path not in self._paths:
            return None
        data = member(self._archive, path, self._name)
        if b"<!DOCTYPE" in data.replace(b"\0", b""):
            raise damaged(self._name, "a DOCX", "it declares a document type, which is refused for safety")
        return parse_xml(data, self._name, "a DOCX")
