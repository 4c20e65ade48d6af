"""Whether the heads that `kvcli profile-heads` names are those that retrieve: accuracy lost with and without them.

    python tests/bench/retrieval_heads.py [--texts 12] [--draws 5] [--out FILE]

The ablation probe ranks the demo model's heads on some texts; the heads it names are then evicted down to their first
and newest tokens on other texts, and, in turns on the same questions, as many other heads drawn by lot, several times.
Accuracy is that of greedy answers to questions about hidden facts. Counts do not depend on the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import load
from kvcli.heads.headmap import full_heads
from kvcli.heads.request import ProbeRequest
from kvcli.heads.restricted_heads import HeadWindow
from kvcli.heads.run import probe
from kvcli.heads.sample import samples
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.quality.statistics import bootstrap
from tests.bench.harness import Rows, measurement
from tests.heads.restrict import right_answers

LENGTH = 1024  # tokens of a text
HELD_OUT = 1_000  # seed of the texts that accuracy is measured on


def draws(heads: list[tuple[int, int]], shape: tuple[int, int], n: int, seed: int) -> list[list[tuple[int, int]]]:
    """As many other heads, n times."""
    others = [(layer, head) for layer in range(shape[0]) for head in range(shape[1]) if (layer, head) not in heads]
    return [sorted(Random(f"{seed} {i}").sample(others, min(len(heads), len(others)))) for i in range(n)]


def measure(texts: int, n_draws: int, seed: int = 0) -> dict[str, Any]:
    """The heads named, and the accuracy each set of restricted heads leaves."""
    model = load("demo", "exact")
    found = probe(model, ProbeRequest(probes=("ablate",), context=LENGTH, settings=FastGen(), seed=seed))
    named = full_heads(found.heads)
    lots = draws(named, (model.lm.n_layers, model.lm.n_kv_heads), n_draws, seed)
    sets = {"none": [], "named": named} | {f"lot {i}": lot for i, lot in enumerate(lots)}
    right: dict[str, list[float]] = {name: [] for name in sets}  # by text, so that sets are paired
    reach = HeadWindow(found.reach.sinks, found.reach.recent)
    fresh = samples(model, texts, LENGTH, HELD_OUT + seed)
    for sample in fresh:
        for name, heads in sets.items():
            right[name].append(fmean(right_answers(model, sample, heads, reach)))
    lost = {name: [a - b for a, b in zip(right["none"], right[name], strict=True)] for name in sets}
    by_lot = [fmean(lost[f"lot {i}"][j] for i in range(n_draws)) for j in range(texts)]
    more = [a - 5 * b for a, b in zip(lost["named"], by_lot, strict=True)]
    return {
        "heads": named,
        "lots": lots,
        "reach": [reach.sinks, reach.recent],
        "questions": sum(len(sample.asked) for sample in fresh),
        "accuracy": {name: round(fmean(values), 4) for name, values in right.items()},
        "lost_named": round(fmean(lost["named"]), 4),
        "lost_by_lot": round(fmean(by_lot), 4),
        "ratio": round(fmean(lost["named"]) / fmean(by_lot), 2) if fmean(by_lot) > 0 else None,
        # above 0: at least five times as much, also for the lower end of the interval
        "lost_more_than_five_times": round(fmean(more), 4),
        "interval95": bootstrap({"texts": more}, seed),
        "holds": fmean(lost["named"]) > 0 and fmean(lost["named"]) >= 5 * fmean(by_lot),
    }


@measurement("Accuracy on hidden facts with heads restricted to their first and newest tokens", is_counts=True)
def retrieval_heads(texts: int = 12, draws: int = 5) -> Rows:
    found = measure(texts, draws)
    for name, accuracy in found["accuracy"].items():
        yield {"restricted": name, "accuracy": accuracy}
    return {"found": found}


if __name__ == "__main__":
    retrieval_heads.main()
