"""What a decoding pass of one row costs beside its products and attention: CPU time of the thread with both left out.

    python tests/bench/glue.py [--prompt 512] [--passes 200] [--fp32] [--profile] [--out FILE]

The random 152M Llama of decode.py behind a prompt. `pass` is a pass whose logits are wanted and nothing kept, `step` a
whole step of a session with what it stores, `whole` a step with its products. Prints a table, then JSON on the last
line.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.decode import build, machine, ours_of  # noqa: E402


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
    from kvcli.drafts.off import Off
    from kvcli.engine.engine import drive
    from kvcli.engine.sample import Sampler
    from kvcli.engine.session import Session
    from kvcli.kv.dense import Dense

    session = Session(lm, Dense(lm.shapes, lm.dtype), Off(), Sampler())
    drive(session.read(torch.randint(8, lm.vocab, (n,), generator=torch.Generator().manual_seed(1)).tolist()))
    return session


def one_pass(session: Any) -> Callable[[], object]:
    from kvcli.engine.engine import run
    from kvcli.engine.feed import Feed
    from kvcli.engine.rows import Draft, Rows

    rows = Rows.build(session.ids[-1], len(session.ids) - 1, Draft.chain([]))
    return lambda: run([Feed(session.lm, rows, session.kv, want=[0])])


def one_step(session: Any) -> Callable[[], object]:
    from kvcli.engine.engine import drive

    return lambda: drive(session.step())


def milliseconds(work: Callable[[], object], times: int) -> list[float]:
    """Least and median of the thread's CPU time."""
    found = []
    for _ in range(times + 10):
        began = time.thread_time()
        work()
        found.append(1e3 * (time.thread_time() - began))
    return [round(min(found[10:]), 3), round(statistics.median(found[10:]), 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--passes", type=int, default=200)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--profile", action="store_true", help="show which functions the step's time goes to")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    lm = ours_of(build().float() if args.fp32 else build())
    session = session_of(lm, args.prompt)
    rows = {"whole": milliseconds(one_step(session), args.passes // 4)}
    with without_products(lm):
        rows |= {
            "pass": milliseconds(one_pass(session), args.passes),
            "step": milliseconds(one_step(session), args.passes),
        }
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(lambda: milliseconds(one_step(session), args.passes))
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    for name, (least, median) in rows.items():
        print(f"{name:5}  {least:7.3f} ms at least, {median:7.3f} median")
    result = {"schema": "kvcli.bench.glue/1", "environment": before, "prompt": args.prompt, "ms": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
