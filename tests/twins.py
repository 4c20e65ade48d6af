"""Files that nobody tells apart who does not read all of them: of one size, one time of writing, and one other byte."""

from __future__ import annotations

import os
from pathlib import Path

TIME = 1_000_000_000_000_000_000  # ns, when everything was written: as in an archive that is the same whoever makes it


def flipped(data: bytes, at: int) -> bytes:
    """With one bit of one byte another one."""
    made = bytearray(data)
    made[at] ^= 1
    return bytes(made)


def put(path: Path, data: bytes, how: str = "in place") -> None:
    """Give the file these bytes, written when all files were, and surely changed later than what was there."""
    before = path.stat().st_ctime_ns if path.exists() else 0
    while True:  # until the clock of the disk has moved on
        if how == "rename":
            path.with_suffix(".new").write_bytes(data)
            path.with_suffix(".new").replace(path)
        elif how == "link":
            target = path.with_name(f"{path.name}.{len(list(path.parent.iterdir()))}")
            target.write_bytes(data)
            os.utime(target, ns=(TIME, TIME))
            path.unlink(missing_ok=True)
            path.symlink_to(target.name)
        else:
            path.write_bytes(data)
        os.utime(path, ns=(TIME, TIME))
        if path.stat().st_ctime_ns != before:
            return
