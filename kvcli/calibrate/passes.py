"""Measure the pass times of a loaded model, by rows and tokens in the KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median
from typing import TYPE_CHECKING

import torch

from kvcli.calibrate.machine import synchronize
from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.rows import Rows
from kvcli.kv.recurrent_state import RecurrentStates
from kvcli.kv.tiers.dense import Dense
from kvcli.schemas.fit import PassTime

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)  # the last is a prefill pass: products gain no more speed from more rows
FIRST = 512  # tokens; each context is four times the one before
LAST = 32768  # beyond, times are extrapolated linearly, and the KV of the test could fill the memory
REPS = 3


def contexts(limit: int) -> list[int]:
    """Return 512, 2k, 8k and 32k, as far as they and the longest pass fit the model's limit; add the limit if close."""
    end = max(1, limit - ROWS[-1])
    found = [FIRST * 4**i for i in range(4) if FIRST * 4**i <= min(end, LAST)]
    if not found or 2 * found[-1] <= end <= LAST:
        found.append(end)
    return found


def pass_times(lm: LM, tell: Callable[[str], None]) -> list[PassTime]:
    """Time the whole grid. Row counts alternate at each context, so that a machine that slows down affects all."""
    found: list[PassTime] = []
    for context in contexts(lm.limit):
        tell(f"measuring passes over {context:,} tokens")
        kv = cache_of_length(lm, context)
        times: dict[int, list[float]] = {rows: [] for rows in ROWS if rows + context <= lm.limit}
        for rep in range(REPS + 1):
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
    want = range(rows if rows < ROWS[-1] else 0)  # prefill needs no logits
    synchronize(lm.device)
    began = time.perf_counter()
    run(
        [
            ForwardRequest(
                lm, built, kv, want=want, states=RecurrentStates(lm.recurrent_layers.like), is_prompt=rows == ROWS[-1]
            )
        ]
    )
    synchronize(lm.device)
    return time.perf_counter() - began
