"""Files that belong to one user: mode 0600 in folders of mode 0700, and never half written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def private_folder(folder: Path) -> Path:
    """Make the folder and what is missing above it, open to its owner only."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    return folder


def write_private(path: Path, text: str | bytes) -> None:
    """Replace the file in one step: a reader, or a crash, sees the old text or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp makes files 0600
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text.encode() if isinstance(text, str) else text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
