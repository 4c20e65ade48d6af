"""One text however long passes take: drafting against plain decoding, with timings shuffled and none remembered.

    python tests/bench/stress_exact.py [--runs 200] [--dtypes bf16,fp32] [--stores dense,minmax,hadamard,...]

Each run asks two questions under a drafting profile with `spec.require_batch_invariance`, as `--exact` does:
the clock leaps, and what passes are said to take is drawn by lot, so that drafts differ in length from run to run.
Every token must be that of plain decoding over the same store (`-P exact`). A part of the runs in each dtype, over the
stores by turns, greedy and at temperature 0.8 by lot.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.api import Turn
from kvcli.chat.model import Model
from kvcli.engine.drafting.drafter import Costs
from kvcli.models.text import render_prompt
from kvcli.settings.profile import Profile
from tests.bench.harness import Rows, Words, is_unbroken, measurement, picked
from tests.demo_model.example import example_report

PROFILES = ("ngram", "lookahead", "fafo")
_PART = {
    "floor": 96,
    "dense_layers": 1,
    "recent": 16,
    "selection_interval": 32,
}  # so short a text would be read in full
STORES: dict[str, dict[str, dict[str, object]]] = {
    "dense": {},
    **{name: {"sparse": {"method": name, **_PART}} for name in ("minmax", "sketch", "certified")},
    "hadamard": {"kv": {"k_bits": 4, "v_bits": 4, "rotate": "hadamard", "residual": 64}},
    "recalled": {"kv": {"k_bits": 8, "v_bits": 4, "rotate": "hadamard"}, "sparse": {"method": "sketch", **_PART}},
    "disk": {"memory": {"disk": "1GiB", "device": "6MiB"}, "prefill": {"chunk": 256}},
}


@contextmanager
def jumping_clock(rng: random.Random) -> Iterator[None]:
    """Time goes on as ever, and now and then leaps by up to a few passes."""
    real, ahead = time.perf_counter, 0.0

    def leaping() -> float:
        nonlocal ahead
        ahead += rng.expovariate(200) if rng.random() < 0.3 else 0.0
        return real() + ahead

    with mock.patch.object(time, "perf_counter", leaping):
        yield


def costs(rng: random.Random) -> Costs:
    """What passes of 2 to 64 rows are said to take, in passes of one row: anything from free to a pass a row."""
    slope = rng.choice([0.0, 0.01, 0.1, 1.0]) * rng.random()

    def at(context: int) -> Mapping[int, float]:
        return {rows: 1 + slope * (rows - 1) for rows in (2, 4, 8, 16, 32, 64)}

    return at


def conversation(model: Model, i: int) -> list[Turn]:
    """Two questions of a run, greedy or sampled; what the first answer left behind is the second one's past."""
    notes = example_report().notes
    pair = notes[i % (len(notes) - 1) :][:2]
    asked = [{"role": "user", "content": "Repeat this: " + " ".join(note.paragraph for note in pair)}]
    turns = []
    for _ in range(2):
        turns.append(model.generate(render_prompt(model.tokenizer, asked), max_new_tokens=96, ignore_eos=True))
        asked += [{"role": "assistant", "content": turns[-1].text}, {"role": "user", "content": "Once more."}]
    return turns


def storm(
    runs: int, seed: int = 0, dtypes: Sequence[str] = ("bf16", "fp32"), stores: Sequence[str] = ("dense",)
) -> dict[str, int]:
    """How many runs and tokens there were, how many runs wrote others, and by dtype how many passes drafted."""
    rng, bad, tokens, drafted = random.Random(seed), 0, 0, dict.fromkeys(dtypes, 0)
    for dtype in drafted:
        loaded = kvcli.load("demo", "exact", set={"load.dtype": dtype, "load.verify": False})
        load = dict(vars(loaded.profile.load))
        for i in range(runs // len(drafted)):
            sample = {"temperature": rng.choice([0.0, 0.8]), "seed": i}
            changes = {"load": load, "sample": sample, **STORES[store := stores[i // len(PROFILES) % len(stores)]]}
            if store != "dense":
                changes["exactness"] = "approx"
            plain = loaded.with_profile(Profile.load("exact").replace(**changes))
            wanted = conversation(plain, i)
            drafting = Profile.load(PROFILES[i % len(PROFILES)])
            model = loaded.with_profile(drafting.replace(**changes, spec={"require_batch_invariance": True}))
            model.costs = costs(rng)
            with jumping_clock(rng):
                found = conversation(model, i)
            bad += [turn.ids for turn in found] != [turn.ids for turn in wanted]
            tokens += sum(len(turn.ids) for turn in wanted)
            drafted[dtype] += sum(turn.stats.drafted_passes for turn in found)
    tried = runs // len(drafted) * len(drafted)
    return {"tried": tried, "tokens": tokens, "bad": bad} | {f"drafted_{dtype}": n for dtype, n in drafted.items()}


@measurement("Exact runs with shuffled timings", is_right=is_unbroken)
def stress_exact(runs: int = 200, dtypes: Words = ("bf16", "fp32"), stores: Words = ("dense",)) -> Rows:
    found = storm(runs, dtypes=dtypes, stores=picked(stores, STORES))
    yield {"what": f"exact runs with shuffled timings, {found['tokens']:,} tokens in {','.join(dtypes)}", **found}


if __name__ == "__main__":
    stress_exact.main()
