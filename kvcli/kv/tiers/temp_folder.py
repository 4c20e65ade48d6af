"""Folder of the private KV file: on a disk, not on a file system in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil

from kvcli.kv.out_of_memory import CacheFull

IN_MEMORY = ("tmpfs", "ramfs")  # file systems that are no disk


def temporary_folder() -> Path:
    """Return the system's folder for large temporary files that is on a disk. Raises CacheFull if there is none."""
    found = [Path("/var/tmp"), Path(tempfile.gettempdir())]
    for folder in found:
        if folder.is_dir() and _file_system(folder) not in IN_MEMORY:
            return folder
    names = ", ".join(map(str, found))
    raise CacheFull("memory.disk needs a folder on a disk", lines=[f"{names}: in memory, or missing"])


def _file_system(folder: Path) -> str:
    """Return the type of the file system of a folder."""
    at = folder.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if at.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""
