"""Several texts side by side in one process, and one after the other; and a question that comes while another reads.

    python tests/bench/together.py [--texts 8] [--ctx 2048] [--new 64] [--long 6144] [--reps 3] [--out FILE]

The demo model, profile `exact`, texts of their own. Sides take turns. *writing*: the texts are read before. *all*:
reading counts, too. *late*: a question of some thirty tokens joins as a text of `--long` tokens begins its second
chunk, the worst moment; its first token, in times of one such chunk. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli import generate_together, load
from kvcli.api import Text
from kvcli.bench.workloads import prompt_of
from kvcli.engine.engine import Engine
from tests.bench.decode import machine


def texts(model: Any, n: int, ctx: int) -> list[list[int]]:
    return [prompt_of("summary", {}, model.tokenizer, model.lm.vocab, ctx, seed=seed) for seed in range(n)]


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


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
            seconds = timed(lambda: [generate_together(one) for one in answers()])
        else:
            seconds = timed(lambda: generate_together(*answers()))
        found[way] = len(prompts) * new / seconds
    return found


def late(model: Any, ids: list[int]) -> dict[str, float]:
    """Seconds of the reading text's second chunk alone, and to the first token of a question that joins before it."""
    engine = Engine()
    engine.add(model.open().answer(ids, max_new_tokens=1))
    engine.step()
    chunk = timed(engine.step)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--long", type=int, default=6144)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with load("demo", "exact", {"context.limit": 8192}) as model:
        prompts = texts(model, args.texts, args.ctx)
        writing(model, prompts[:2], 4, is_read=False)  # warm
        runs: dict[str, list[dict[str, float]]] = {"writing": [], "all": [], "late": []}
        for _ in range(args.reps):
            runs["writing"].append(writing(model, prompts, args.new, is_read=True))
            runs["all"].append(writing(model, prompts, args.new, is_read=False))
            runs["late"].append(late(model, texts(model, 1, args.long)[0]))
    rows = []
    for name in ("writing", "all"):
        alone, beside = ([run[way] for run in runs[name]] for way in ("alone", "together"))
        times = [b / a for a, b in zip(alone, beside, strict=True)]
        rows.append(
            {
                "what": name,
                "alone tok/s": round(statistics.median(alone), 1),
                "together tok/s": round(statistics.median(beside), 1),
                "times": [round(x, 2) for x in (min(times), statistics.median(times), max(times))],
            }
        )
    chunks = [run["chunks"] for run in runs["late"]]
    rows.append({"what": "late", "times": [round(x, 2) for x in (min(chunks), statistics.median(chunks), max(chunks))]})
    for row in rows:
        print(row)
    found = {
        "title": f"{args.texts} texts of {args.ctx} tokens side by side, {args.new} new; a question beside {args.long}",
        "machine": ", ".join(f"{key} {value}" for key, value in machine().items()),
        "command": f"python tests/bench/together.py --texts {args.texts} --ctx {args.ctx} --new {args.new}",
        "columns": ["what", "alone tok/s", "together tok/s", "times"],
        "rows": rows,
        "note": "In brackets: least and most of all turns. late: in times of a chunk of the text that is being read.",
    }
    text = json.dumps(found)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
