"""The table of exactness on the device: how many drafted texts are those of plain decoding, alone and side by side.

In float32 and float64 all should be. In bfloat16, where a row rounds otherwise among others, it is counted how many
texts part, and where: that is what `--exact` gives up drafting for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import product

from kvcli.errors import KvcliError
from tests.exact.table import (
    BROKEN,
    CANCELLED,
    DRAFTERS,
    MODELS,
    POLICIES,
    SAMPLERS,
    STORAGES,
    decode,
    plain,
    serves,
    side_by_side,
)
from tests.gpu.stage import On, Row, why

TINY = 2  # texts of each kind
MOST = 20  # faults written out
ALONE = list(product(POLICIES, DRAFTERS, SAMPLERS))


def _alone(storage: str, dtype: str, on: On, seconds: float) -> Row:
    """Texts in a random order, until the time is over."""
    rows = [row for row in ALONE if serves(storage, *row[:2])]
    found: Row = {"kind": "alone", "storage": storage, "dtype": dtype, "of": len(rows), "tried": 0, "equal": 0}
    found |= {"parted": [], "n_faults": 0, "faults": {}, "seconds": 0.0}
    began = time.monotonic()
    for policy, drafter, sampler in random.Random(0).sample(rows, TINY if on.is_tiny else len(rows)):
        if time.monotonic() - began > seconds:
            break
        name = f"{policy}, {drafter}, {sampler}"
        try:
            want = plain(storage, policy, sampler, dtype, on.device)
            got = decode(storage, policy, sampler, dtype, DRAFTERS[drafter](want), on.device)
        except (KvcliError, RuntimeError, ImportError, AssertionError) as error:
            found["n_faults"] += 1
            if len(found["faults"]) < MOST:
                found["faults"][name] = why(error)
            continue
        found["tried"] += 1
        found["equal"] += got == want
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
            found["parted"].append([name, at])
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def _together(storage: str, dtype: str, on: On, seconds: float) -> Row:
    found: Row = {"kind": "side by side", "storage": storage, "dtype": dtype, "tried": 0, "equal": 0}
    found |= {"parted": [], "n_faults": 0, "faults": {}, "seconds": 0.0}
    began = time.monotonic()
    for policy in [one for one in POLICIES if serves(storage, one)][: 1 if on.is_tiny else None]:
        if time.monotonic() - began > seconds:
            break
        try:
            texts = side_by_side(storage, policy, dtype, on.device)
        except (KvcliError, RuntimeError, ImportError, AssertionError) as error:
            found["n_faults"] += 1
            found["faults"][policy] = why(error)
            continue
        for at, (task, want) in enumerate(texts):
            if at in (BROKEN, CANCELLED):
                continue
            found["tried"] += 1
            if task.error is not None:
                found["n_faults"] += 1
                found["faults"][f"{policy}, text {at}"] = why(task.error)
            elif task.result() == want:
                found["equal"] += 1
            else:
                found["parted"].append([policy, at])
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def run(on: On) -> Iterator[Row]:
    in_half = [(name, "bf16") for name in MODELS if name != "rounded"]
    jobs = [(_alone, *row) for row in STORAGES] + [(_together, *row) for row in STORAGES]
    jobs += [(_alone, *row) for row in in_half]
    if on.is_tiny:
        jobs = [jobs[0], jobs[len(STORAGES)], jobs[2 * len(STORAGES)]]
    counts: dict[str, list[int]] = {}
    for at, (job, storage, dtype) in enumerate(jobs):
        yield (row := job(storage, dtype, on, max(0.0, on.left) / (len(jobs) - at)))
        count = counts.setdefault("bf16" if dtype == "bf16" else row["kind"], [0, 0, 0])
        for place, more in enumerate((row["equal"], row["tried"], row["n_faults"])):
            count[place] += more
    said = [f"{kind} {equal} of {tried} equal, {faults} faults" for kind, (equal, tried, faults) in counts.items()]
    yield {"counts": counts, "says": "; ".join(said)}
