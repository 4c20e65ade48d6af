"""What FastGen's measuring costs beside reading the prompt it measures, and what it frees.

    python tests/bench/profiling.py [--prompts 2048,16384] [--reps 2] [--device cpu] [--paper] [--out FILE]

The random 152M Llama of the benchmarks. Each repetition reads the prompt twice, in turns: with everything kept, and
with the policy; a short prompt warms both up. Measuring is timed inside the policy (its looks and choices when the
prompt has been read), hearing the probed rows is the rest of the difference.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.engine.engine import run_to_end
from kvcli.engine.forward_request import await_passes
from kvcli.engine.sequence.session import GenerationSession
from kvcli.kv.slots import nbytes
from kvcli.methods.policies.fastgen.policy import FastGen
from tests import make
from tests.bench.harness import Ints, Rows, measurement
from tests.bench.random_model import build, ours_of

WARM = 512  # tokens


class Timed:
    """A policy with a watch: seconds spent in it, while the prompt was read and behind it."""

    def __init__(self, policy: Any, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def select(self, at: Any) -> Any:
        wait(self._device)
        began = time.perf_counter()
        masks = yield from await_passes(self._policy.select(at))
        wait(self._device)
        self.seconds += time.perf_counter() - began
        return masks


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read(lm: Any, ids: list[int], settings: FastGen | None) -> tuple[float, float, GenerationSession]:
    """Seconds to read the prompt, seconds of them spent in the policy, and the session."""
    timed = None
    if settings is not None:
        timed = Timed(settings, lm.device)
    session = make.session(lm, policy=timed, every=settings.compression_interval if settings else None)  # type: ignore[arg-type]
    began = time.perf_counter()
    run_to_end(session.read(ids))
    wait(lm.device)
    return time.perf_counter() - began, timed.seconds if timed else 0.0, session


def measure(lm: Any, n: int, reps: int, settings: FastGen) -> dict[str, Any]:
    ids = torch.randint(3, lm.vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    plain, whole, inside = [], [], []
    for some in (None, settings):
        read(lm, ids[:WARM], some)
    for _ in range(reps):
        seconds, _, full = read(lm, ids, None)
        held, own, session = read(lm, ids, settings)
        plain.append(seconds)
        whole.append(held)
        inside.append(own)
    return {
        "prompt": n,
        "rows": len(session.heard.probes(n - 1)),
        "prefill_s": round(median(plain), 4),
        "with_policy_s": round(median(whole), 4),
        "measuring_s": round(median(inside), 4),
        "measuring_share": round(median(m / p for m, p in zip(inside, plain, strict=True)), 5),
        "kv_share": round(sum(nbytes(session.cache).values()) / sum(nbytes(full.cache).values()), 4),
    }


@measurement("FastGen's measuring beside reading the prompt")
def profiling(
    prompts: Ints = (2048, 16384),
    reps: int = 2,
    device: str = "cpu",
    keep: float = 0.5,
    probe_rows: Annotated[int, "0 = as a profile has it on this device"] = 0,
    paper: Annotated[bool, "measure as published"] = False,
) -> Rows:
    lm = ours_of(build().to(device))
    settings = FastGen(keep=keep, probe_rows=probe_rows or "auto", paper=paper)
    for n in prompts:
        yield measure(lm, n, reps, settings)


if __name__ == "__main__":
    profiling.main()
