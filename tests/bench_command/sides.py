"""Sides that take the time they are told to, and a benchmark of them: no model, no real clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcli.bench.measure import Case, measure
from kvcli.bench.run import Bench, BenchRequest
from kvcli.bench.side import TimedSample
from kvcli.bench.side_factory import Recipe
from kvcli.engine.stats import Stats
from kvcli.errors import KvcliError
from kvcli.schemas.bench import BenchArgs, BenchDocument
from tests.fake_model import fake_info

FIRST = 0.5  # seconds to the first token


@dataclass
class Paced:
    """Writes the tokens of `text` at `speeds` tokens a second, one speed for each run, then from the start."""

    name: str
    speeds: Sequence[float]
    text: Sequence[int] = tuple(range(8, 40))
    log: list[str] = field(default_factory=list)
    drafts: bool = False
    fails: int | None = None  # the run that fails, from 0
    interrupted: int | None = None  # the run in which Ctrl-C is pressed
    runs: int = 0
    setup: dict[str, str] = field(default_factory=dict)
    peak_bytes: int | None = None

    def run(self, prompt: Sequence[int], new: int) -> TimedSample:
        self.log.append(self.name)
        speed = self.speeds[self.runs % len(self.speeds)]
        self.runs += 1
        if self.runs - 1 == self.interrupted:
            raise KeyboardInterrupt
        if self.fails is not None and self.runs > self.fails:
            raise KvcliError("it broke", lines=["as told"])
        at = tuple(FIRST + i / speed for i in range(new))
        stats = drafted(new) if self.drafts else None
        return TimedSample(tuple(self.text[:new]), at, len(prompt), 1000, stats)

    def close(self) -> None:
        pass


def drafted(new: int) -> Stats:
    """Passes of one and of four tokens in turn, the last cut to what is left."""
    stats = Stats(new=new)
    left = new
    while left:
        gave = min(4 if stats.passes % 2 else 1, left)
        left -= gave
        stats.passes += 1
        if gave > 1:
            stats.drafted_passes += 1
            stats.draft_tokens += 5
            stats.accepted_tokens += gave - 1
            stats.histogram.extend([0] * (gave - len(stats.histogram)))
            stats.histogram[gave - 1] += 1
    return stats


def args(**changes: Any) -> BenchArgs:
    facts: dict[str, Any] = {
        "model": "demo", "profiles": [], "vary": [], "baselines": [], "ctx": [64], "new": 11, "reps": 3, "warmup": 1,
        "workloads": ["summary"], "interleave": True, "memory": False, "quality": "agree", "seed": 0, "set": [],
        "fail_if": [],
    }  # fmt: skip
    return BenchArgs(**(facts | changes))


def recipe(name: str, drafts: bool = False) -> Recipe:
    settings = {"exactness": "exact", "spec.method": "ngram" if drafts else "off"}
    return Recipe(name, "profile", "", settings, name, "")


def measured(sides: Sequence[Paced], **changes: Any) -> Bench:
    """The sides measured, the first one as the baseline; memory and near ties left out."""
    earlier = {key: changes.pop(key) for key in ("earlier", "earlier_name") if key in changes}
    ask = BenchRequest(args(**changes), [recipe(side.name, side.drafts) for side in sides], {}, **earlier)
    bench = Bench(ask, None, {}, lambda *_: None, load_before=None)  # type: ignore[arg-type]  # nothing is loaded
    bench.info, bench.stops = fake_info(), {39}
    bench.setups = {side.name: side.setup for side in sides}
    new, crossed = ask.args.new, [(ctx, workload) for ctx in ask.args.ctx for workload in ask.args.workloads]
    cases = [Case(ctx, workload, tuple(range(ctx - new)), new) for ctx, workload in crossed]
    measure(sides, cases, ask.plan, bench.series, lambda *_: None)
    bench.complete = True
    return bench


def document(sides: Sequence[Paced], **changes: Any) -> BenchDocument:
    from kvcli.bench.document import document_of

    return document_of(measured(sides, **changes))
