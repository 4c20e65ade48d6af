"""A draft model that keeps what the model that writes looks at (SpecExtend), beside one with a window and none at all.

    python tests/bench/specextend.py [--model demo] [--draft demo-small] [--ctx 4096,8000] [--working 512] [--reps 3]
        [--tasks lookup,summary,needle] [--cost 1024,16384] [--fixed] [--out FILE]

  lookup   questions about facts of a report that fills the context, answered in a sentence
  summary  that report's findings are listed
  needle   as lookup, one draft token a pass and no clock: how many tokens of the fact were drafted, and how many others

Its sibling costs the demo model too much to gain speed; this shows what a small cache loses and retrieval brings back.
`--model demo-wide` is the same function at the cost of 150M parameters (tests/bench/widened.py). Nobody copies. All
sides of a repetition run one after the other, each prompt knowing nothing; times are from the first token to the last,
ratios of plain decoding. `--fixed`: four draft tokens in each pass, whatever the clock says, so that caches are
compared and not what the clock makes of answers of a dozen tokens. `--cost`: time of a drafted token of a random 152M
Llama behind so many tokens, its looks at the text included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Annotated, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.bench.workloads import facts_in, report
from kvcli.drafts.draft_models.chunk_retrieval import ChunkRetrievalModel, scored_layers, trigger
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.engine.stats import Step
from kvcli.kv.tiers.dense import Dense
from kvcli.models.text import render_prompt
from tests import make
from tests.bench.harness import Ints, Rows, Words, measurement, quotients
from tests.bench.random_model import build, ours_of
from tests.bench.widened import write

SIDES = {"plain": None, "window": "off", "every:8": "every:8", "adaptive": "adaptive"}
FOUR = {"adaptive": False, "depth": 4, "max": 4, "branches": 1}  # draft tokens in a row
ONE = {"adaptive": False, "depth": 1, "max": 1, "branches": 1}  # draft token a pass
ASKED = 6  # facts of a report
MOST = 200  # tokens of an answer


@dataclass(frozen=True)
class Asked:
    """A prompt, and what of its answer stands in the text; "" = nobody looks."""

    ids: list[int]
    value: str = ""


def prompts(model: Any, task: str, ctx: int, seed: int) -> list[Asked]:
    aim = float(ctx)
    while True:
        text = report(Random(seed), aim)
        told = facts_in(text)
        told = told[: len(told) * 4 // 5]  # those at the end are in any window
        questions = [(f"What is the {of}?", value) for of, value in told[:: max(1, len(told) // ASKED)][:ASKED]]
        if task == "summary":
            questions = [("Summarise the main findings.", "")]
        found = [
            Asked(render_prompt(model.tokenizer, [{"role": "user", "content": f"{text}\n\n{question}"}]), value)
            for question, value in questions
        ]
        if max(len(one.ids) for one in found) <= ctx - MOST:
            return found
        aim *= 0.97


class Side:
    """One way to draft, and a session that goes from prompt to prompt."""

    def __init__(self, model: Any, spec: dict[str, Any]) -> None:
        self.model = model.with_profile(model.profile.replace(spec=spec))
        self.session = self.model.new_session()
        self.stop = {*self.model.lm.stop_ids}

    def answer(self, ids: list[int]) -> tuple[list[int], list[Step], float]:
        """The answer, how it came, and seconds from its first token to its last."""
        session = self.session
        session.start_answer(ids, session.sampler)
        run_to_end(session.read(ids[len(session.ids) :]))
        steps: list[Step] = []
        began = 0.0
        for step in iterate_events(session.stream(MOST, self.stop)):
            steps.append(step)
            began = began or time.perf_counter()
        return session.ids[len(ids) :], steps, time.perf_counter() - began


def sides(args: SimpleNamespace, model: Any, **more: Any) -> dict[str, Side]:
    usual = {"method": "model", "model": args.draft, "working": args.working, "copies": False, **more}
    usual |= {"prefill": args.prefill, "positions": args.positions}
    chosen = {"recent": args.recent, "scored_layers": args.looks}

    def spec(retrieval: str | None) -> dict[str, Any]:
        if not retrieval:
            return {"method": "off"}
        return {**usual, **(chosen if retrieval != "off" else {}), "retrieval": retrieval}

    return {name: Side(model, spec(retrieval)) for name, retrieval in SIDES.items()}


def speed(args: SimpleNamespace, model: Any, task: str, ctx: int) -> dict[str, Any]:
    asked, made = prompts(model, task, ctx, seed=1), sides(args, model, **(FOUR if args.fixed else {}))
    seconds: dict[str, list[float]] = {name: [] for name in made}
    accepted, passes, texts = dict.fromkeys(made, 0), dict.fromkeys(made, 0), {}
    for rep in range(args.reps + 1):  # the first warms up
        order = [*made][rep % len(made) :] + [*made][: rep % len(made)]
        for name in order:
            found = [made[name].answer(one.ids) for one in asked]
            texts[name] = [ids for ids, _, _ in found]
            if rep:
                seconds[name].append(sum(spent for _, _, spent in found) / sum(len(ids) - 1 for ids, _, _ in found))
                accepted[name] += sum(step.n_accepted for _, steps, _ in found for step in steps)
                passes[name] += sum(len(steps) for _, steps, _ in found)
    rows = {
        name: {
            "speedup": quotients(seconds["plain"], each),
            "ms_per_token": round(1000 * median(each), 3),
            "tokens_per_pass": round(1 + accepted[name] / passes[name], 3),
            "draft_bytes": sum(use.nbytes for use in made[name].session.drafter.usage()),
            "same": texts[name] == texts["plain"],
        }
        for name, each in seconds.items()
    }
    return {"task": task, "context": ctx, "tokens": sum(map(len, texts["plain"])), "sides": rows}


def needle(args: SimpleNamespace, model: Any, ctx: int) -> dict[str, Any]:
    """Share of tokens that were drafted: of values that stand in the text, and of the others."""
    rows = {}
    for name, side in sides(args, model, **ONE).items():
        if name == "plain":
            continue
        right: dict[bool, list[bool]] = {True: [], False: []}
        for seed in range(args.reports):
            for one in prompts(model, "lookup", ctx, seed):
                ids, steps, _ = side.answer(one.ids)
                span, at = within(model, ids, one.value), 0
                for step in steps:
                    if step.n_drafted:
                        right[at in span].append(step.n_accepted > 0)
                    at += len(step.new)
        names = {True: "of_facts", False: "of_others"}
        rows[name] = {names[key]: f"{sum(of)} of {len(of)}" for key, of in right.items()}
    return {"task": "needle", "context": ctx, "sides": rows}


def within(model: Any, ids: Sequence[int], value: str) -> range:
    """Which tokens of the answer are its value; none where the answer is another."""

    def has(some: Sequence[int]) -> bool:
        return value in model.tokenizer.decode(some)

    if not value or not has(ids):
        return range(0)
    end = next(n for n in range(len(ids) + 1) if has(ids[:n]))
    return range(next(n for n in range(end, -1, -1) if has(ids[n:end])), end)


@dataclass(frozen=True)
class Stored:
    """A past of numbers without a meaning."""

    cache: Dense
    view: None = None


def cost_of_drafting(
    args: SimpleNamespace, contexts: Sequence[int], rounds: int = 48, depth: int = 4
) -> dict[str, Any]:
    """Milliseconds of a drafted token behind so many tokens, and of a look, which every 8th round begins with."""
    lm, generator = ours_of(build()), torch.Generator().manual_seed(3)
    drafts, found = {}, []
    for n in contexts:
        ids = torch.randint(8, 16384, (n,), generator=generator).tolist()
        kv = make.dense(lm)
        for layer, s in enumerate(lm.shapes):
            fresh = torch.randn(2, s.n_kv_heads, n + 999, s.k_dim, generator=generator).to(lm.dtype)
            kv.append(layer, fresh[0, :, : n - 1], fresh[1, :, : n - 1], 0)
        more: dict[str, Any] = {
            "sees": 1024,
            "closes": True,
            "size": 32,
            "recent": 256,
            "attention_params": scored_layers(lm, 1),
        }
        made = ChunkRetrievalModel(lm, 1024, 4, trigger=partial(trigger, "every:8"), **more)
        made.start(ids)
        began = time.perf_counter()
        run_to_end(made.prefill())
        drafts[n] = made, Stored(kv), time.perf_counter() - began
    times: dict[int, list[float]] = {n: [] for n in contexts}
    for at in range(rounds):
        for n, (made, past, _) in drafts.items():
            began = time.perf_counter()
            made.bind(past)
            run_to_end(made.catch_up())
            for i in range(depth):
                run_to_end(made.continue_from([8 + i], [i - 1]))
            times[n].append(time.perf_counter() - began)
            rows = PassRows.chain([5, 6], made.length - 1)
            queries = [torch.randn(lm.n_heads, 2, lm.head_dim, generator=generator).to(lm.dtype) for _ in lm.shapes]
            new = [100 + at]
            made.observe(Step(rows, torch.empty(0), [0], new, 0.0, queries=queries))
            made.extend(new)
            for layer, s in enumerate(lm.shapes):
                one = torch.randn(s.n_kv_heads, 1, s.k_dim, generator=generator).to(lm.dtype)
                past.cache.append(layer, one, one, made.length - 2)
    for n, each in times.items():
        usual, looked = median(each), median(each[9::8])
        ms = 1000 * (usual * 7 + looked) / 8 / (depth + 1)
        found.append({"context": n, "ms_per_token": round(ms, 3), "look_ms": round(1000 * (looked - usual), 2)})
        found[-1]["study_s"] = round(drafts[n][2], 2)
    return {"rounds": rounds, "depth": depth, "contexts": found}


@measurement(
    "A window, and what the model that writes looks at: speed, and accepted draft tokens of facts and of the rest",
    schema="kvcli.bench.specextend/1",
)
def specextend(
    model: str = "demo",
    draft: str = "demo-small",
    ctx: Ints = (4096, 8000),
    tasks: Words = ("lookup", "summary", "needle"),
    working: int = 512,
    recent: int = 128,
    looks: int = 4,
    prefill: str = "window:1024",
    positions: str = "contiguous",
    reports: int = 2,
    reps: int = 3,
    cost: Annotated[Ints, "contexts; empty = none"] = (1024, 16384),
    fixed: bool = False,
) -> Rows:
    args = SimpleNamespace(**locals())
    with TemporaryDirectory() as folder:
        if model == "demo-wide":
            write(Path(folder))
        target = kvcli.load(folder if model == "demo-wide" else model, profile="exact") if tasks else None
    for task, n in product(tasks, ctx):
        found = needle(args, target, n) if task == "needle" else speed(args, target, task, n)
        for name, side in found["sides"].items():
            yield {"task": task, "context": n, "side": name, **side}
    if not cost:
        return None
    costs = cost_of_drafting(args, cost)
    behind = [f"{of['context']:,} tokens {of['ms_per_token']} ms" for of in costs["contexts"]]
    note = f"A drafted token of a random 152M Llama, looks included, behind {', behind '.join(behind)}."
    return {"cost": costs, "note": note}


if __name__ == "__main__":
    specextend.main()
