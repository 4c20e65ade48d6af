"""Drafting for several texts side by side: tokens a pass and time of a token, by profile and number of texts.

    python tests/bench/fafo_together.py [--model demo] [--tasks summary,copy] [--texts 1,2,4]
        [--profiles exact,ngram,fafo] [--ctx 1024] [--new 64] [--reps 2] [--out FILE]

Every text has a prompt of its own, which is read before; one engine then writes all texts at once, one pass for all of
them. Greedy. "tokens a pass" is of one text, "rows a pass" of all texts together, "speed" the time of a token under
`exact` with as many texts over the time here, all of a task's texts together, repetition by repetition; "to exact
alone" the time of a token of one text under `exact` over the time here. Each text has to be that of `exact` alone, or
the program ends with an error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import generate_together, load
from kvcli.bench.workloads import prompt_of
from kvcli.environment import Paths
from kvcli.models.catalog import stands_for
from tests.bench.harness import Ints, Rows, Words, in_turns, measurement, quotients, ran

PLAIN = "exact"


def written(model: Any, profile: str, prompts: Sequence[list[int]], new: int) -> dict[str, Any]:
    """The texts, seconds of a token from the first to the last, and what a pass did."""
    opened = [model.open(profile) for _ in prompts]
    settings = {"temperature": 0, "ignore_eos": True, "stop_loops": 0}
    for text, ids in zip(opened, prompts, strict=True):
        text.generate(ids, max_new_tokens=1, **settings)
    works = [t.answer(ids, max_new_tokens=new, **settings) for t, ids in zip(opened, prompts, strict=True)]
    began = time.perf_counter()
    tasks = generate_together(*works)
    took = time.perf_counter() - began
    turns = [task.result() for task in tasks]
    stats = [turn.stats for turn in turns]
    for text in opened:
        text.close()
    passes = sum(of.passes for of in stats)
    rows = sum(of.passes + of.draft_tokens + of.lookahead_rows for of in stats)
    return {
        "ids": [list(turn.ids) for turn in turns],
        "token": took / sum(of.new for of in stats),
        "tokens": sum(of.new for of in stats) / passes,
        "rows": rows / max(of.passes for of in stats),
    }


@measurement(
    "{model}, {new} tokens behind {ctx} of several texts side by side",
    columns=["task", "texts", "profile", "tokens a pass", "rows a pass", "speed", "to exact alone", "same text"],
    is_right=lambda rows: all(row["same text"] for row in rows),
)
def fafo_together(
    model: str = "demo",
    tasks: Words = ("summary", "copy"),
    texts: Ints = (1, 2, 4),
    profiles: Words = ("exact", "ngram", "fafo"),
    ctx: int = 1024,
    new: int = 64,
    reps: int = 2,
) -> Rows:
    torch.set_num_threads(1)
    with load(stands_for(model, Paths.of(os.environ).data), PLAIN) as loaded:
        ran(loaded.lm)
        for task in tasks:
            prompts = [
                prompt_of(task, {}, loaded.tokenizer, loaded.lm.vocab, ctx, seed=seed) for seed in range(max(texts))
            ]
            alone = [written(loaded, PLAIN, [ids], new)["ids"][0] for ids in prompts]
            sides = {
                f"{n} {profile}": partial(written, loaded, profile, prompts[:n], new)
                for n in texts
                for profile in dict.fromkeys((PLAIN, *profiles))
            }
            found = in_turns(sides, reps, 0)
            for side, runs in found.items():
                n, profile = side.split()
                of_exact, of_one = (
                    quotients([run["token"] for run in found[f"{many} {PLAIN}"]], [run["token"] for run in runs], 2)
                    for many in (n, texts[0])
                )
                yield {
                    "task": task,
                    "texts": int(n),
                    "profile": profile,
                    "tokens a pass": round(runs[-1]["tokens"], 2),
                    "rows a pass": round(runs[-1]["rows"], 1),
                    "speed": of_exact,
                    "to exact alone": of_one,
                    "same text": all(run["ids"] == alone[: int(n)] for run in runs),
                }
    return None


if __name__ == "__main__":
    fafo_together.main()
