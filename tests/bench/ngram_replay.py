"""What n-gram drafting would gain on answers that a model wrote, at given costs of rows.

    python tests/bench/ngram_replay.py [--model smollm2-135m] [--ctx 1200] [--new 200] [--out FILE]

The model answers each workload of real text once, greedy and at temperature 0.8, without drafting. The answers are then
replayed under several settings. Pass times are pretended, so the figures follow from the answers alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import load
from kvcli.bench.workloads import prompt_of
from kvcli.environment import Paths
from kvcli.methods.drafts.ngram import Ngram
from kvcli.models.catalog import stands_for
from tests.bench.harness import Rows, measurement
from tests.drafts.conftest import PLAIN, Engine

COSTS: dict[str, Callable[[int], float]] = {  # rows -> plain passes
    "nearly free up to 8": lambda rows: 1 + 0.02 * (rows - 1) if rows <= 8 else 1.3 + 0.06 * (rows - 8),
    "an eighth each": lambda rows: 1 + 0.125 * (rows - 1),
}
CONFIGS = {
    "default": Ngram(),
    "min_match = 2": Ngram(min_match=2),
    "branches = 1": Ngram(branches=1),
    "max = 7": Ngram(max=7),
    "adaptive = false": Ngram(adaptive=False),
}
TEMPERATURES = (0.0, 0.8)
REAL = ("prose", "code", "manual", "article", "rewrite", "translate", "talk")


def written(name: str, temperature: float, ctx: int, new: int) -> list[tuple[list[int], int]]:
    """Ids of prompt and answer for each workload, and how many of them are the prompt's."""
    found, path = [], stands_for(name, Paths.of(os.environ).data)
    with load(path, "exact", {"sample.temperature": temperature, "sample.stop_loops": 0}) as model:
        for workload in REAL:
            ids = prompt_of(workload, {}, model.tokenizer, model.lm.vocab, ctx, new)
            model.generate(ids, max_new_tokens=new)
            found.append((list(model.text_session.session.ids), len(ids)))
    return found


def replayed(answers: list[tuple[list[int], int]], config: Ngram, cost: Callable[[int], float]) -> dict[str, float]:
    runs = [Engine(config.drafter(), ids, prompt, cost).finish() for ids, prompt in answers]
    steps = [step for run in runs for step in run.steps]
    new = sum(len(s.new) for s in steps)
    return {
        "gain": new * PLAIN / sum(run.true_seconds for run in runs),
        "least": min(run.gain for run in runs),
        "most": max(run.gain for run in runs),
        "tokens_per_pass": new / len(steps),
        "drafted_share": sum(s.n_drafted > 0 for s in steps) / len(steps),
        "draft_tokens_per_pass": sum(s.n_drafted for s in steps) / len(steps),
    }


@measurement("Answers of {model} to 7 workloads of real text, replayed with pretended pass times")
def ngram_replay(model: str = "smollm2-135m", ctx: int = 1200, new: int = 200) -> Rows:
    for temperature in TEMPERATURES:
        answers = written(model, temperature, ctx, new)
        for of_row, cost in COSTS.items():
            for settings, config in CONFIGS.items():
                known = {"temperature": temperature, "a further row": of_row, "settings": settings}
                yield known | replayed(answers, config, cost)


if __name__ == "__main__":
    ngram_replay.main()
