"""Several texts side by side in one process, and one after the other; and a question that comes while another reads.

    python tests/bench/together.py [--what writing,all,late,gaps,drafts] [--name demo] [--texts 8]
        [--ctx 2048] [--new 64] [--long 6144] [--reps 3] [--out FILE]

A small model, profile `exact`, texts of their own. Sides take turns. *writing*: the texts are read before. *all*:
reading counts, too. *late*: a question of some thirty tokens joins as a text of `--long` tokens begins its second
chunk, the worst moment; its first token, in times of one such chunk. *gaps*: CPU time of the thread between two tokens
of texts being written, while a text of `--long` tokens is read, with chunks in pieces and whole; `times` is how much
longer it takes to read beside them in pieces, and alone in an engine rather than without one. *drafts*: a list is
repeated, tokens per CPU second with `ngram` over those with `exact`, of one text and of `--texts`.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import generate_together, load
from kvcli.api import Text
from kvcli.bench.workloads import prompt_of
from kvcli.engine.engine import Engine, run_to_end
from kvcli.models.text import encode
from tests.bench.harness import Rows, Words, in_turns, measurement, quotients, seconds, spread


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


def gaps(model: Any, prompts: list[list[int]], ids: list[int], longest: float) -> dict[str, float]:
    """CPU seconds of the longest and the median step while `ids` are read beside texts being written, of reading, and
    the tokens written meanwhile."""
    engine = Engine(longest=longest, clock=time.thread_time)
    wrote, took = [0], []
    for prompt in prompts:
        answer = model.open().answer(prompt, max_new_tokens=4096, ignore_eos=True)
        engine.add(answer, lambda said: wrote.append(wrote.pop() + len(getattr(said, "ids", ()))))
    while wrote[0] < 8 * len(prompts):
        engine.step()
    wrote[0], began = 0, time.thread_time()
    reading = engine.add(model.open().answer(ids, max_new_tokens=1, ignore_eos=True))
    while not reading.is_over:
        before = time.thread_time()
        engine.step()
        took.append(time.thread_time() - before)
    return {"longest": max(took), "median": median(took), "read": time.thread_time() - began, "tokens": wrote[0]}


def read_alone(model: Any, ids: list[int]) -> dict[str, float]:
    """CPU seconds of reading without an engine, and alone in one."""
    found = {}
    for way in ("plain", "engine"):
        answer = model.open().answer(ids, max_new_tokens=1, ignore_eos=True)
        began = time.thread_time()
        run_to_end(answer) if way == "plain" else generate_together(answer)
        found[way] = time.thread_time() - began
    return found


def drafts(model: Any, n: int, new: int) -> dict[str, float]:
    """Tokens per CPU second of n texts that repeat a list, by profile. Drafters see CPU time, too."""
    items = ", ".join(f"item {i} costs {7 * i % 53} coins" for i in range(60))
    ids, found = encode(model.tokenizer, f"The list: {items}. The list again: item 0 costs 0 coins, item"), {}
    for profile in ("exact", "ngram"):
        opened, engine = [model.open(profile) for _ in range(n)], Engine(clock=time.thread_time)
        for text in opened:
            text.generate(ids, max_new_tokens=1, temperature=0)
        for text in opened:
            engine.add(text.answer(ids, max_new_tokens=new, ignore_eos=True, temperature=0, stop_loops=0))
        began = time.thread_time()
        with patch("time.perf_counter", time.thread_time):
            while engine.step():
                pass
        found[profile] = n * new / (time.thread_time() - began)
        for text in opened:
            text.close()
    return found


@measurement(
    "{texts} texts of {ctx} tokens side by side, {new} new; a question beside {long}",
    columns=["what", "alone tok/s", "together tok/s", "times"],
    note="In brackets: least and most of all turns. late: in times of a chunk of the text that is being read.",
)
def measure(
    what: Words = ("writing", "all", "late"),
    name: str = "demo",
    texts: int = 8,
    ctx: int = 2048,
    new: int = 64,
    long: int = 6144,
    reps: int = 3,
) -> Rows:
    torch.set_num_threads(1)
    with load(name, "exact", {"context.limit": 8192}) as model:
        prompts = prompts_of(model, texts, ctx)
        (one,) = prompts_of(model, 1, long)
        writing(model, prompts[:2], 4, is_read=False)  # warm
        ways = {
            "writing": lambda: writing(model, prompts, new, is_read=True),
            "all": lambda: writing(model, prompts, new, is_read=False),
            "late": lambda: late(model, one),
            "gaps": lambda: gaps(model, prompts, one, 0.25),
            "gaps, whole chunks": lambda: gaps(model, prompts, one, math.inf),
            "gaps, alone": lambda: read_alone(model, one),
            "drafts, 1 text": lambda: drafts(model, 1, new),
            f"drafts, {texts} texts": lambda: drafts(model, texts, new),
        }
        runs = in_turns({way: run for way, run in ways.items() if way.split(",")[0] in what}, reps, 0)
    for name in filter(runs.__contains__, ("writing", "all")):
        alone, beside = ([run[way] for run in runs[name]] for way in ("alone", "together"))
        row = {"what": name, "alone tok/s": round(median(alone), 1), "together tok/s": round(median(beside), 1)}
        yield row | {"times": quotients(beside, alone, 2)}
    if "late" in runs:
        yield {"what": "late", "times": spread([run["chunks"] for run in runs["late"]], 2)}
    for name in filter(runs.__contains__, ("gaps", "gaps, whole chunks")):
        of = {key: [run[key] for run in runs[name]] for key in runs[name][0]}
        row = {"what": name, "times": quotients(of["read"], [run["read"] for run in runs["gaps, whole chunks"]], 2)}
        yield row | {key: spread(values, 3) for key, values in of.items()}
    if "gaps" in runs:
        plain, engine = ([run[way] for run in runs["gaps, alone"]] for way in ("plain", "engine"))
        yield {"what": "read alone", "times": quotients(engine, plain, 2)}
    for name in (name for name in runs if name.startswith("drafts")):
        exact, ngram = ([run[way] for run in runs[name]] for way in ("exact", "ngram"))
        row = {"what": name, "exact tok/s": round(median(exact), 1), "ngram tok/s": round(median(ngram), 1)}
        yield row | {"times": quotients(ngram, exact, 2)}


if __name__ == "__main__":
    measure.main()
