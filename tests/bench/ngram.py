"""What n-gram drafting gains where there is something to copy, and costs where there is nothing: sides interleaved.

    python tests/bench/ngram.py [--reps 5] [--out FILE]

Profiles `exact` and `ngram` on the same weights, each turn in a session that knows nothing of the turns before it:
  copy     the demo model repeats notes of its example report, word for word
  lookup   the demo model answers a question about a report of 3,000 tokens
  noise    the demo model at temperature 3: nothing to copy, and passes so short that drafting costs most
  random   a random Llama of 152M parameters at temperature 1: nothing to copy, passes as long as a real model's
Ratios are of decoding time for the same text.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.chat.model import Model
from tests.bench.harness import Rows, in_turns, measurement, quotients
from tests.bench.random_model import build, ours_of


@dataclass(frozen=True)
class Task:
    """Prompts for one model, and how to sample."""

    name: str
    model: Model
    prompts: list[Any]
    new: int
    sample: dict[str, Any]
    ignore_eos: bool = False
    exact: Model | None = None  # the same weights in fp32


def tasks(demo: Model, random: Model, demo32: Model, random32: Model) -> list[Task]:
    from tests.demo_model.example import example_report

    report = example_report()
    notes = [f"Repeat this: {a.paragraph} {b.paragraph}" for a, b in zip(report.notes, report.notes[1:], strict=False)]
    fact = report.facts[len(report.facts) // 2]
    question = f"{report.text}\n\nWhat is the {fact.attribute} of {fact.entity}?"
    noise = torch.randint(8, 16384, (512,), generator=torch.Generator().manual_seed(3)).tolist()
    return [
        Task("copy", demo, notes[:6], 160, {"temperature": 0.0}, exact=demo32),
        Task("lookup", demo, [question], 40, {"temperature": 0.0}, exact=demo32),
        Task("noise", demo, ["Hello"], 400, {"temperature": 3.0}, ignore_eos=True, exact=demo32),
        Task("random", random, [noise], 160, {"temperature": 1.0}, ignore_eos=True, exact=random32),
    ]


def decode(task: Task, profile: str) -> tuple[float, list[int], list[Any]]:
    """Seconds of decoding, the tokens, the stats; in a fresh session."""
    chosen = kvcli.Profile.load(profile).replace(sample=task.sample, load={"dtype": task.model.profile.load.dtype})
    model = task.model.with_profile(chosen)
    seconds, ids, stats = 0.0, [], []
    for prompt in task.prompts:
        turn = model.generate(prompt, max_new_tokens=task.new, ignore_eos=task.ignore_eos)
        seconds += turn.stats.decode
        ids += turn.ids
        stats.append(turn.stats)
    return seconds, ids, stats


def same_in_fp32(task: Task) -> bool:
    """Whether both profiles give one text when rounding cannot decide; in bf16 near ties may fall either way."""
    plain = task.exact or task.model
    exact = Task(task.name, plain, task.prompts, task.new, task.sample, task.ignore_eos)
    return decode(exact, "exact")[1] == decode(exact, "ngram")[1]


def measure(task: Task, reps: int) -> dict[str, Any]:
    found = in_turns({profile: partial(decode, task, profile) for profile in ("exact", "ngram")}, reps)
    plain, want, _ = found["exact"][-1]
    _, got, stats = found["ngram"][-1]
    passes = sum(s.passes for s in stats)
    return {
        "task": task.name,
        "tokens": len(want),
        "speedup": quotients(*([spent for spent, _, _ in each] for each in found.values())),
        "tokens_per_pass": round(len(got) / passes, 3),
        "drafted_share": round(sum(s.drafted_passes for s in stats) / passes, 3),
        "same": all(a[1] == b[1] for a, b in zip(*found.values(), strict=True)),
        "same_fp32": same_in_fp32(task),
        "ms_per_token_plain": round(1000 * plain / len(want), 3),
    }


@measurement("Drafting, times the speed of plain decoding", schema="kvcli.bench.ngram/1")
def ngram(reps: int = 5) -> Rows:
    demo = kvcli.load("demo", profile="exact")
    demo32 = kvcli.load("demo", profile="exact", set={"load.dtype": "fp32"})
    random = Model(ours_of(build()), demo.tokenizer, demo.profile)
    random32 = Model(ours_of(build().float()), demo.tokenizer, demo32.profile)
    for task in tasks(demo, random, demo32, random32):
        yield measure(task, reps)


if __name__ == "__main__":
    ngram.main()
