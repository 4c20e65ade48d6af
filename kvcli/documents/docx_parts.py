"""The parts of a DOCX that are read, each found through the relations of the part before it."""

from __future__ import annotations

import posixpath
import zipfile
from typing import Any
from urllib.parse import unquote

from kvcli.documents.parsed import damaged
from kvcli.documents.xml_tree import parse_xml
from kvcli.documents.zipped import member

Relations = list[tuple[str, str]]


class Parts:
    """An archive of parts. Only those asked for are unpacked: pictures, macros and fonts never are."""

    def __init__(self, archive: zipfile.ZipFile, name: str) -> None:
        self._archive = archive
        self._paths = set(archive.namelist())
        self._name = name

    def main(self) -> str:
        """The path of the text."""
        found = next((path for kind, path in self.relations("") if kind == "officeDocument"), None)
        if found is None:
            raise damaged(self._name, "a DOCX", "it does not say which of its files is the text")
        return found

    def relations(self, source: str) -> Relations:
        """What a part points at inside the archive, as kind and path; "" is the whole file.

        Links to the web, to bookmarks and to parts that are not there are left out.
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
        """A part as XML, None where there is none. Refuses document types: entities are declared nowhere else."""
        if path not in self._paths:
            return None
        data = member(self._archive, path, self._name)
        if b"<!DOCTYPE" in data.replace(b"\0", b""):
            raise damaged(self._name, "a DOCX", "it declares a document type, which can be made to fill memory")
        return parse_xml(data, self._name, "a DOCX")
