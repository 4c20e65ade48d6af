"""Texts of a tiny model on a prefix cache, and processes that are killed while they keep one: it is whole or absent."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.methods.policies.snapkv import Snap
from kvcli.prefix_cache.prefix_cache import INTACT, CacheConditions, PrefixCache
from tests import families, make

IDS, OLD, NEW = families.prompt(900), 400, 850
SNAP = CacheConditions(False, {"policy.name": "snap", "policy.keep": "0.4", "prefill.chunk": "100"})


def model(folder: Path) -> LM:
    """Its weights lie in a file, as only such a one is known again."""
    made = families.build("llama", max_position_embeddings=2048)
    save_file({n: p.detach().clone() for n, p in made.named_parameters()}, folder / "model.safetensors")
    lm = wrap_lm(made, path=str(folder))
    install_kernels(lm)
    return lm


def session(lm: LM, shaping: CacheConditions) -> GenerationSession:
    policy = None if shaping.is_intact else Snap(keep=0.4, compression_interval=16)
    every = None if policy is None else policy.compression_interval
    return make.session(lm, chunk=100, policy=policy, every=every)


def read(lm: LM, shaping: CacheConditions, n: int) -> GenerationSession:
    s = session(lm, shaping)
    list(iterate_events(s.read(IDS[:n])))
    return s


def logits(s: GenerationSession, ids: list[int]) -> Tensor:
    """Behind `ids`, of which the session has the beginning."""
    s.start_answer(ids, Sampler())
    while run_to_end(s.prefill_chunk(ids)):
        pass
    (made,) = run([ForwardRequest(s.lm, Rows.chain(s.ids[-1:], len(s.ids) - 1), s.cache, want=[0])])
    assert made.logits is not None
    return made.logits[0]


def kills(folder: Path, lm: LM, n: int, seed: int) -> dict[str, int]:
    """So many processes that keep a longer text are killed at random moments: what was seen, `bad` of it."""
    rng, found = random.Random(seed), dict.fromkeys(("old", "new", "between", "left over", "bad"), 0)
    olds, news = ({shaping.is_intact: read(lm, shaping, n) for shaping in (INTACT, SNAP)} for n in (OLD, NEW))
    want = {OLD - 1: logits(read(lm, SNAP, OLD), IDS), NEW - 1: logits(read(lm, SNAP, NEW), IDS)}
    plain = logits(session(lm, INTACT), IDS)
    for i in range(n):
        shaping, at = (INTACT, SNAP)[i % 2], folder / str(i)
        new, timed = news[shaping.is_intact], shelf_in(folder / "timed", lm)
        assert not shelf_in(at, lm).save(olds[shaping.is_intact], shaping=shaping).why_not
        began = time.perf_counter()
        assert not timed.save(new, shaping=shaping).why_not
        took = time.perf_counter() - began
        shutil.rmtree(timed.folder)
        _killed(partial(shelf_in(at, lm).save, new, shaping=shaping), rng.uniform(0, 1.2 * took))
        found["left over"] += any(at.rglob("*.part"))
        again = session(lm, shaping)
        have = shelf_in(at, lm).load_prefix(again, IDS, shaping)
        found[{OLD - 1: "old", NEW - 1: "new"}.get(have, "between")] += 1
        right = plain if shaping.is_intact and have >= OLD - 1 else want.get(have)
        found["bad"] += right is None or not torch.equal(logits(again, IDS), right)
        assert not shelf_in(at, lm).save(new, shaping=shaping).why_not
        found["bad"] += any(at.rglob("*.part"))
        shutil.rmtree(at)
    return found


def shelf_in(folder: Path, lm: LM, most: int = 1 << 30) -> PrefixCache:
    return PrefixCache(folder, most, lm, min_work=0)


def _killed(work: Callable[[], Any], after: float) -> None:
    """A process that does this, killed so many seconds after it began."""
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(told, b"!")
            work()
        finally:
            os._exit(0)
    os.close(told)
    select.select([ready], [], [], 10)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
