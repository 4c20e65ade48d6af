"""Calibrations on disk: one file for a machine, one for each model on it. A damaged file is remade."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from kvcli.errors import KvcliError
from kvcli.files import try_folder, write_private
from kvcli.schemas.fit import CalibrationDocument

FOLDER = "calibration"


def digest(*facts: object) -> str:
    """Twelve digits that are equal for equal facts."""
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:12]


def machine_fingerprint(device: str, threads: int = 0) -> str:
    """Of what decides how fast this machine is; a new torch, another thread count or another GPU changes it.

    `threads`: that a profile will load with; 0 = torch's now.
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
    """What was measured before, or None; `tell` hears of a file that cannot be used."""
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
    except (ValueError, TypeError):  # pydantic's errors are ValueErrors; the others are of a date without an offset
        tell(f"the calibration in {file} is damaged and is not used: kvcli bench --calibrate makes it anew")
        return None
    return found


def folder_of(cache: Path) -> Path:
    """The folder of the files, made if it is not there: better before minutes of measuring than after."""
    folder = cache / FOLDER
    try:
        return try_folder(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error


def save_calibration(cache: Path, found: CalibrationDocument) -> Path:
    """Keep it for the next time, readable by its owner only."""
    file = file_of(cache, found.fingerprint, found.model.fingerprint if found.model else "")
    try:
        write_private(folder_of(cache) / file.name, found.model_dump_json(by_alias=True, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(file, error) from error
    return file


def _unwritable(path: Path, error: OSError) -> KvcliError:
    return KvcliError(
        "a calibration cannot be kept",
        code="not_kept",
        lines=[f"{path}: {error.strerror or error}"],
        try_=["KVCLI_HOME or XDG_CACHE_HOME name another place", "kvcli config path"],
    )


def age_days(date: str, now: datetime | None = None) -> int:
    """Whole days since then."""
    return max(0, ((now or datetime.now(UTC)) - datetime.fromisoformat(date)).days)
