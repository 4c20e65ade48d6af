"""Documents in requests: files in base64, read in a limited process, and kept in memory by the hash of their bytes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcli.documents import document_of, notes_of, with_documents
from kvcli.serve.errors import Refused

if TYPE_CHECKING:
    from kvcli.documents import Document
    from kvcli.serve.schemas import FileData


class Documents:
    """The documents of requests. Those that no request has named for the longest time are forgotten first."""

    def __init__(self, max_characters: int = 16 << 20, at_once: int = 2) -> None:
        """`max_characters`: of all documents together; the latest one is kept even if it is longer. `at_once`: files
        that are read at a time."""
        self._max_characters = max_characters
        self._kept: dict[str, Document] = {}  # by id, the latest last
        self._readers = ThreadPoolExecutor(at_once, "kvcli-documents")

    def get(self, id: str) -> Document:
        """Return a document by its id, the hash of its bytes. Raises Refused (404)."""
        if id not in self._kept:
            said = "the server does not have this document, or no longer"
            raise Refused(404, said, code="no_such_document", try_=["send the file again"])
        return self._keep(self._kept[id])

    async def read(self, file: FileData) -> Document:
        """Read a file. Raises KvcliError for a file that cannot be read."""
        if file.file_id:
            return self.get(file.file_id)
        try:
            given = file.file_data.partition(";base64,")[2] or file.file_data
            data = base64.b64decode("".join(given.split()), validate=True)  # `base64` breaks its lines
        except (binascii.Error, ValueError):  # ValueError: other letters than ASCII
            ways = ["file_data: data:application/pdf;base64,..."]
            raise Refused(400, f"{file.filename} is no base64", code="bad_file", param="file_data", try_=ways) from None
        if (known := self._kept.get(hashlib.sha256(data).hexdigest())) and known.name == file.filename:
            return self._keep(known)  # a conversation without state sends it with each request
        work = self._readers.submit(partial(document_of, data, file.filename))
        return self._keep(await asyncio.wrap_future(work))

    async def text_of(self, parts: Sequence[Any], notes: list[str]) -> str:
        """Return the text of a message's parts, documents first. A part has a `text` or a `file`. What was not read of
        the documents is added to `notes`."""
        documents = [await self.read(part.file) for part in parts if part.file]
        notes += [note for document in documents for note in notes_of(document)]
        return with_documents("\n".join(part.text for part in parts if not part.file), documents)

    def close(self) -> None:
        """Forget all documents, and end the reading."""
        self._kept.clear()
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _keep(self, document: Document) -> Document:
        self._kept.pop(document.sha256, None)
        self._kept[document.sha256] = document
        while len(self._kept) > 1 and sum(len(one.text) for one in self._kept.values()) > self._max_characters:
            self._kept.pop(next(iter(self._kept)))
        return document
