"""FAFO and its parts against plain decoding, HF generate and HF prompt lookup: all sides interleaved in one run.

    python tests/bench/fafo.py [--reps 3] [--tasks copy,lookup,...] [--temperatures 0,0.8] [--sides suffix,fafo,...]
                               [--out FILE]

  copy     the demo model repeats notes of its example report, word for word
  lookup   the demo model answers questions about a report of 4,000 tokens
  summary  the demo model lists that report's findings
  free     the demo model continues a report that it was given the beginning of
  random   a random Llama of 152M parameters continues random tokens

Each side starts each prompt knowing nothing. All sides write as many tokens as plain decoding does until it stops.
Times are from the first token to the last; ratios are of plain decoding by this engine, repetition by repetition.

"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.bench.hf import HfSide
from kvcli.bench.profile_side import ProfileSide
from kvcli.chat.model import Model
from kvcli.fit.calibrate import quick_times
from kvcli.fit.speed import units
from tests.bench.harness import Floats, Rows, Words, in_turns, measurement, picked, quotients
from tests.bench.random_model import build, ours_of

PLAIN = "exact"
SIDES: dict[str, dict[str, Any]] = {  # [spec] tables; the profiles of these names, and parts of the mix
    PLAIN: {"method": "off"},
    "lookahead": {"method": "lookahead"},
    "scouts over a view": {"method": "lookahead", "view": "stream"},
    "suffix": {"method": "mix", "sources": ["prompt-lookup"]},
    "recycle": {"method": "mix", "sources": ["token-recycling"]},
    "stand": {"method": "mix", "sources": ["stand"]},
    "ngram": {"method": "ngram"},
    "fafo": {"method": "mix", "view": "stream"},
    "fafo-paper": {"method": "lookahead", **asdict(kvcli.Profile.load("fafo-paper").spec.settings)},
}
THEIRS = {"hf": 0, "hf-lookup": 10}  # draft tokens of prompt lookup


@dataclass
class Task:
    """Prompts for one model, and how many tokens each of them is continued by."""

    name: str
    model: Model
    theirs: Any
    prompts: list[list[int]]
    new: list[int] = field(default_factory=list)
    same32: Model | None = None  # the same weights in fp32


def tasks_of(names: Sequence[str]) -> list[Task]:
    from kvcli.bench.hf import load_hf
    from kvcli.models import source
    from tests.demo_model.example import example_report

    demo = looked_at(kvcli.load("demo", profile=PLAIN))
    demo32 = kvcli.load("demo", profile=PLAIN, set={"load.dtype": "fp32"})
    found = {}
    report = example_report()
    notes = [f"Repeat this: {a.paragraph} {b.paragraph}" for a, b in zip(report.notes, report.notes[1:], strict=False)]
    chosen = report.facts[:: max(1, len(report.facts) // 4)]
    questions = [f"{report.text}\n\nWhat is the {fact.attribute} of {fact.entity}?" for fact in chosen[:4]]
    words = {
        "copy": notes[:6],
        "lookup": questions,
        "summary": [f"{report.text}\n\nSummarise the main findings."],
    }
    theirs = load_hf(source.find("demo"), demo.profile, Path())
    for name, prompts in words.items():
        found[name] = Task(name, demo, theirs, [demo.encode(p) for p in prompts], same32=demo32)
    text = demo.tokenizer.encode(report.text)
    starts = [text[i : i + 600] for i in (0, 1200, 2400)]
    found["free"] = Task("free", demo, theirs, starts, new=[160] * 3, same32=demo32)
    if "random" in names:
        generator = torch.Generator().manual_seed(3)
        noise = [torch.randint(8, 16384, (512,), generator=generator).tolist() for _ in range(2)]
        raw = build()
        model = looked_at(Model(ours_of(build()), demo.tokenizer, demo.profile))
        model32 = Model(ours_of(build().float()), demo.tokenizer, demo32.profile)
        found["random"] = Task("random", model, raw, noise, new=[96] * 2, same32=model32)
    return [found[name] for name in names]


def looked_at(model: Model) -> Model:
    """With what passes take here, as a chat finds out when it first loads a model."""
    passes = quick_times(model.lm)
    model.costs = lambda context: units(passes, context)
    return model


def profile_of(model: Model, side: str, temperature: float) -> kvcli.Profile:
    return model.profile.replace(spec=SIDES[side], sample={"temperature": temperature}, name=side)


def lengths(task: Task) -> list[int]:
    """Tokens until plain greedy decoding stops."""
    if task.new:
        return task.new
    model = task.model.with_profile(profile_of(task.model, PLAIN, 0.0))
    return [max(8, len(model.generate(p, max_new_tokens=400).ids)) for p in task.prompts]


def measure(task: Task, temperature: float, reps: int, names: Sequence[str]) -> dict[str, Any]:
    threads = torch.get_num_threads()
    sides: dict[str, Any] = {
        name: ProfileSide(name, task.model.with_profile(profile_of(task.model, name, temperature)), threads)
        for name in SIDES
        if name == PLAIN or name in names
    }
    theirs = {name: n for name, n in THEIRS.items() if name in names}
    sides |= {n: HfSide(n, task.theirs, threads, lookup=k, temperature=temperature) for n, k in theirs.items()}
    new = lengths(task)

    def once(side: Any) -> list[Any]:
        return [side.run(prompt, n) for prompt, n in zip(task.prompts, new, strict=True)]

    found = in_turns({name: partial(once, side) for name, side in sides.items()}, reps)
    seconds = {name: [per_token(done) for done in each] for name, each in found.items()}
    texts = {name: [sample.ids for sample in each[-1]] for name, each in found.items()}
    folded = {name: [sample.stats for sample in each[-1]] for name, each in found.items()}
    plain = seconds[PLAIN]
    return {
        "task": task.name,
        "temperature": temperature,
        "tokens": sum(new),
        "sides": {
            name: {
                "speedup": quotients(plain, times),
                "ms_per_token": round(1000 * median(times), 3),
                **({} if folded[name][0] is None else counts(folded[name])),
                "same": texts[name] == texts[PLAIN],
                **({} if name in THEIRS else {"same_fp32": same_fp32(task, name, temperature, new)}),
            }
            for name, times in seconds.items()
        },
    }


def per_token(done: list[Any]) -> float:
    """Seconds of a token behind the first pass."""
    return sum(s.at[-1] - s.at[0] for s in done) / sum(len(s.at) - sum(at == s.at[0] for at in s.at) for s in done)


def counts(stats: list[Any]) -> dict[str, Any]:
    passes = sum(s.passes for s in stats)
    return {
        "tokens_per_pass": round(sum(s.new for s in stats) / passes, 3),
        "rows_per_pass": round(1 + sum(s.draft_tokens + s.lookahead_rows for s in stats) / passes, 2),
    }


def same_fp32(task: Task, side: str, temperature: float, new: list[int]) -> bool:
    """Whether the side writes what plain decoding writes where rounding cannot decide."""
    assert task.same32 is not None
    texts = []
    for name in (PLAIN, side):
        model = task.same32.with_profile(profile_of(task.same32, name, temperature))
        run = ProfileSide(name, model, torch.get_num_threads()).run
        texts.append([run(prompt, n).ids for prompt, n in zip(task.prompts, new, strict=True)])
    return texts[0] == texts[1]


@measurement("Times the speed of plain decoding", schema="kvcli.bench.fafo/1")
def fafo(
    reps: int = 3,
    tasks: Words = ("copy", "lookup", "summary", "free", "random"),
    temperatures: Floats = (0, 0.8),
    sides: Words = (*SIDES, *THEIRS),
) -> Rows:
    for task in tasks_of(tasks):
        for temperature in temperatures:
            yield measure(task, temperature, reps, picked(sides, [*SIDES, *THEIRS]))


if __name__ == "__main__":
    fafo.main()
