"""Room on a shelf: what was not used for longest goes first, before what is new is written."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvcli.prefix_cache.block_tree import ENDS

LEFT = 0.9  # of the room: where it is full, files go until no more than this is taken
TICK = 0.001  # seconds


def evict_lru(folder: Path, most: int, fresh: int = 0) -> None:
    """Have files below a folder go, where with so many bytes more there would be more than `most`."""
    stats = []
    for path in folder.glob(f"*/*{ENDS}"):
        with suppress(FileNotFoundError):  # another run made room
            stats.append((path, path.stat()))
    total = sum(stat.st_size for _, stat in stats) + fresh
    if total <= most:
        return
    for path, stat in sorted(stats, key=lambda each: each[1].st_mtime_ns):
        if total <= max(fresh, int(most * LEFT)):
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size


def touch(paths: Sequence[Path]) -> None:
    """As used now, those further on a little earlier: without what comes before it, a block serves nobody."""
    now = time.time()
    for i, path in enumerate(paths):
        with suppress(OSError):
            os.utime(path, (now - i * TICK, now - i * TICK))
