"""Records of earlier runs on this machine: calibrations, and used beside estimated memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from kvcli import files
from kvcli.errors import KvcliError
from kvcli.files import try_folder, write_private
from kvcli.schemas.fit import CalibrationDocument, RunEntry

# Calibration files: one per machine, and one per model on it. A damaged file is measured again.

FOLDER = "calibration"


def digest(*facts: object) -> str:
    """Return twelve hex digits that are equal for equal facts."""
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:12]


def machine_fingerprint(device: str, threads: int = 0) -> str:
    """Return a digest of what determines this machine's speed: GPU or CPU, number of threads, version of torch.

    `threads`: the number that the profile will load with; 0 = torch's current number.
    """
    import torch

    from kvcli.models import machine

    kind = device.partition(":")[0]
    name = machine.cpu_name() if kind == "cpu" else next((d.name for d in machine.devices() if d.kind == device), "")
    return digest(kind, name, machine.cores(), threads or machine.threads(), torch.__version__)


def file_of(cache: Path, fingerprint: str, model: str = "") -> Path:
    return cache / FOLDER / f"{fingerprint}{'-' if model else ''}{model}.json"


def load_calibration(
    cache: Path, fingerprint: str, model: str = "", tell: Callable[[str], None] = lambda _: None
) -> CalibrationDocument | None:
    """Load an earlier calibration, or return None; `tell` is called with a message if the file cannot be used."""
    file = file_of(cache, fingerprint, model)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        tell(f"the calibration in {file} cannot be read and is not used: {type(error).__name__}")
        return None
    try:
        found = CalibrationDocument.model_validate_json(text)
        age_days(found.date)
    except (ValueError, TypeError):  # pydantic's errors are ValueErrors; the others come from a date without an offset
        tell(f"the calibration in {file} is damaged and is not used: kvcli bench --calibrate replaces it")
        return None
    return found


def folder_of(cache: Path) -> Path:
    """Create the calibration folder before measuring, so that an unwritable folder fails before minutes of work."""
    folder = cache / FOLDER
    try:
        return try_folder(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error


def save_calibration(cache: Path, found: CalibrationDocument) -> Path:
    """Save a calibration, readable by its owner only."""
    file = file_of(cache, found.fingerprint, found.model.fingerprint if found.model else "")
    try:
        write_private(folder_of(cache) / file.name, found.model_dump_json(by_alias=True, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(file, error) from error
    return file


def _unwritable(path: Path, error: OSError) -> KvcliError:
    return KvcliError(
        "the calibration cannot be saved",
        code="not_kept",
        lines=[f"{path}: {error.strerror or error}"],
        try_=["KVCLI_HOME or XDG_CACHE_HOME name another folder", "kvcli config path"],
    )


def age_days(date: str, now: datetime | None = None) -> int:
    """Return the whole days since the date."""
    return max(0, ((now or datetime.now(UTC)) - datetime.fromisoformat(date)).days)


NAME = "runs.jsonl"
LAST = 6  # runs that count
FEWEST = 3  # runs for a median; missing ones count as no excess
MOST = 256 << 10  # bytes; beyond that, the older half is deleted


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


def measured_excess(entries: Sequence[RunEntry], model: str, kind: str, build: str) -> Beyond:
    """Return the excess of the last runs of a model on a kind of device, with one build of torch and other imports,
    because only such estimates are made alike. The last turn of a process counts."""
    facts = model, kind, build
    same = {e.run: e for e in entries if (e.model, e.device.partition(":")[0], e.build) == facts}
    found = [e.measured - e.predicted for e in same.values()][-LAST:]
    if not found:
        return NOTHING
    padded = [*found, *[0] * (FEWEST - len(found))]
    return Beyond(int(median(padded)), min(found), max(found), len(found))
