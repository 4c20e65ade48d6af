"""A text behind another one: how much sooner it is read, and how often answers are still right.

    python tests/bench/reuse.py [--model demo] [--tokens 3000] [--texts 3] [--changes 64,swapped]
        [--tasks passkey,mqar] [--out FILE]

A text of a task is read and then changed: so many tokens of it, a tenth of the way in, give way to twice as many
others, or its halves change places. Then the task's questions are asked of the changed text: read anew, and with what
it shares with the old one taken over by each method of `[reuse]`, by turns. Beside right answers it says how far the
logits behind the question are from those of reading anew.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import load
from kvcli.engine.engine import run_to_end
from kvcli.models.text import decode
from kvcli.quality.prompt import Prompts, fitted
from kvcli.quality.prose import Prose
from kvcli.quality.sample import SampleSeed
from kvcli.quality.tasks import TASKS
from kvcli.settings.profile import Profile
from tests.bench.harness import Rows, Words, measurement, spread

NAMES = ("niah_single", "passkey", "mqar", "copy_span")
ANEW = "read anew"
SIDES: dict[str, dict[str, Any]] = {
    ANEW: {"method": "none"},
    "pie": {"method": "pie"},
    "blend": {"method": "blend"},
    "blend, hidden": {"method": "blend", "select": "hidden"},
    "blend, half": {"method": "blend", "recompute": 0.5},
}


def changed(ids: list[int], how: str) -> list[int]:
    """The text to be read behind this one."""
    if how == "swapped":
        return [*ids[len(ids) // 2 :], *ids[: len(ids) // 2]]
    at, n = len(ids) // 10, int(how)
    return [*ids[:at], *ids[-2 * n - at : -at], *ids[at + n :]]


@measurement(
    "A changed text of {tokens:,} tokens, read behind the old one",
    note="So many tokens replaced by twice as many a tenth of the way in, or halves swapped. Right: share of answers, "
    "of all tasks in equal parts. Off: mean divergence (KL) of the first token from that of reading anew. Sooner: how "
    "many times sooner the changed text is read, least and most in brackets.",
)
def reuse(
    model: str = "demo", tokens: int = 3000, texts: int = 3, tasks: Words = NAMES, changes: Words = ("64", "swapped")
) -> Rows:
    profile = Profile.load("exact").replace(exactness="approx")
    loaded = load(model, profile)
    prompts = Prompts(loaded.tokenizer)
    opened = {side: loaded.open(profile.replace(reuse=how)) for side, how in SIDES.items()}
    for how in changes:
        found: dict[str, list[tuple[float, float, float]]] = {side: [] for side in SIDES}
        for n, (name, i) in enumerate(product(tasks, range(texts))):
            context = fitted(TASKS[name], SampleSeed(name, 7, tokens, i, Prose()), prompts)
            ids, question = prompts.context(context.text), context.questions[0]
            behind, logits = prompts.question(question), dict[str, Tensor]()
            times, right = dict[str, float](), dict[str, float]()
            for side in [*SIDES][n % len(SIDES) :] + [*SIDES][: n % len(SIDES)]:
                text, prompt = opened[side], [*changed(ids, how), *behind]
                text.session.rewind(0)  # the old text is its own
                text.generate([*ids, *behind], max_new_tokens=1)
                began = time.perf_counter()
                turn = text.generate(prompt, max_new_tokens=question.max_new)
                times[side] = time.perf_counter() - began - turn.stats.decode
                words = decode(loaded.tokenizer, [j for j in turn.ids if j not in loaded.lm.stop_ids])
                right[side] = TASKS[name].score(question.prefix + words, question)
                text.session.rewind(len(prompt))
                logits[side] = run_to_end(text.session.step()).logits[0].double().log_softmax(0)
            want = logits[ANEW]
            for side in SIDES:
                off = float((want.exp() * (want - logits[side])).sum())
                found[side].append((right[side], off, times[ANEW] / times[side]))
        for side, each in found.items():
            right_, offs, sooner = zip(*each, strict=True)
            row: dict[str, Any] = {"change": how, "side": side, "n": len(each)}
            row |= {"right": statistics.mean(right_), "off, nats": round(statistics.mean(offs), 4)}
            row |= {"sooner": spread(sooner, 17)}
            yield row


if __name__ == "__main__":
    reuse.main()
