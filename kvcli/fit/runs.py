"""What earlier runs used beside what was foretold: a line each, no word of what was said.

The estimates are multiplied by the middle ratio of the last runs, so they get better where this machine differs. One
odd run, with a huge document or on a machine that swapped, moves nothing: it takes two that agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from kvcli import files
from kvcli.schemas.fit import RunEntry

NAME = "runs.jsonl"
LAST = 6  # runs whose ratios count
FEWEST = 3  # runs for a middle; those that are missing count as foretold exactly
MOST = 256 << 10  # bytes; beyond, the older half goes


@dataclass(frozen=True, slots=True)
class Like:
    """What runs must share for the ratio of one to say anything of another: estimates are made alike only then."""

    model: str
    profile: str
    kind: str  # of device
    base: int  # bytes that stood for a bare process: a calibration changes it
    kvcli: str  # version


@dataclass(frozen=True, slots=True)
class Ratios:
    """Measured over estimated."""

    middle: float
    low: float
    high: float
    runs: int


def append(folder: Path, entry: RunEntry) -> None:
    """Raises OSError where it cannot be written."""
    files.append(files.private_folder(folder) / NAME, entry.model_dump_json(by_alias=True) + "\n", MOST)


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


def ratios(entries: Sequence[RunEntry], like: Like) -> Ratios | None:
    """Of the last runs of this kind; None without any. Of a process with many turns the last one counts."""
    same = {e.run: e for e in entries if like == _like(e)}
    found = [e.measured / e.predicted for e in same.values() if e.predicted > 0 and e.measured > 0][-LAST:]
    if not found:
        return None
    padded = [*found, *[1.0] * (FEWEST - len(found))]
    return Ratios(median(padded), min(found), max(found), len(found))


def _like(e: RunEntry) -> Like:
    return Like(e.model, e.profile, e.device.partition(":")[0], e.base, e.kvcli)
