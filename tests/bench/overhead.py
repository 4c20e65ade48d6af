"""What a decoding pass takes beside the model's layers and the kernels: this checkout, and earlier ones beside it.

    git worktree add /tmp/before COMMIT
    python tests/bench/overhead.py [--before CHECKOUT,..] [--layers 12] [--whole] [--passes 48] [--reps 25] [--out FILE]

Layers and kernels take nothing: a hollow model hands each layer's attention queries, keys and values that are there
already, and kernels answer with tensors that are there already. `--whole` runs a small random Llama and the kernels
instead, as they are: what lies between them then finds its caches as a pass leaves them.

Everything where work passes from one part to another carries a clock; what the clocks take themselves is measured
first and taken off. The text is the standard library's source, replayed as if the model had written it, and drafters
are told passes that cost 1 % more a row: so each turn makes the same passes. Sides take turns, each in a process of its
own that runs this script as its checkout has it. Of each part of each pass the least over the turns counts, which other
programs on the machine do not reach; a figure is the mean over the passes, in microseconds. `scouts` is fafo with
scouts in every pass.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from kvcli import assemble
from kvcli.engine.engine import iterate_events
from kvcli.engine.hf.lm import LM
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import Stats
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.drafts.mix import Mix
from kvcli.methods.drafts.ngram import Ngram
from kvcli.methods.drafts.off import Off
from tests.bench.against import Checkout
from tests.bench.clocks import VOCAB, Parts, clock, small_model
from tests.bench.harness import ROOT, Rows, Words, in_turns, measurement

METHODS: dict[str, Callable[[], Any]] = {
    "off": Off,
    "ngram": Ngram,
    "fafo": lambda: Mix(view="stream"),
    "scouts": lambda: Mix(view="stream", adaptive=False),
}
FREE = ("model", "kernels", "bench")  # parts that are no overhead of the engine
CONTEXT = 1024


class Side:
    """One way to draft, at work on the text."""

    def __init__(self, parts: Parts, lm: LM, method: str, text: list[int]) -> None:
        self._parts, kv = parts, Dense(lm.shapes, lm.dtype)
        drafter: Any = Paced(parts, METHODS[method]().drafter())
        view = assemble.view(lm, kv, drafter)
        self._session = GenerationSession(lm, kv, drafter, scripted(parts, text), view=view)
        self._session.history.add = parts.timed("drawing", self._session.history.add)  # type: ignore[method-assign]
        self._add = parts.timed("statistics", Stats().add_step)
        for _ in iterate_events(self._session.read(text[:CONTEXT])):
            pass

    def measure(self, passes: int) -> list[dict[str, float]]:
        """Microseconds by part, of each pass, and how many rows it had."""
        steps, found = iterate_events(self._session.stream(10**9)), []
        for _ in range(passes):
            self._parts.begin()
            step = next(steps)
            self._add(step)
            spent = {part: round(us, 2) for part, us in self._parts.end().items()}
            found.append(spent | {"rows": step.rows.n_rows})
        steps.close()
        return found


class Paced:
    """A drafter for which passes take what its decisions may rest on, whatever the machine does."""

    def __init__(self, parts: Parts, drafter: Any) -> None:
        self._drafter = drafter
        self.propose = parts.timed("drafter", drafter.propose)
        observe = parts.timed("drafter", drafter.observe)
        self.observe = parts.timed("bench", lambda step: observe(replace(step, seconds=1 + 0.01 * step.rows.n_rows)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def scripted(parts: Parts, text: list[int]) -> Sampler:
    """A sampler that draws as its class does, and then says what the text has at that place."""

    @dataclass(frozen=True)
    class Scripted(Sampler):
        def __call__(self, logits: Tensor, pos: Tensor, facts: Any = None) -> Any:
            return says(drawn(self, logits, pos, facts), pos)

    drawn = Sampler.__call__
    says = parts.timed("bench", lambda _, pos: torch.tensor([text[p + 1] for p in pos.tolist()]))
    return Scripted()


def words(n: int, vocab: int = VOCAB) -> list[int]:
    """So many tokens of the standard library's source, a number for each different word."""
    known: dict[str, int] = {}
    text: list[int] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found = re.findall(r"\w+|\s+|[^\w\s]", file.read_text(encoding="utf-8", errors="ignore"))
        text += [known.setdefault(word, len(known) % vocab) for word in found]
        if len(text) >= n:
            break
    return text[:n]


def work(layers: int, *, hollow: bool) -> None:
    """A process that measures what it is told to, line by line."""
    parts, text = Parts(), words(30000)
    torch.set_num_threads(1)
    lm = small_model(layers)
    clock(parts, lm, hollow=hollow)
    for line in sys.stdin:
        method, passes = json.loads(line)
        print(json.dumps(Side(parts, lm, method, text).measure(passes)), flush=True)


def summed(turns: list[list[dict[str, float]]]) -> dict[str, float]:
    """Of each part of each pass the least over the turns; the mean over the passes, and the sum of what is ours."""
    parts = sorted({part for turn in turns for each in turn for part in each} - {"rows"})
    mean = {}
    for part in (*parts, "rows"):
        least = [min(each.get(part, 0.0) for each in same) for same in zip(*turns, strict=True)]
        mean[part] = sum(least) / len(least)
    ours = sum(mean[part] for part in parts if part not in FREE)
    return {key: round(value, 1) for key, value in ({"overhead": ours} | mean).items()}


@measurement("Microseconds of a pass beside its layers and kernels")
def overhead(
    before: Annotated[tuple[Path, ...], "earlier checkouts"] = (),
    methods: Words = tuple(METHODS),
    layers: int = 12,
    whole: Annotated[bool, "a small model and the kernels, as they are"] = False,
    passes: Annotated[int, "of one turn"] = 48,
    reps: Annotated[int, "turns"] = 25,
) -> Rows:
    how = str(layers), "whole" if whole else "hollow"
    roots = [*(root.resolve() for root in before), ROOT]
    checkouts = {root: Checkout(root, "tests/bench/overhead.py", "--worker", str(root), *how) for root in roots}
    for method in methods:
        sides = {str(root): partial(one.measure, method, passes) for root, one in checkouts.items()}
        for turns, one in zip(in_turns(sides, reps).values(), checkouts.values(), strict=True):
            yield {"method": method, "commit": one.commit, **summed(turns)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:  # its checkout, layers, and what is measured
        work(int(sys.argv[3]), hollow=sys.argv[4] == "hollow")
    else:
        overhead.main()
