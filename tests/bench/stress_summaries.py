"""One summary however long things take: a document summarised again and again, as `--exact` does.

    python tests/bench/stress_summaries.py [--runs 50] [--model demo] [--file demo:pdf] [--chunk 1200] [--length WORDS]

Drawn by lot for each run: a drafting profile, one thread or two, up to two busy processes beside it and their nice
level, pauses between passes, a clock that leaps, what passes are said to take, and where rows are bit-exact also how
many tokens are read at once. Half of the runs are stopped somewhere and go on from the parts they had kept. Every point
and every token behind it must be that of one undisturbed run of `-P exact`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.chat.model import Model
from kvcli.documents import Document, read_document
from kvcli.engine.resources import use_threads
from kvcli.environment import Paths
from kvcli.models.catalog import stands_for
from kvcli.settings.profile import Profile
from kvcli.summarize.cache import Cache
from kvcli.summarize.events import Done
from kvcli.summarize.request import Request
from kvcli.summarize.result import Summary
from kvcli.summarize.run import summarize
from tests.bench.harness import Rows, is_unbroken, measurement
from tests.bench.stress_exact import PROFILES, costs, jumping_clock
from tests.summarize.scribe import summary_of

BUSY = "import os, sys\nos.nice(int(sys.argv[1]))\nwhile True:\n    pass"
CHUNKS = (2048, 512, 97)  # tokens read at once
LONGEST = 8  # about as many tokens as a pass brings where copies are always right


@contextmanager
def company(rng: random.Random) -> Iterator[int]:
    """Processes that do nothing but take the cores' time, at nice levels of their own; how many they are."""
    levels = [rng.choice([0, 5, 19]) for _ in range(rng.randrange(3))]
    others = [subprocess.Popen([sys.executable, "-c", BUSY, str(level)]) for level in levels]
    try:
        yield len(others)
    finally:
        for other in others:
            other.kill()
            other.wait()


def stumbling(rng: random.Random, stop: int = 0) -> Callable[[], bool]:
    """What a run asks between its passes: takes up to some milliseconds now and then; says stop the `stop`th time."""
    asked = 0

    def cancel() -> bool:
        nonlocal asked
        asked += 1
        if rng.random() < 0.1:
            time.sleep(rng.expovariate(300))
        return asked == stop

    return cancel


def told(summary: Summary) -> tuple[str, list[tuple[int, ...]]]:
    """All that must be equal: what is printed, and the tokens of all answers."""
    return summary.markdown(), [tuple(answered.turn.ids) for answered in summary.turns]


def disturbed(
    model: Model, document: Document, request: Request, rng: random.Random, passes: int
) -> tuple[Summary, bool]:
    """A summary, and whether it was stopped on the way and taken up again. `passes`: one takes at least as many."""
    with tempfile.TemporaryDirectory() as folder, company(rng), jumping_clock(rng):
        cache = Cache.of(Path(folder), model.info, model.profile)
        stop = rng.randint(1, passes) if rng.random() < 0.5 else 0
        last = list(summarize(model, [document], request, cache=cache, cancel=stumbling(rng, stop)))[-1]
        if isinstance(last, Done):
            return last.summary, False
        return summary_of(model, [document], request, cache=cache, cancel=stumbling(rng)), True


def storm(runs: int, request: Request, model: str = "demo", file: str = "demo:pdf", seed: int = 0) -> dict[str, int]:
    """How many runs there were, how many wrote other summaries, how many were stopped, and what a summary is."""
    rng, bad, stopped, drafted = random.Random(seed), 0, 0, 0
    document, asked = read_document(file), 0

    def counted() -> bool:
        nonlocal asked
        asked += 1
        return False

    with kvcli.load(stands_for(model, Paths.of(os.environ).data), "exact", set={"load.threads": 1}) as plain:
        wanted = summary_of(plain, [document], request, cancel=counted)
        load = dict(vars(plain.profile.load))
        try:
            for i in range(runs):
                chunk = rng.choice(CHUNKS) if plain.lm.is_row_invariant else CHUNKS[0]
                use_threads(rng.choice([1, 2]))
                profile = Profile.load(PROFILES[i % len(PROFILES)])
                made = plain.under(
                    profile.replace(load=load, spec={"require_batch_invariance": True}, prefill={"chunk": chunk})
                )
                made.costs = costs(rng)
                found, was_stopped = disturbed(made, document, request, rng, max(1, asked // LONGEST))
                bad += told(found) != told(wanted)
                stopped += was_stopped
                drafted += sum(answered.turn.stats.drafted_passes for answered in found.turns)
        finally:
            use_threads(1)
    tokens = sum(len(ids) for ids in told(wanted)[1])
    about = {"parts": wanted.n_parts, "tokens": tokens, "drafted": drafted}
    return {"tried": runs, "bad": bad, "stopped": stopped, **about}


@measurement("Exact summaries with shuffled timings", is_right=is_unbroken)
def stress_summaries(
    runs: int = 50,
    model: str = "demo",
    file: str = "demo:pdf",
    length: Annotated[int | None, "words; the bundled model follows none"] = None,
    chunk: Annotated[int, "tokens of a part; 0: as many as the window holds"] = 1200,
    seed: int = 0,
) -> Rows:
    found = storm(runs, Request(length=length, chunk=chunk or None), model, file, seed)
    what = f"exact summaries by {model} with shuffled timings, {found['stopped']} stopped and resumed"
    yield {"what": what, **found}


if __name__ == "__main__":
    stress_summaries.main()
