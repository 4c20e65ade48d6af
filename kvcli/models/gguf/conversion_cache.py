"""Copies of models in another format: named after what they were made of, and the oldest forgotten."""

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

FOLDER = "gguf"  # of the cache
KEPT = 4  # copies, those used last


def fingerprint(found: Source, version: int, hashes: Hashes) -> str:
    """The same for the same bytes of the weights under the same config, written by the same code of this `version`."""
    import tokenizers

    files = [Stamped.of(file.path) for file in found.files]
    made_by = [version, tokenizers.__version__, *releases().values()]
    said = json.dumps([hashes.of(files), found.config, made_by], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def use(copy: Path) -> None:
    """Note that it is used now, whatever the disk notes by itself."""
    file = copy / "config.json" if copy.is_dir() else copy
    os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))


def forget(folder: Path, keep: int) -> None:
    """Remove copies, but for so many used last: each is as large as its model."""
    copies = sorted(folder.glob("[!.]*"), key=_used)
    for copy in copies[: max(0, len(copies) - keep)]:
        with suppress(OSError):  # Windows keeps one that another process has open
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink()


def _used(copy: Path) -> int:
    file = copy / "config.json" if copy.is_dir() else copy
    return file.stat().st_atime_ns if file.exists() else 0
