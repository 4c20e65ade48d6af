"""Log of used and estimated memory, one line per run, without any text of a chat.

The median excess of the last runs over their estimates is added to the program's memory. Weights and KV are known to
the byte, so their share of an estimate is never scaled. The excess is the same for all profiles, because otherwise a
comparison would depend on which profiles ran before. One outlier, such as a run with a huge document or on a machine
that swapped, does not change the median: at least two runs must agree.
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
LAST = 6  # runs that count
FEWEST = 3  # runs for a median; missing ones count as no excess
MOST = 256 << 10  # bytes; beyond that, the older half is deleted


@dataclass(frozen=True, slots=True)
class Like:
    """Facts that two runs must share, because only then their estimates are made alike."""

    model: str
    kind: str  # kind of device
    build: str  # digest of torch's build and other imports


@dataclass(frozen=True, slots=True)
class Beyond:
    """Measured bytes beyond the estimate; negative if the estimate was too high."""

    middle: int
    low: int
    high: int
    runs: int


NOTHING = Beyond(0, 0, 0, 0)  # no run is known


def append(folder: Path, entry: RunEntry) -> None:
    """Append a run. Raises OSError if the log cannot be written."""
    files.append(files.private_folder(folder) / NAME, entry.model_dump_json(by_alias=True) + "\n", MOST)


def read(folder: Path) -> list[RunEntry]:
    """Return the logged runs, oldest first; invalid lines are skipped."""
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


def measured_excess(entries: Sequence[RunEntry], like: Like) -> Beyond | None:
    """Return the excess of the last runs with the same facts, or None. The last turn of a process counts."""
    same = {e.run: e for e in entries if like == _like(e)}
    found = [e.measured - e.predicted for e in same.values()][-LAST:]
    if not found:
        return None
    padded = [*found, *[0] * (FEWEST - len(found))]
    return Beyond(int(median(padded)), min(found), max(found), len(found))


def _like(e: RunEntry) -> Like:
    return Like(e.model, e.device.partition(":")[0], e.build)
