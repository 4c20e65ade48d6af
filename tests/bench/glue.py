"""What a decoding pass of one row costs beside its products and attention: CPU time of the thread with both left out.

    python tests/bench/glue.py [--prompt 512] [--passes 40] [--reps 5] [--fp32] [--profile] [--out FILE]

The random 152M Llama of decode.py behind a prompt: with products and attention native, then norms too, then MLPs, then
whole layers, taking turns. `pass` is a pass whose logits are wanted and nothing kept, `step` a step of a session with
what it stores.
"""

from __future__ import annotations

import cProfile
import ctypes
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import Rows, in_turns, measurement
from tests.bench.random_model import build, noise, opened, ours_of


@contextmanager
def without_products(lm: Any) -> Iterator[None]:
    """Products give zeros, and attention whatever lay in memory."""
    from kvcli.kernels.native import native

    functions: Any = native(None)  # the table that ops take, who name no level
    assert functions is not None, "the native kernels are what is measured around"
    linear, attend = functions.linear, functions.attend
    functions.linear, functions.attend = zeros, lambda _: None
    inside = [(product, product.K) for product in products_inside(lm.model)]
    for product, _ in inside:
        product.K = 0
    try:
        yield
    finally:
        functions.linear, functions.attend = linear, attend
        for product, words in inside:
            product.K = words


def zeros(x: int, w: int, bias: int, y: int, m: int, n: int, s: int, is_wide: bool) -> None:
    ctypes.memset(y, 0, m * n * (4 if is_wide else 2))


def products_inside(model: Any) -> Iterator[Any]:
    """Those of native calls that do more than one product."""
    for module in model.modules():
        way = vars(module).get("forward")
        layer = getattr(way, "layer", None)
        yield from (layer.q, layer.k, layer.v, layer.o) if layer is not None else ()
        for part in (getattr(layer, "mlp", None), getattr(way, "mlp", None)):
            yield from (part.gate, part.up, part.down) if part is not None else ()


def session_of(lm: Any, n: int) -> Any:
    """A text of n random tokens, read."""
    from kvcli.engine.engine import run_to_end

    session = opened(lm)
    run_to_end(session.read(noise(n, lm.vocab)))
    return session


def one_pass(session: Any) -> Callable[[], object]:
    from kvcli.engine.engine import run
    from kvcli.engine.forward_request import Draft, ForwardRequest, Rows

    rows = Rows.build(session.ids[-1], len(session.ids) - 1, Draft.chain([]))
    return lambda: run([ForwardRequest(session.lm, rows, session.cache, want=[0])])


def one_step(session: Any) -> Callable[[], object]:
    from kvcli.engine.engine import run_to_end

    return lambda: run_to_end(session.step())


def milliseconds(work: Callable[[], object], times: int) -> list[float]:
    """The thread's CPU time, each time."""
    found = []
    for _ in range(times + 5):
        began = time.thread_time()
        work()
        found.append(1e3 * (time.thread_time() - began))
    return found[5:]


def stages(model: Callable[[], Any]) -> dict[str, Any]:
    """The model with products and attention native alone, and with more and more of what lies between them."""
    from kvcli.engine.loading import open_lm as loading
    from kvcli.kernels.gated_mlp import mlp_
    from kvcli.kernels.rms_norm import norm_

    whole = loading.fuse_
    ways: dict[str, Callable[..., Any]] = {
        "products": lambda lm, layers: "",
        "norms": lambda lm, layers: str(norm_(lm.model)),
        "MLPs": lambda lm, layers: str((norm_(lm.model), mlp_(lm.model))),
        "layers": whole,
    }
    found = {}
    for name, way in ways.items():
        loading.fuse_ = way
        found[name] = ours_of(model())
    loading.fuse_ = whole
    return found


def measure(lm: Any, prompt: int, passes: int, rounds: dict[str, list[float]]) -> None:
    """One round of a stage."""
    session = session_of(lm, prompt)
    rounds["whole"] += milliseconds(one_step(session), passes)
    with without_products(lm):
        rounds["pass"] += milliseconds(one_pass(session), 2 * passes)
        rounds["step"] += milliseconds(one_step(session), 2 * passes)


@measurement(
    "Milliseconds of a decoding step around products and attention, least and median",
    schema="kvcli.bench.glue/1",
)
def glue(
    prompt: int = 512,
    passes: int = 40,
    reps: int = 5,
    fp32: bool = False,
    profile: Annotated[bool, "show which functions the last stage's time goes to"] = False,
) -> Rows:
    torch.set_num_threads(1)
    sides = stages(lambda: build().float() if fp32 else build())
    rounds: dict[str, dict[str, list[float]]] = {name: {"whole": [], "pass": [], "step": []} for name in sides}
    in_turns({name: partial(measure, lm, prompt, passes, rounds[name]) for name, lm in sides.items()}, reps, 0)
    if profile:
        found = cProfile.Profile()
        found.runcall(measure, sides["layers"], prompt, passes, {"whole": [], "pass": [], "step": []})
        pstats.Stats(found).sort_stats("tottime").print_stats(45)
    for name, each in rounds.items():
        yield {"native so far": name} | {what: [round(min(ms), 3), round(median(ms), 3)] for what, ms in each.items()}
    return {"prompt": prompt}


if __name__ == "__main__":
    glue.main()
