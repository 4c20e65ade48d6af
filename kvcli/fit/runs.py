"""What earlier runs used beside what was foretold: a line each, no word of what was said.

The estimates are multiplied by the middle ratio of the last runs, so they get better where this machine differs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from kvcli.files import private_folder, write_private
from kvcli.schemas.fit import RunEntry

NAME = "runs.jsonl"
LAST = 6  # runs whose ratios count
MOST = 256 << 10  # bytes; beyond, the older half goes


@dataclass(frozen=True, slots=True)
class Ratios:
    """Measured over estimated."""

    middle: float
    low: float
    high: float
    runs: int


def append(folder: Path, entry: RunEntry) -> None:
    """Raises OSError where it cannot be written."""
    file = private_folder(folder) / NAME
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(handle, "a", encoding="utf-8") as stream:
        stream.write(entry.model_dump_json(by_alias=True) + "\n")
    if file.stat().st_size > MOST:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_private(file, "".join(lines[len(lines) // 2 :]))


def read(folder: Path) -> list[RunEntry]:
    """Oldest first; lines that are no entry are passed over."""
    try:
        lines = (folder / NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(RunEntry.model_validate_json(line))
        except ValidationError:
            continue
    return found


def ratios(entries: Sequence[RunEntry], model: str, profile: str, device: str) -> Ratios | None:
    """Of the last runs of this model under this profile on this kind of device; None without any."""
    kind = device.partition(":")[0]
    like = [e for e in entries if (e.model, e.profile, e.device.partition(":")[0]) == (model, profile, kind)]
    found = [e.measured / e.predicted for e in like[-LAST:] if e.predicted > 0 and e.measured > 0]
    return Ratios(median(found), min(found), max(found), len(found)) if found else None
