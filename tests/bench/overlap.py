"""What PEARL could gain where a draft model drafts on the cores that the target model computes on.

    python tests/bench/overlap.py [--ctx 2048] [--drafts 2,4,8] [--seconds 2] [--reps 5] [--out FILE]

PEARL (arXiv 2408.11850) and SpecBranch (arXiv 2506.01979) draft the next tokens while the target model verifies the
last ones. In turns: passes of both models one after the other, each with all threads. At once: in two processes, the
target model with all threads but one, the draft model with one, each pass timed beside the other model's. "at best":
how many times as fast a round is at once, if every token drafted meanwhile is of use. Random models of 152M and some 6M
parameters; quotients of each repetition.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.kernels.native import native
from tests.bench import random_model
from tests.bench.harness import Ints, Rows, measurement, quotients, spread

SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
CORES = max(2, multiprocessing.cpu_count())


def serve(pipe: Any, is_draft: bool, ctx: int) -> None:
    """In a process of its own: (rows, threads, seconds) -> mean seconds of a pass of so many rows behind ctx tokens."""
    random_model.SHAPE.update({**SMALL, "intermediate_size": 704} if is_draft else {})
    session = random_model.opened(random_model.ours_of(random_model.build()))
    ids = random_model.noise(ctx)
    run_to_end(session.read(ids))
    while (asked := pipe.recv()) is not None:
        rows, threads, limit = asked
        torch.set_num_threads(threads)
        native().use_threads(threads)  # type: ignore[union-attr]
        took, began = [], time.perf_counter()
        while len(took) < 3 or time.perf_counter() - began < limit:
            start = time.perf_counter()
            passed = PassRows.chain(ids[:rows], ctx - 1)
            run([ForwardRequest(session.lm, passed, session.cache, want=range(rows))])
            took.append(time.perf_counter() - start)
        pipe.send(sum(took[1:]) / len(took[1:]))


class Model:
    """A model in a process of its own."""

    def __init__(self, is_draft: bool, ctx: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        context.Process(target=serve, args=(other, is_draft, ctx), daemon=True).start()

    def begin(self, rows: int, threads: int, limit: float) -> None:
        self.pipe.send((rows, threads, limit))

    def seconds(self) -> float:
        """Seconds of a pass of what was begun."""
        return float(self.pipe.recv())


@measurement("A draft model beside the target model behind {ctx} tokens: rounds in turns and at once")
def overlap(ctx: int = 2048, drafts: Ints = (2, 4, 8), seconds: float = 2, reps: int = 5) -> Rows:
    target, draft = Model(False, ctx), Model(True, ctx)
    for n in drafts:
        turns, once = list[float](), list[float]()
        for _ in range(reps):
            target.begin(n + 1, CORES, seconds)
            verify = target.seconds()
            draft.begin(1, CORES, seconds)
            turns.append(n * draft.seconds() + verify)
            target.begin(n + 1, CORES - 1, seconds)
            draft.begin(1, 1, seconds)
            once.append(max(target.seconds(), n * draft.seconds()))
        yield {
            "drafts": n,
            "in turns ms": spread((1000 * s for s in turns), 2),
            "at once ms": spread((1000 * s for s in once), 2),
            "at best": quotients(turns, once, 2),
        }
    for model in (target, draft):
        model.pipe.send(None)
    return None


if __name__ == "__main__":
    overlap.main()
