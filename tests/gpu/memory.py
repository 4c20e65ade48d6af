"""The peak on the device against what `kvcli fit` foretells, of a random model of 1.2 billion weights in bfloat16.

The estimate is of the model's files, by no measured run; the peak is torch's own, of loading, reading and 16 tokens.
Beside it what the driver says is gone: torch knows nothing of the context, nor of libraries that take memory by
themselves.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from kvcli import assemble
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.loading.open_lm import open_lm
from kvcli.engine.resources import peak_bytes
from kvcli.fit.available_memory import AvailableMemory
from kvcli.fit.plan import MeasuredFacts, plan, subject_of
from kvcli.models import source
from kvcli.settings.profile import Profile
from tests import families
from tests.gpu.models import llama
from tests.gpu.stage import On, Row, why

NEW = 16
PROFILES = ("exact", "ngram", "balanced")


def _peak(found: source.Source, profile: Profile, n: int, on: On) -> Row:
    device = torch.device(on.device)
    gone = 0
    if not on.is_tiny:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        gone = torch.cuda.mem_get_info(device)[0]
    began = time.monotonic()
    lm = open_lm(found, device=on.device)
    session = assemble.session(lm, profile)
    run_to_end(session.read(families.prompt(n, vocab=lm.vocab)))
    read = time.monotonic() - began
    list(iterate_events(session.stream(NEW)))
    row: Row = {"measured": peak_bytes(device), "load_and_read_seconds": round(read, 2)}
    if not on.is_tiny:
        row |= {"reserved": torch.cuda.max_memory_reserved(device), "gone": gone - torch.cuda.mem_get_info(device)[0]}
    return row


def run(on: On) -> Iterator[Row]:
    contexts = (200,) if on.is_tiny else (4096, 16_384, 65_536)
    worst: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        llama(on.device, on.is_tiny).save_pretrained(folder)
        found = source.find(str(Path(folder)))
        subject = subject_of(found)
        if not on.is_tiny:
            torch.cuda.empty_cache()
        for n in contexts:
            for name in PROFILES[: 1 if on.is_tiny else None]:
                if on.left < 0:
                    yield {"says": f"out of time at {n} tokens"}
                    return
                profile = Profile.load(name).replace(load={"device": on.device})
                row: Row = {"profile": name, "context": n + NEW}
                try:
                    room = AvailableMemory("cpu" if on.is_tiny else "cuda:0", 1 << 40)
                    need = plan(subject, profile, room, n + NEW, MeasuredFacts()).need
                    row |= {"estimate": need.peak, "weights": need.weights, "kv": need.kv, "working": need.working}
                    row |= {"loading": need.loading, **_peak(found, profile, n, on)}
                    row["measured_over_estimate"] = round(row["measured"] / row["estimate"], 4)
                    if "gone" in row:
                        row["gone_over_estimate"] = round(row["gone"] / row["estimate"], 4)
                    worst.append(row["measured_over_estimate"])
                except Exception as error:
                    row["fault"] = why(error)
                yield row
    said = f"{min(worst):.3f} to {max(worst):.3f}" if worst else "none"
    yield {"says": f"measured over foretold: {said} ({len(worst)} runs)"}
