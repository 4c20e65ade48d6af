"""What a pass takes by rows and context, how fast a prompt is read, and transformers' own `generate` beside it.

A random model of 1.2 billion weights in bfloat16, keys and values random too. Least, median and most of several passes
in milliseconds, by events of the device, waits of the host included. `floor`: the time that the device's own copies
take for as many bytes as weights and stored keys and values have, which a pass must read once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from kvcli.drafts.off import Off
from kvcli.engine.engine import drive, events
from kvcli.engine.engine import run as run_feeds
from kvcli.engine.feed import Feed
from kvcli.engine.lm import LM
from kvcli.engine.rows import Draft, Rows
from kvcli.engine.sample import Sampler
from kvcli.engine.session import Session
from kvcli.kv.dense import Dense
from tests import families
from tests.bench.decode import theirs
from tests.gpu.clock import copy_rate, spread, times, wait
from tests.gpu.models import llama
from tests.gpu.stage import On, Row, why

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 4096, 16_384, 32_768)
NEW = 64


def _filled(lm: LM, n: int) -> Dense:
    """n random slots a head."""
    kv = Dense(lm.shapes, lm.dtype, lm.device)
    kv.reserve(n)
    noise = torch.Generator(lm.device).manual_seed(0)
    for layer in range(lm.n_layers):
        shape = (lm.n_kv_heads, n, lm.head_dim)
        k, v = (torch.randn(shape, generator=noise, device=lm.device, dtype=lm.dtype) for _ in "kv")
        kv.append(layer, k, v, 0)
    return kv


def _pass(lm: LM, kv: Dense, n_rows: int, at: int) -> None:
    """One pass whose drawn tokens come to the host, as of a decoding step."""
    rows = Rows.build(9, at, Draft.chain(list(range(10, 9 + n_rows))))
    (made,) = run_feeds([Feed(lm, rows, kv, want=rows.want)])
    made.logits.argmax(-1).tolist()


def _ours(lm: LM, n: int, new: int) -> tuple[float, float]:
    """Seconds to the first token, and of each later one, of plain decoding."""
    session = Session(lm, Dense(lm.shapes, lm.dtype, lm.device), Off(), Sampler())
    (first,) = times(lambda: drive(session.read(families.prompt(n, vocab=lm.vocab))), str(lm.device), 1, warm=0)
    steps = [step.seconds for step in events(session.stream(new))]
    return first + steps[0], statistics.median(steps[1:])


def run(on: On) -> Iterator[Row]:
    rows_of, contexts = (ROWS[:2], (64,)) if on.is_tiny else (ROWS, CONTEXTS)
    new, reps = (4, 2) if on.is_tiny else (NEW, 12)
    rate = copy_rate(on.device, 1 << 20 if on.is_tiny else 4 << 30) / 2  # only read
    model = llama(on.device, on.is_tiny)
    lm = LM.of(model)
    yield {"what": "model", "parameters": lm.info.parameters, "weight_bytes": lm.info.weight_bytes, "rate": rate}
    said = ""
    for n in contexts:
        model.set_attn_implementation("kvcli")
        kv = _filled(lm, n)
        nbytes = lm.info.weight_bytes + sum(use.nbytes for use in kv.usage())
        floor = 1e3 * nbytes / rate
        for n_rows in rows_of:
            if on.left < 0:
                break
            ms = spread(times(lambda kv=kv, r=n_rows, n=n: _pass(lm, kv, r, n), on.device, reps))  # type: ignore[misc]
            yield {"what": "pass", "context": n, "rows": n_rows, "ms": ms, "floor_ms": floor, "over": ms[1] / floor}
        del kv
        if on.left < 0:
            break
        row: Row = {"what": "side by side", "context": n}
        try:
            _ours(lm, n, 4)  # warm-up
            first, step = _ours(lm, n, new)
            row["kvcli"] = {"read_tokens_s": n / first, "tokens_s": 1 / step}
            model.set_attn_implementation("sdpa")
            ids = families.prompt(n, vocab=lm.vocab)
            theirs(model, ids, 4)
            wait(on.device)
            begun, steps, _ = theirs(model, ids, new)
            row["transformers"] = {"read_tokens_s": n / begun, "tokens_s": 1 / statistics.median(steps)}
            said = f"{n:,} tokens: {1 / step:.0f} tokens/s, transformers {row['transformers']['tokens_s']:.0f}"
        except Exception as error:
            row["fault"] = why(error)
        yield row
    yield {"says": said or "out of time"}
