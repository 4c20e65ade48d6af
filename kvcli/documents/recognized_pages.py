"""Disk cache of text recognized on scanned pages (OCR), so that a document is recognized once, not at each question.

One file for each document, named by the hash of its bytes and the releases that recognized it. It is private to its
owner (0600), written atomically, and begins with a hash of the rest: a damaged one is recognized again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvcli.documents.document import ParseJob
from kvcli.documents.reading_order import LinePiece
from kvcli.files import private_folder, write_private
from kvcli.installing import EXTRAS

SCHEMA = "kvcli.ocr/1"
FOLDER = "ocr"  # below the cache folder
MOST_BYTES = 64 << 20  # of all documents, some 4,000 pages; the least recently used are removed


@dataclass(frozen=True, slots=True)
class RecognizedPages:
    """Lines of recognized pages of one document, by page."""

    file: Path | None  # None: they are not saved

    @classmethod
    def of(cls, cache: Path | None, sha256: str, job: ParseJob) -> RecognizedPages:
        """Return those of a document in this cache folder. Text of an encrypted document is not saved."""
        if cache is None or job.password is not None:
            return cls(None)
        with suppress(PackageNotFoundError):
            named = json.dumps([SCHEMA, sha256, *map(version, EXTRAS["ocr"])])
            return cls(cache / FOLDER / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.json")
        return cls(None)

    def read(self) -> dict[int, list[LinePiece]]:
        """Return the saved lines; none if the file is missing, damaged or of another version."""
        if self.file is None:
            return {}
        from pydantic import TypeAdapter

        try:
            stated, _, data = self.file.read_bytes().partition(b"\n")
            if stated != _digest(data):
                return {}
            os.utime(self.file)
            return TypeAdapter(dict[int, list[LinePiece]]).validate_json(data)
        except (OSError, ValueError):
            return {}

    def add(self, new: Mapping[int, Sequence[LinePiece]]) -> None:
        """Save more pages."""
        if self.file is None or not new:
            return
        pages = {number: [asdict(line) for line in lines] for number, lines in (self.read() | {**new}).items()}
        data = json.dumps(pages).encode()
        with suppress(OSError):  # the disk is full, for example: the next run recognizes the pages again
            write_private(private_folder(self.file.parent) / self.file.name, _digest(data) + b"\n" + data)
            files = sorted(self.file.parent.glob("[!.]*"), key=lambda file: -file.stat().st_mtime_ns)
            sizes = [file.stat().st_size for file in files]
            for i, file in enumerate(files):
                if sum(sizes[: i + 1]) > MOST_BYTES:
                    file.unlink(missing_ok=True)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
