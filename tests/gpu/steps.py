"""What a step takes by rows and context, recorded and not; how fast a prompt is read, and transformers beside it.

Random models, keys and values random too: 1.2 billion weights in bfloat16, and the shape of an 8B Llama in int4. Least,
median and most of several steps in milliseconds, by events of the device, waits of the host included. `host_ms`: of
recorded ones, what the host does beside waiting. `floor`: the time in which copies move as many bytes, read and
written, as weights and stored keys and values have, which a pass must read once; an input embedding apart, of which
it reads a row for each token.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses, captured_passes
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.forward_request import Draft
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import enable_graph_capture, install_kernels, wrap_lm
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.drafts.off import Off
from tests import families, make
from tests.bench.decode import theirs
from tests.drafters import Scripted
from tests.gpu.clock import Watched, copy_rate, host_seconds, spread, times, wait
from tests.gpu.models import bytes_of_a_pass, eight, llama
from tests.gpu.stage import On, Row, why

ROWS = (1, 8, 16, 32, 64)
CONTEXTS = (2048, 32_768, 131_072)
NEW = 64
LEFT = 4 << 30  # bytes of the device that keys and values leave


class Drafts(Scripted):
    """So many tokens, whatever they are: a step of one row more."""

    def __init__(self, n: int) -> None:
        super().__init__([], 0, -1)
        self.n = n

    def propose(self, ids: Sequence[int], room: int, past: object) -> Draft:
        return Draft.chain([5] * min(self.n, room))


def _filled(lm: LM, n: int) -> Dense:
    """n random slots a head."""
    kv = make.dense(lm)
    kv.reserve(n + 1024)
    noise = torch.Generator(lm.device).manual_seed(0)
    for layer in range(lm.n_layers):
        shape = (lm.n_kv_heads, n, lm.head_dim)
        k, v = (torch.randn(shape, generator=noise, device=lm.device, dtype=lm.dtype) for _ in "kv")
        kv.append(layer, k, v, 0)
    return kv


def _steps(lm: LM, kv: Dense, n: int, n_rows: int, reps: int) -> Row:
    """Milliseconds of steps behind n tokens, and of the host's part of them."""
    session = make.session(lm, kv, Off() if n_rows == 1 else Drafts(n_rows - 1))
    session.ids, session.committed = families.prompt(n + 1, vocab=lm.vocab), n
    row: Row = {"ms": spread(times(lambda: run_to_end(session.step()), str(lm.device), reps))}
    if captured_passes(lm) is not None:
        waited = cast(Watched, captured_passes(lm).graphs).waited
        row["host_ms"] = spread(host_seconds(lambda: run_to_end(session.step()), waited, reps))
    kv.crop(n)
    return row


def _ours(lm: LM, n: int, new: int) -> tuple[float, float]:
    """Seconds to the first token, and of each later one, of plain decoding."""
    session = make.session(lm)
    (first,) = times(lambda: run_to_end(session.read(families.prompt(n, vocab=lm.vocab))), str(lm.device), 1, warm=0)
    steps = [step.seconds for step in iterate_events(session.stream(new))]
    return first + steps[0], statistics.median(steps[1:])


def _has_room(lm: LM, n: int, on: On) -> bool:
    needs = 2 * lm.n_layers * lm.n_kv_heads * lm.head_dim * n * lm.dtype.itemsize
    return on.is_tiny or torch.cuda.mem_get_info(on.device)[0] - needs > LEFT


def _of_model(name: str, lm: LM, rate: float, on: On) -> Iterator[Row]:
    for n in (64,) if on.is_tiny else CONTEXTS:
        if not _has_room(lm, n, on):
            yield {"what": "skipped", "model": name, "context": n, "why": "no room for keys and values"}
            continue
        kv = _filled(lm, n)
        nbytes = bytes_of_a_pass(lm) + sum(use.nbytes for use in kv.usage())
        floor = 1e3 * nbytes / rate
        for graphs in ("auto", "off"):
            lm.remembers.pop(CapturedPasses, None)
            enable_graph_capture(lm, graphs)
            if captured_passes(lm) is not None:
                captured_passes(lm).graphs = Watched(captured_passes(lm).graphs)
            for n_rows in ROWS[:2] if on.is_tiny else ROWS:
                if on.left < 0:
                    return
                row: Row = {"what": "step", "model": name, "context": n, "rows": n_rows, "graphs": graphs}
                row["records"] = captured_passes(lm) is not None
                try:
                    row |= _steps(lm, kv, n, n_rows, 2 if on.is_tiny else 12)
                    row |= {"floor_ms": floor, "over": row["ms"][1] / floor}
                    row["eager"] = dict(captured_passes(lm).eager) if captured_passes(lm) is not None else {}
                except Exception as error:
                    row["fault"] = why(error)
                yield row


def _beside(lm: LM, model: Any, n: int, new: int, on: On) -> Row:
    """transformers' own `generate` over the same prompt."""
    _ours(lm, n, 4)  # warm-up
    first, step = _ours(lm, n, new)
    row: Row = {"what": "side by side", "context": n, "kvcli": {"read_tokens_s": n / first, "tokens_s": 1 / step}}
    model.set_attn_implementation("sdpa")
    ids = families.prompt(n, vocab=lm.vocab)
    theirs(model, ids, 4)
    wait(on.device)
    begun, steps, _ = theirs(model, ids, new)
    row["transformers"] = {"read_tokens_s": n / begun, "tokens_s": 1 / statistics.median(steps)}
    return row


def run(on: On) -> Iterator[Row]:
    rate = copy_rate(on.device, 1 << 20 if on.is_tiny else 4 << 30)
    model = llama(on.device, on.is_tiny)
    lm = wrap_lm(model)
    install_kernels(lm)
    about = {"parameters": lm.info.parameters, "weight_bytes": lm.info.weight_bytes, "read": bytes_of_a_pass(lm)}
    yield {"what": "model", **about, "rate": rate}
    yield from _of_model("1.2B bf16", lm, rate, on)
    said = "out of time"
    try:
        enable_graph_capture(lm, "auto")
        yield (row := _beside(lm, model, 64 if on.is_tiny else 4096, 4 if on.is_tiny else NEW, on))
        mine, other = (row[side]["tokens_s"] for side in ("kvcli", "transformers"))
        said = f"{row['context']:,} tokens: {mine:.0f} tokens/s, transformers {other:.0f}"
    except Exception as error:
        yield {"what": "side by side", "fault": why(error)}
    del lm, model
    gc.collect()
    if not on.is_tiny:  # there `whole` has it, and a tiny model cannot be packed
        try:
            large = wrap_lm(eight(on.device, False), quant="int4", device=torch.device(on.device))
            install_kernels(large)
            yield from _of_model("8B int4", large, rate, on)
        except Exception as error:
            yield {"what": "model", "model": "8B int4", "fault": why(error)}
    yield {"says": said}
