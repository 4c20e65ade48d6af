"""Several texts side by side in one process, and one after the other; and a question that comes while another reads.

    python tests/bench/together.py [--texts 8] [--ctx 2048] [--new 64] [--long 6144] [--reps 3] [--out FILE]

The demo model, profile `exact`, texts of their own. Sides take turns. *writing*: the texts are read before. *all*:
reading counts, too. *late*: a question of some thirty tokens joins as a text of `--long` tokens begins its second
chunk, the worst moment; its first token, in times of one such chunk.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import generate_together, load
from kvcli.api import Text
from kvcli.bench.workloads import prompt_of
from kvcli.engine.engine import Engine
from tests.bench.harness import Rows, in_turns, measurement, quotients, seconds, spread


def prompts_of(model: Any, n: int, ctx: int) -> list[list[int]]:
    return [prompt_of("summary", {}, model.tokenizer, model.lm.vocab, ctx, seed=seed) for seed in range(n)]


def writing(model: Any, prompts: list[list[int]], new: int, *, is_read: bool) -> dict[str, float]:
    """Tokens a second of all texts, each way."""
    found = {}
    for way in ("alone", "together"):
        opened = [model.open() for _ in prompts]
        if is_read:
            for text, ids in zip(opened, prompts, strict=True):
                text.generate(ids, max_new_tokens=1, ignore_eos=True)

        def answers(opened: Any = opened) -> list[Any]:
            return [t.answer(ids, max_new_tokens=new, ignore_eos=True) for t, ids in zip(opened, prompts, strict=True)]

        if way == "alone":
            took = seconds(lambda: [generate_together(one) for one in answers()])
        else:
            took = seconds(lambda: generate_together(*answers()))
        found[way] = len(prompts) * new / took
    return found


def late(model: Any, ids: list[int]) -> dict[str, float]:
    """Seconds of the reading text's second chunk alone, and to the first token of a question that joins before it."""
    engine = Engine()
    engine.add(model.open().answer(ids, max_new_tokens=1))
    engine.step()
    chunk = seconds(engine.step)
    engine = Engine()
    engine.add(model.open().answer(ids, max_new_tokens=1))
    engine.step()
    first: list[float] = []
    began = time.perf_counter()
    reading = engine._turn  # the round that the question just misses is chosen already
    chosen = reading()
    engine.add(
        model.open().answer("Hello, who are you?", max_new_tokens=4),
        lambda said: first.append(time.perf_counter() - began) if isinstance(said, Text) and not first else None,
    )
    engine._pass(chosen)
    while not first and engine.step():
        pass
    return {"chunk_s": chunk, "first_s": first[0], "chunks": first[0] / chunk}


@measurement(
    "{texts} texts of {ctx} tokens side by side, {new} new; a question beside {long}",
    columns=["what", "alone tok/s", "together tok/s", "times"],
    note="In brackets: least and most of all turns. late: in times of a chunk of the text that is being read.",
)
def measure(texts: int = 8, ctx: int = 2048, new: int = 64, long: int = 6144, reps: int = 3) -> Rows:
    torch.set_num_threads(1)
    with load("demo", "exact", {"context.limit": 8192}) as model:
        prompts = prompts_of(model, texts, ctx)
        writing(model, prompts[:2], 4, is_read=False)  # warm
        ways = {
            "writing": lambda: writing(model, prompts, new, is_read=True),
            "all": lambda: writing(model, prompts, new, is_read=False),
            "late": lambda: late(model, prompts_of(model, 1, long)[0]),
        }
        runs = in_turns(ways, reps, 0)
    for name in ("writing", "all"):
        alone, beside = ([run[way] for run in runs[name]] for way in ("alone", "together"))
        row = {"what": name, "alone tok/s": round(median(alone), 1), "together tok/s": round(median(beside), 1)}
        yield row | {"times": quotients(beside, alone, 2)}
    yield {"what": "late", "times": spread([run["chunks"] for run in runs["late"]], 2)}


if __name__ == "__main__":
    measure.main()
