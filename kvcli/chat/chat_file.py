"""A file that one process works on at a time, and that is never written over what another has made of it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcli.errors import BadInput
from kvcli.files import is_at, lock, opened, replacing

MOST = 512 << 20  # bytes that are read of a file; several times the largest document


class ChatFile:
    """`holds`: nobody else can hold or write it from the first reading or writing until `close`.

    Otherwise it is locked only while it is written. Either way, what is not as it was left is not written over. A
    file that is replaced is another file to the system, so the lock goes from the old to the new one. A link is
    followed: what it leads to is the file.
    """

    def __init__(self, path: Path, *, holds: bool = False) -> None:
        self.path, self.holds = Path(os.path.realpath(path)), holds
        self._lock: int | None = None  # an open file
        self._seen = b""  # digest of what the file held when we read or wrote it

    def read(self) -> bytes:
        """All of it. Raises OSError, and BadInput for what is no file, too large, or held by another process."""
        with self._opened(locks=self.holds) as handle:
            data = _all(handle, self.path)
            if self.holds:
                self._keep(os.dup(handle))  # the lock is the open file's, and so that of both numbers
        self._seen = _digest(data)
        return data

    def write(self, data: bytes) -> None:
        """Replace it. Raises OSError, and BadInput if another process holds it or has changed it."""
        try:
            with self._opened(locks=True) as handle:
                if _digest(_all(handle, self.path)) != self._seen:
                    raise changed(self.path)
                self._replace(data, is_new=False)
        except FileNotFoundError:  # a new one, or removed by somebody, who has it no more
            try:
                self._replace(data, is_new=True)
            except FileExistsError:
                raise changed(self.path) from None

    def close(self) -> None:
        """Let others have it."""
        self._keep(None)

    def _replace(self, data: bytes, *, is_new: bool) -> None:
        mine: int | None = None
        try:
            with replacing(self.path, is_new=is_new) as stream:
                stream.write(data)
                mine = os.dup(stream.fileno())
        finally:  # what has the name is ours, also where its folder could not be synced, or after Ctrl-C
            if mine is not None and is_at(mine, self.path):
                self._seen = _digest(data)
                self._keep(os.dup(mine) if self.holds else None)
            if mine is not None:
                os.close(mine)

    def _keep(self, handle: int | None) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = handle

    @contextmanager
    def _opened(self, *, locks: bool) -> Iterator[int]:
        """The file that has the name now, locked if asked for."""
        if self._lock is not None and is_at(self._lock, self.path):
            yield self._lock
            return
        how = os.O_RDWR if locks else os.O_RDONLY  # NFS locks only what is open to be written
        # a pipe without a writer is not waited for
        with opened(self.path, how | os.O_NONBLOCK, self._take if locks else lambda _: None) as handle:
            yield handle

    def _take(self, handle: int) -> None:
        try:
            lock(handle, wait=False)
        except BlockingIOError:
            raise BadInput(f"{self.path} is open in another kvcli", code="chat_in_use") from None


def changed(path: Path) -> BadInput:
    return BadInput(f"{path} was changed by another program and is left as it is", code="chat_changed")


def _all(handle: int, path: Path) -> bytes:
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        raise BadInput(f"{path} is no file", code="not_a_chat")
    if about.st_size > MOST:
        raise BadInput(f"{path} is too large: {about.st_size:,} bytes, at most {MOST:,} are read", code="not_a_chat")
    with os.fdopen(os.dup(handle), "rb") as stream:
        stream.seek(0)
        return stream.read()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
