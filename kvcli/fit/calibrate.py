"""Calibrate a machine and save it: pass times by rows and tokens in the KV cache, bandwidths, launch cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.files import private_folder, write_private
from kvcli.fit.run_log import digest, file_of, folder_of, load_calibration, machine_fingerprint, save_calibration
from kvcli.kv.recurrent_state import RecurrentStates
from kvcli.kv.tiers.dense import Dense
from kvcli.models.catalog import Hashes, Stamped, releases
from kvcli.schemas.fit import CalibrationDocument, ModelTimes, PassTime, QuickTimes
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.loaded_model import LoadedModel
    from kvcli.chat.model import Model
    from kvcli.engine.hf.lm import LM
    from kvcli.environment import Environment
    from kvcli.fit.plan import Plan, PlannedModel
    from kvcli.settings.profile import Profile

Tell = Callable[[str], None]

# Measure the machine without a model: bandwidths, matrix products, launch cost.

SIZE = 256 << 20  # bytes moved: more than any CPU or GPU cache holds
EDGE = 1024  # size of the square matrices that are multiplied
CALLS = 2000  # tiny operations timed together
MACHINE_REPS = 5


def bandwidth(device: torch.device) -> float:
    """Measure the bytes per second read from the device's memory."""
    x = torch.ones(SIZE // 4, device=device)
    return SIZE / _seconds(lambda: x.sum(), device)


def gemm(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP per second of a product of square matrices."""
    a = torch.ones(EDGE, EDGE, device=device, dtype=dtype)
    return 2 * EDGE**3 / _seconds(lambda: a @ a, device)


def launch(device: torch.device) -> float:
    """Measure the seconds of an operation on one number: the cost of each call in a pass."""
    x = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(CALLS):
            x.add_(1)

    return _seconds(many, device) / CALLS


def links(device: torch.device) -> dict[str, float]:
    """Measure the bytes per second between host and device; empty if both are the same memory."""
    if device.type != "cuda":
        return {}
    there = torch.empty(SIZE, dtype=torch.uint8, device=device)
    found = {}
    for name, pinned in (("pinned", True), ("pageable", False)):
        here = torch.empty(SIZE, dtype=torch.uint8, pin_memory=pinned)
        found[f"to_device_{name}"] = SIZE / _seconds(lambda h=here: there.copy_(h), device)  # type: ignore[misc]
        found[f"to_host_{name}"] = SIZE / _seconds(lambda h=here: h.copy_(there), device)  # type: ignore[misc]
    return found


def disk(file: Path) -> float | None:
    """Measure the bytes per second of a file read from disk; None if the system cannot drop the file from memory."""
    if not hasattr(os, "posix_fadvise") or not file.is_file():
        return None
    handle = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        began, count = time.perf_counter(), 0
        while count < SIZE and (block := os.read(handle, 4 << 20)):
            count += len(block)
        took = time.perf_counter() - began
    finally:
        os.close(handle)
    return count / took if took > 0 and count else None


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median of several runs, after one warm-up run."""
    times = []
    for _ in range(MACHINE_REPS + 1):
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])


# Measure the pass times of a loaded model, by rows and tokens in the KV cache.

GRID_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)  # the last is a prefill pass: products gain no more speed from more rows
FIRST = 512  # tokens; each context is four times the one before
LAST = 32768  # beyond, times are extrapolated linearly, and the KV of the test could fill the memory
PASS_REPS = 3


def contexts(limit: int) -> list[int]:
    """Return 512, 2k, 8k and 32k, as far as they and the longest pass fit the model's limit; add the limit if close."""
    end = max(1, limit - GRID_ROWS[-1])
    found = [FIRST * 4**i for i in range(4) if FIRST * 4**i <= min(end, LAST)]
    if not found or 2 * found[-1] <= end <= LAST:
        found.append(end)
    return found


def pass_times(lm: LM, tell: Tell) -> list[PassTime]:
    """Time the whole grid. Row counts alternate at each context, so that a machine that slows down affects all."""
    found: list[PassTime] = []
    for context in contexts(lm.limit):
        tell(f"measuring passes over {context:,} tokens")
        kv = cache_of_length(lm, context)
        times: dict[int, list[float]] = {rows: [] for rows in GRID_ROWS if rows + context <= lm.limit}
        for rep in range(PASS_REPS + 1):
            once(lm, kv, 1, context)  # reloads the CPU caches after the longest pass evicted their data
            for rows in times:
                took = once(lm, kv, rows, context)
                if rep:  # the first round is a warm-up
                    times[rows].append(took)
        found += list(_rows_of(times, context))
    return found


def _rows_of(times: dict[int, list[float]], context: int) -> Iterator[PassTime]:
    for rows, took in times.items():
        yield PassTime(rows=rows, context=context, seconds=median(took), low=min(took), high=max(took))


def cache_of_length(lm: LM, n: int) -> Dense:
    """Return a KV cache of n tokens filled with noise, because pass times do not depend on the stored values."""
    kv = Dense(lm.shapes, lm.dtype, lm.device)
    kv.reserve(n)
    noise = cache(lambda heads, size: torch.randn(heads, n, size, dtype=lm.dtype, device=lm.device))
    for layer, of in enumerate(lm.shapes):
        if of.shared_from is None:
            kv.append(layer, noise(of.n_kv_heads, of.k_dim), noise(of.n_kv_heads, of.v_dim), 0)
    return kv


def once(lm: LM, kv: Dense, rows: int, context: int) -> float:
    """Return the seconds of one pass over the KV cache `kv`; its new KV is not committed."""
    built = Rows.chain([i % lm.vocab for i in range(rows)], context)
    want = range(rows if rows < GRID_ROWS[-1] else 0)  # prefill needs no logits
    synchronize(lm.device)
    began = time.perf_counter()
    run(
        [
            ForwardRequest(
                lm,
                built,
                kv,
                want=want,
                states=RecurrentStates(lm.recurrent_layers.like),
                is_prompt=rows == GRID_ROWS[-1],
            )
        ]
    )
    synchronize(lm.device)
    return time.perf_counter() - began


# Calibrate at first use, in about one second, so that drafting starts with measured pass times.
#
# `kvcli bench --calibrate` measures more and for longer, and its result has priority. Passes that take too long are
# left out, because the drafter times its own passes anyway.

ROWS = (1, 2, 4, 8, 16, 32)
READING = GRID_ROWS[-1]  # rows of a prefill pass
TURNS = 3  # rounds, of which the first is a warm-up
BUDGET = 1.0  # seconds
RETRY = 24 * 3600  # seconds after which an empty measurement is repeated


def quick_costs(model: LoadedModel, cache: Path, busy: Tell, tell: Tell = lambda _: None) -> list[PassTime]:
    """Return this model's pass times on this machine, saved or measured now. A cache folder that fails is ignored.

    `busy` is told what takes a second, `tell` that a file is damaged.
    """
    name, machine = fingerprint_of(model), machine_fingerprint(model.info.device)
    if (known := known_times(cache, machine, name, tell)) is not None:
        return known
    busy("measuring a few forward passes")
    # empty for a model that is too slow, and saved, so that it is not tried at each start
    passes, file = quick_times(model.lm), _quick_file(cache, machine, name)
    times = QuickTimes.from_attributes(model.info, fingerprint=name, passes=passes)
    with suppress(OSError):  # measured again the next time, which costs a second
        private_folder(file.parent)
        write_private(file, times.model_dump_json(by_alias=True) + "\n")
    return passes


def known_times(cache: Path, machine: str, model: str, tell: Tell) -> list[PassTime] | None:
    """Return the saved pass times for these fingerprints, or None to measure: the file is missing, damaged, or empty
    and old."""
    known = load_calibration(cache, machine, model, tell)
    if known is not None and known.model is not None and known.model.passes:
        return known.model.passes
    file = _quick_file(cache, machine, model)
    try:
        passes = QuickTimes.model_validate_json(file.read_bytes()).passes
        return passes if passes or time.time() - file.stat().st_mtime < RETRY else None
    except (OSError, ValueError):
        return None


def _quick_file(cache: Path, machine: str, model: str) -> Path:
    return file_of(cache, machine, f"{model}-quick")


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


def calibrate(model: LoadedModel, cache: Path, tell: Tell = lambda _: None) -> CalibrationDocument:
    """Measure the machine that `model` runs on, and the model's pass times."""
    from kvcli.models import machine

    at = model.lm.device
    name = f"cuda:{at.index or 0}" if at.type == "cuda" else at.type
    weights = max(Path(model.info.path).glob("*.safetensors"), key=lambda f: f.stat().st_size, default=Path())
    folder_of(cache)
    tell("measuring memory bandwidth and matrix products")
    found = CalibrationDocument(
        kvcli=__version__,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        fingerprint=machine_fingerprint(name),
        cpu=machine.cpu_name(),
        device=name,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        bandwidth=bandwidth(at),
        gemm={kind: gemm(at, getattr(torch, kind)) for kind in ("bfloat16", "float32")},
        launch=launch(at),
        links=links(at),
        disk=disk(weights),
        model=ModelTimes.from_attributes(
            model.info, fingerprint=fingerprint_of(model), passes=pass_times(model.lm, tell)
        ),
    )
    save_calibration(cache, found.model_copy(update={"model": None}))
    save_calibration(cache, found)
    return found


def run_calibration(
    world: Environment, load: Callable[[Profile], Model], profile: Profile, tell: Tell = lambda _: None
) -> CalibrationDocument:
    """Run `kvcli bench --calibrate`: load the model with `load` (of a setup), measure, save in the cache folder."""
    with load(profile) as model:
        return calibrate(model, world.paths.cache, tell=tell)


def model_fingerprint(dtype: str, quant: str, layers: int, hidden: int, vocab: int, name: str, weights: str) -> str:
    """Return a digest of what pass times depend on beside the machine; `weights`: the hash of the weight files."""
    return digest(name, dtype, quant, layers, hidden, vocab, weights, *releases().values())


def fingerprint_in(plan: Plan, subject: PlannedModel, name: str, cache: Path) -> str:
    """Return the fingerprint of a model as it would be loaded. A file that was never hashed was never timed either."""
    from kvcli.fit.plan import torch_dtype

    shape, dtype = subject.shape, torch_dtype(subject, plan.profile)
    weights = Hashes(cache).known([Stamped.of(Path(file)) for file in subject.weights]) + "".join(
        plan.profile.load.adapters
    )
    return model_fingerprint(dtype, plan.profile.load.quant, shape.layers, shape.hidden, shape.vocab, name, weights)


def fingerprint_of(model: LoadedModel) -> str:
    """Return the fingerprint of a loaded model."""
    info, hidden, lm = model.info, int(model.lm.model.config.get_text_config().hidden_size), model.lm
    weights = lm.hashes.of(lm.files["weights"]) + "".join(model.profile.load.adapters) if lm.files else ""
    return model_fingerprint(info.dtype, info.quant, info.layers, hidden, info.vocab, info.id, weights)
