"""Disk quota of a prefix cache: the least recently used files are evicted before new ones are written."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvcli.prefix_cache.block_tree import ENDS

LEFT = 0.9  # share of the quota to which files are evicted when it is exceeded
TICK = 0.001  # seconds


def evict_lru(folder: Path, most: int, fresh: int = 0) -> None:
    """Evict the least recently used files of a folder if `fresh` more bytes would exceed `most`."""
    stats = []
    for path in folder.glob(f"*/*{ENDS}"):
        with suppress(FileNotFoundError):  # evicted by another process
            stats.append((path, path.stat()))
    total = sum(stat.st_size for _, stat in stats) + fresh
    if total <= most:
        return
    for path, stat in sorted(stats, key=lambda each: each[1].st_mtime_ns):
        if total <= max(fresh, int(most * LEFT)):
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size


def mark_used(paths: Sequence[Path]) -> None:
    """Mark files as used now, later blocks slightly earlier, because they are useless without those before."""
    now = time.time()
    for i, path in enumerate(paths):
        with suppress(OSError):
            os.utime(path, (now - i * TICK, now - i * TICK))
