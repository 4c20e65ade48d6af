"""Right answers and cost of decoding methods, over texts with facts that are asked for.

    python tests/bench/forks.py [--model demo] [--task facts] [--n 20] [--new 40] [--sides greedy,beam] [--out FILE]

`--task facts` asks for one of 40 facts that differ by their keys, as the demo model was taught; `documents` has the
documents and questions of `answers.py`, for other models. An answer is right if it has the fact's words.
Sides take turns at each question, so that *times* compares the same questions: seconds of decoding over those of the
first side.
*passes*: forward passes, each of up to `forks * (1 + draft)` rows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.quality.prose import Prose
from kvcli.quality.sample import SampleSeed
from kvcli.quality.tasks.needles import multikey_all
from tests.bench.answers import TEXTS
from tests.bench.harness import Rows, Words, measurement

SAMPLED = {"sample.temperature": 0.8}
SIDES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "bregman": {**SAMPLED, "sample.bregman_lambda": 0.01},
    "first-finish": {**SAMPLED, "decode.method": "first-finish"},
    "beam": {"decode.method": "beam"},
    "beam, patience 2": {"decode.method": "beam", "decode.patience": 2},
    "beam, drafts": {"decode.method": "beam", "decode.draft": 4},
    "adadec": {"decode.method": "adadec"},
    "phi": {**SAMPLED, "decode.method": "phi"},
}


@measurement(
    "Answers of {model} to {n} questions ({task}), by decoding method",
    columns=["side", "right", "of", "tokens", "passes", "seconds", "times"],
    note="right: answers with the fact's words. times: median of seconds over those of the first side's.",
)
def forks(
    model: str = "demo",
    task: Literal["facts", "documents"] = "facts",
    n: int = 20,
    new: int = 40,
    sides: Words = tuple(SIDES),
) -> Rows:
    import kvcli

    usual = {"sample.temperature": 0.0, "sample.repetition_penalty": 1.0}
    asked = [(text, *fact) for text, facts in TEXTS for fact in facts.items()]
    asked = [asked[i * len(asked) // n] for i in range(n)]
    if task == "facts":
        drawn = [multikey_all(SampleSeed("forks", 0, 0, i, Prose()), 40) for i in range(n)]
        asked = [(of.text, of.questions[0].text, of.questions[0].references[0]) for of in drawn]
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with kvcli.load(model, "exact", usual) as loaded:
        opened = {side: loaded.open(set={**usual, **SIDES[side]}) for side in sides}
        for text, question, words in asked:
            for side, session in opened.items():
                prompt = f"{text}\n\n{question}"
                turn = session.generate(prompt, new)
                of = {"right": words.lower() in turn.text.lower(), "tokens": turn.stats.new}
                found[side].append({**of, "passes": turn.stats.passes, "seconds": turn.stats.decode})
    for side, runs in found.items():
        row = {key: sum(run[key] for run in runs) for key in ("right", "tokens", "passes", "seconds")}
        times = [run["seconds"] / other["seconds"] for run, other in zip(runs, found[sides[0]], strict=True)]
        more = {"of": len(runs), "seconds": round(row["seconds"], 2), "times": round(median(times), 2)}
        yield {"side": side, **row, **more}
    return {"new": new}


if __name__ == "__main__":
    forks.main()
