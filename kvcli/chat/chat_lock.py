"""A session that one process works on at a time: a lock of the system's, gone with the process however that ends."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path

from kvcli.errors import BadInput, writing
from kvcli.files import BEGINS, ENDS, lock, opened, private_folder

ABOUT = 40  # bytes
MOMENT = 0.05  # seconds; who sweeps holds the file of a dead process for less


class ChatLock:
    """Nobody else can hold the session of this name until `close`. The file is swept after a kill, as others are."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises BadInput if another process holds it, or nothing can be written there."""
        self._name, self._path, self._stack = name, folder / f"{BEGINS}{name}{ENDS}", ExitStack()
        with writing(self._path):
            private_folder(folder)
            handle = self._stack.enter_context(opened(self._path, os.O_RDWR | os.O_CREAT, self._take))
        self._stack.callback(self._leave)
        with suppress(OSError):  # a full disk; who is told then is told less
            os.pwrite(handle, f"process {os.getpid()}, since {datetime.now():%H:%M}".ljust(ABOUT).encode(), 0)

    def close(self) -> None:
        """Let others have it."""
        self._stack.close()

    def _leave(self) -> None:
        with suppress(OSError):  # else the next start sweeps it
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
