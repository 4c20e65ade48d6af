"""What earlier runs used beside what was foretold: a line each, no word of what was said.

What the last runs took beyond their estimates, in the middle, is added to what the program takes: weights, keys and
values are known to the byte, so their share of an estimate is never stretched. All profiles alike, or comparing them
would say which of them ran before. One odd run, with a huge document or on a machine that swapped, moves nothing: it
takes two that agree.
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
FEWEST = 3  # runs for a middle; those that are missing count as foretold exactly
MOST = 256 << 10  # bytes; beyond, the older half goes


@dataclass(frozen=True, slots=True)
class Like:
    """What runs must share for one to say anything of another: estimates are made alike only then."""

    model: str
    kind: str  # of device
    build: str  # of torch and what else is imported


@dataclass(frozen=True, slots=True)
class Beyond:
    """Bytes measured beyond the estimate, less than none where it was too high."""

    middle: int
    low: int
    high: int
    runs: int


NOTHING = Beyond(0, 0, 0, 0)  # known of any run


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


def measured_excess(entries: Sequence[RunEntry], like: Like) -> Beyond | None:
    """Of the last runs of this kind; None without any. Of a process with many turns the last one counts."""
    same = {e.run: e for e in entries if like == _like(e)}
    found = [e.measured - e.predicted for e in same.values()][-LAST:]
    if not found:
        return None
    padded = [*found, *[0] * (FEWEST - len(found))]
    return Beyond(int(median(padded)), min(found), max(found), len(found))


def _like(e: RunEntry) -> Like:
    return Like(e.model, e.device.partition(":")[0], e.build)
