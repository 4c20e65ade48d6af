"""Calibrate at first use, in about one second, so that drafting starts with measured pass times.

`kvcli bench --calibrate` measures more and for longer, and its result has priority. Passes that take too long are left
out, because the drafter times its own passes anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.calibrate.passes import ROWS as GRID
from kvcli.calibrate.passes import cache_of_length, contexts, once
from kvcli.calibrate.run import fingerprint_of
from kvcli.files import private_folder, write_private
from kvcli.fit.calibration import file_of, machine_fingerprint
from kvcli.schemas.fit import PassTime, QuickTimes

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.hf.lm import LM

ROWS = (1, 2, 4, 8, 16, 32)
READING = GRID[-1]  # rows of a prefill pass
TURNS = 3  # rounds, of which the first is a warm-up
BUDGET = 1.0  # seconds
RETRY = 24 * 3600  # seconds after which an empty measurement is repeated


def quick_costs(model: Model, cache: Path, tell: Callable[[str], None]) -> list[PassTime]:
    """Return this model's pass times on this machine, saved or measured now. A cache folder that fails is ignored."""
    name = fingerprint_of(model)
    file = file_of(cache, machine_fingerprint(model.info.device), f"{name}-quick")
    if (kept := _kept(file)) is not None:
        return kept
    tell("measuring a few forward passes")
    # empty for a model that is too slow, and saved, so that it is not tried at each start
    passes = quick_times(model.lm)
    times = QuickTimes.from_attributes(model.info, fingerprint=name, passes=passes)
    with suppress(OSError):  # measured again the next time, which costs a second
        private_folder(file.parent)
        write_private(file, times.model_dump_json(by_alias=True) + "\n")
    return passes


def kept_times(cache: Path, machine: str, model: str) -> list[PassTime]:
    """Return the saved pass times for these fingerprints, or an empty list."""
    return _kept(file_of(cache, machine, f"{model}-quick")) or []


def _kept(file: Path) -> list[PassTime] | None:
    """Return saved pass times, or None to measure again: the file is missing, damaged, or empty and old."""
    try:
        passes = QuickTimes.model_validate_json(file.read_bytes()).passes
        return passes if passes or time.time() - file.stat().st_mtime < RETRY else None
    except (OSError, ValueError):
        return None


def quick_times(lm: LM, clock: Callable[[], float] = time.perf_counter) -> list[PassTime]:
    """Time passes of 1 to 32 rows, and of 256, over the first two contexts of the grid, within the time budget."""
    found: list[PassTime] = []
    began = clock()
    for context in contexts(lm.limit)[:2]:
        kv, times = cache_of_length(lm, context), dict[int, list[float]]()
        for turn in range(TURNS):
            for rows in ROWS:
                if clock() - began > BUDGET or rows + context > lm.limit:
                    break
                took = once(lm, kv, rows, context)
                if turn:
                    times.setdefault(rows, []).append(took)
        # upper bound: time per row falls with more rows
        ahead = TURNS * READING / ROWS[-1] * min(times.get(ROWS[-1], [BUDGET]))
        if clock() - began + ahead <= BUDGET and READING + context <= lm.limit:
            times[READING] = [once(lm, kv, READING, context) for _ in range(TURNS)][1:]
        found += [
            PassTime(rows=rows, context=context, seconds=min(took), low=min(took), high=max(took))
            for rows, took in times.items()
            if len(took) == TURNS - 1  # a pass that was timed once may have been delayed
        ]
    return found
