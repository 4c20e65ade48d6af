"""Cache of models converted to another format. Copies are named by a hash of their source; the oldest are removed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.models.hashes import Hashes, Stamped, releases

if TYPE_CHECKING:
    from kvcli.models.source import Source

FOLDER = "gguf"  # folder below the cache
KEPT = 4  # copies, the most recently used


def fingerprint(found: Source, version: int, hashes: Hashes) -> str:
    """Hash of the weights' bytes, the config and the version of the converting code."""
    import tokenizers

    files = [Stamped.of(file.path) for file in found.files]
    made_by = [version, tokenizers.__version__, *releases().values()]
    said = json.dumps([hashes.of(files), found.config, made_by], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def use(copy: Path) -> None:
    """Mark a copy as used now, also on disks that do not record access."""
    file = copy / "config.json" if copy.is_dir() else copy
    os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))


def forget(folder: Path, keep: int) -> None:
    """Remove all but the `keep` most recently used copies, because each is as large as its model."""
    copies = sorted(folder.glob("[!.]*"), key=_used)
    for copy in copies[: max(0, len(copies) - keep)]:
        with suppress(OSError):  # on Windows, a copy open in another process cannot be removed
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink()


def _used(copy: Path) -> int:
    file = copy / "config.json" if copy.is_dir() else copy
    return file.stat().st_atime_ns if file.exists() else 0
