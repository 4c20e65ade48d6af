"""A file lock, so that one process at a time works on a saved chat. The system frees it when the process ends."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path

from kvcli.errors import BadInput, writing
from kvcli.files import BEGINS, ENDS, lock, opened, private_folder

ABOUT = 40  # bytes of the note on the process that has the lock
MOMENT = 0.05  # seconds; the cleanup of temporary files locks the file of a dead process for less


class ChatLock:
    """An exclusive lock on the saved chat of this name until `close`. After a kill, the next start removes its file."""

    def __init__(self, folder: Path, name: str) -> None:
        """Take the lock. Raises BadInput if another process has it or the folder is not writable."""
        self._name, self._path, self._stack = name, folder / f"{BEGINS}{name}{ENDS}", ExitStack()
        with writing(self._path):
            private_folder(folder)
            handle = self._stack.enter_context(opened(self._path, os.O_RDWR | os.O_CREAT, self._take))
        self._stack.callback(self._leave)
        with suppress(OSError):  # a full disk; then the error of another process names no process
            os.pwrite(handle, f"process {os.getpid()}, since {datetime.now():%H:%M}".ljust(ABOUT).encode(), 0)

    def close(self) -> None:
        """Release the lock."""
        self._stack.close()

    def _leave(self) -> None:
        with suppress(OSError):  # else the next start removes it
            self._path.unlink()

    def _take(self, handle: int) -> None:
        for is_last in (False, True):
            try:
                lock(handle, wait=False)
                return
            except BlockingIOError:
                if is_last:
                    who = os.pread(handle, ABOUT, 0).decode(errors="replace").strip()
                    raise BadInput(f"{self._name} is open in another kvcli ({who})", code="chat_in_use") from None
                time.sleep(MOMENT)
