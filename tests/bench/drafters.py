"""Every drafter on the same tasks against plain decoding: all sides interleaved in one run, plain decoding first.

    python tests/bench/drafters.py [--reps 2] [--tasks lookup,...] [--models demo,demo-wide] [--sides A,B]

  lookup   questions about a report, for which 4,000 tokens are read
  summary  that report's findings in a list
  copy     notes of the report, word for word
  free     the report itself, continued from where 4,000 tokens of it end

Any other model (`--models smollm2-135m`) gets short requests: `open` questions, `list` (a text to repeat), `short` (one
to summarise), `code` and `french` (one to translate); none is among those that heads are trained on.
`demo` is the bundled model, `demo-wide` the same function at the cost of 150M parameters (tests/bench/widened.py); both
are drafted for by `demo-small`. The prompt is read once and taken over by every session, each of which drafts knowing
nothing, but for self-knn, which remembers texts. All sides write as many tokens as plain decoding does until it stops,
and the same tokens (over codes of 8 bits those of plain decoding over them), or the run fails.
`--head`: an EAGLE-3 head for all of the models, trained by tests/bench/eagle3.py, for the sides of that name.
Draft time is what a drafter takes before and after a pass, its own passes included, verify time the rest of a step.
Times are from the first token to the last.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.assemble import is_lossless
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.forward_request import await_passes
from kvcli.engine.stats import Stats
from kvcli.kv.slots import nbytes
from kvcli.prefix_cache.prefix_cache import PrefixCache
from tests.bench.fafo import looked_at
from tests.bench.harness import Floats, Row, Rows, Words, measurement, once, picked, quotients
from tests.bench.widened import write

PLAIN = "plain"
SMALL, HEAD, TARGET = "demo-small", "HEAD", "TARGET"
ALL = {"working": 0, "prefill": "full"}
ALWAYS = {"adaptive": False, "depth": 4, "branches": 1}
ITSELF = {"method": "self", "copies": False}
EIGHT = "plain-halves"  # plain decoding over codes of 8 bits
# a profile and what is changed of it: a further drafter is a further line
SIDES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    PLAIN: ("exact", {}),
    "ngram": ("ngram", {}),
    "lookahead": ("lookahead", {}),
    "suffix": ("exact", {"spec": {"method": "mix", "sources": ["prompt-lookup"]}}),
    "recycle": ("exact", {"spec": {"method": "mix", "sources": ["token-recycling"]}}),
    "stand": ("exact", {"spec": {"method": "mix", "sources": ["stand"]}}),
    "fafo": ("fafo", {}),
    "small": ("draft", {"spec": {"model": SMALL, "copies": False}}),
    "small-full": ("draft", {"spec": {"model": SMALL, "copies": False, **ALL}}),
    "small+copies": ("draft", {"spec": {"model": SMALL}}),
    "mix+small": ("draft", {"spec": {"model": SMALL, "sources": ["stand", "token-recycling"]}}),
    "specextend": ("specextend", {"spec": {"model": SMALL, "copies": False}}),
    "specextend-every": ("specextend", {"spec": {"model": SMALL, "copies": False, "retrieval": "every:8"}}),
    "eagle3": ("exact", {"spec": {"method": "eagle3", "model": HEAD, "copies": False}}),
    "eagle3+copies": ("exact", {"spec": {"method": "eagle3", "model": HEAD}}),
    # what drafts are worth where the clock would allow none
    "eagle3-always": ("exact", {"spec": {"method": "eagle3", "model": HEAD, "copies": False, **ALWAYS}}),
    "small-always": ("draft", {"spec": {"model": SMALL, "copies": False, **ALWAYS}}),
    "specextend-always": ("specextend", {"spec": {"model": SMALL, "copies": False, **ALWAYS}}),
    "small-full-always": ("draft", {"spec": {"model": SMALL, "copies": False, **ALWAYS, **ALL}}),
    # the model itself in 4 bits
    "int4": ("draft", {"spec": {"model": TARGET, "quant": "int4", "copies": False}}),
    "int4-always": ("draft", {"spec": {"model": TARGET, "quant": "int4", "copies": False, **ALWAYS}}),
    # the model itself, over less of the past, by fewer layers, and over the upper half of codes of 8 bits
    "self": ("exact", {"spec": {**ITSELF, "view": "stream"}}),
    "self-view-always": ("exact", {"spec": {**ITSELF, **ALWAYS, "view": "stream"}}),
    **{
        f"self-{skip}-always": ("exact", {"spec": {**ITSELF, **ALWAYS, "skip": skip}})
        for skip in ("swift", "clasp", "knn", "early")
    },
    EIGHT: ("balanced", {"spec": {"method": "off"}, "kv": {"split_codes": True}}),
    "self-halves-always": ("balanced", {"spec": {**ITSELF, **ALWAYS}, "kv": {"split_codes": True}}),
    # drafts over what a lossy profile keeps, verified over the full KV cache
    "snap-checked": ("snap", {"exactness": "exact", "spec": ITSELF}),
    **{
        f"{name}-checked-always": (name, {"exactness": "exact", "spec": {**ITSELF, **ALWAYS}})
        for name in ("snap", "lean", "streaming")
    },
}
TEXT_OF = {EIGHT: EIGHT, "self-halves-always": EIGHT}  # side -> the one whose text it has, where that is not `plain`
READ = 4_000  # tokens of the prompt, about
NEW = {"demo": {"free": 160, "": 400}, "demo-wide": {"free": 48, "": 72}}  # tokens written at most
ASKED = {"demo": 4, "demo-wide": 2}  # lookups and notes
SHORT = 96  # tokens written at most in answer to a request
NOTE = (
    "The ferry to the island leaves at nine in the morning and at four in the afternoon. In winter there is only the "
    "morning ferry. Tickets are sold on board, and bicycles travel free. If the wind is strong, the captain may decide "
    "not to leave; a yellow flag on the pier then says so."
)
REQUESTS = {
    "open": ("What makes a good neighbour?", "Why do people keep old photographs?", "How should I plan a birthday?"),
    "list": (f"Repeat this text: {NOTE}", "Repeat this list: nine pears, four lemons, two melons, six plums, one fig."),
    "short": (f"Summarize: {NOTE}", f"When does the ferry not leave? {NOTE}"),
    "code": ("Write a Python function that adds two numbers.", "Write a Python loop that prints the squares up to 9."),
    "french": (f"Translate to French: {NOTE}", "Translate to French: The small boat is on the lake this evening."),
}


@dataclass
class Task:
    """Prompts for one model, and how many tokens each of them is continued by."""

    name: str
    prompts: list[list[int]]
    new: list[int] = field(default_factory=list)


class Timed:
    """A drafter that keeps the time it takes, the passes it asks for among it."""

    def __init__(self, drafter: Any) -> None:
        self._drafter, self.seconds = drafter, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, *of: Any) -> Any:
        return self._clocked(self._drafter.propose(*of))

    def observe(self, step: Any) -> Any:
        began = time.perf_counter()
        found = self._drafter.observe(step)
        self.seconds += time.perf_counter() - began
        return None if found is None else self._clocked(found)

    def _clocked(self, found: Any) -> Any:
        began = time.perf_counter()
        done = yield from await_passes(found)
        self.seconds += time.perf_counter() - began
        return done


@dataclass
class Run:
    """What one side did with all prompts of a task, once."""

    texts: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0  # from the first tokens to the last
    timed: int = 0  # tokens that came in them
    drafting: float = 0.0  # seconds of drafting, and of all steps
    decode: float = 0.0
    nbytes: int = 0  # of keys and values and what drafts beside them
    stats: Stats = field(default_factory=Stats)

    def write(self, model: kvcli.Model, prompt: Sequence[int], new: int, prefix_cache: PrefixCache) -> None:
        session = model.new_session()
        if is_lossless(model.profile):  # else it is read as that profile reads it
            prefix_cache.load_prefix(session, prompt)
        run_to_end(session.read(prompt[len(session.ids) :]))
        timed = session.drafter = Timed(session.drafter)
        began = None
        for step in iterate_events(session.stream(new)):
            now = time.perf_counter()
            self.stats.add_step(step)
            if began is None:
                began = now
            else:
                self.timed += len(step.new)
        self.seconds += time.perf_counter() - (began or 0.0)
        self.drafting += timed.seconds
        self.nbytes = sum(nbytes(session.cache, session.view, session.drafter).values())
        self.texts.append(session.ids[len(prompt) :])


def tasks_of(model: kvcli.Model, of: str, names: Sequence[str]) -> list[Task]:
    from tests.demo_model.example import example_report

    if of not in NEW:
        return [Task(name, [model.encode(one) for one in REQUESTS[name]]) for name in names]
    report = example_report()
    text = model.tokenizer.decode(model.tokenizer.encode(report.text)[: READ - 40])
    facts = [fact for fact in report.facts if fact.sentence in text]
    notes = [note for note in report.notes if note.paragraph in text]

    def asked_for(questions: Sequence[str]) -> list[list[int]]:
        return [model.encode(f"{text}\n\n{question}") for question in questions]

    def some(things: Sequence[Any]) -> Sequence[Any]:
        return things[:: max(1, len(things) // ASKED[of])][: ASKED[of]]

    found = {
        "lookup": asked_for([f"What is the {fact.attribute} of {fact.entity}?" for fact in some(facts)]),
        "summary": asked_for(["Summarise the main findings."]),
        "copy": asked_for([f"Repeat field note {note.section}." for note in some(notes)]),
        "free": [model.encode(report.text)[:READ]],
    }
    return [Task(name, found[name]) for name in names]


def side_of(model: kvcli.Model, side: str, temperature: float, head: str = "") -> kvcli.Model:
    profile, changes = SIDES[side]
    if (named := changes.get("spec", {}).get("model")) in (HEAD, TARGET):
        changes = {"spec": changes["spec"] | {"model": head if named == HEAD else model.info.path}}
    of = kvcli.Profile.load(profile).replace(**changes)
    sample = {"temperature": temperature, "seed": 1}
    return model.with_profile(of.replace(sample=sample, name=side))


def measure(
    model: kvcli.Model,
    of: str,
    task: Task,
    temperature: float,
    sides: Sequence[str],
    reps: int,
    prefix_cache: PrefixCache,
    head: str,
) -> list[Row]:
    task.new = task.new or lengths(model, of, task, prefix_cache)
    models = {side: side_of(model, side, temperature, head) for side in sides}
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for rep in range(reps + 1):  # the first warms up, with few tokens
        others = [side for side in sides if side != PLAIN]
        for side in (PLAIN, *others[rep:], *others[:rep]):  # who comes after whom changes
            run = Run()
            for prompt, n in zip(task.prompts, task.new, strict=True):
                run.write(models[side], prompt, n if rep else 9, prefix_cache)
            if rep:
                runs[side].append(run)
    plain, own = runs[PLAIN], {side: runs[TEXT_OF.get(side, PLAIN)] for side in sides}
    return [row(of, task, temperature, side, runs[side], plain, own[side][0].texts) for side in sides]


def row(
    of: str, task: Task, temperature: float, side: str, runs: list[Run], plain: list[Run], texts: list[list[int]]
) -> dict[str, Any]:
    per = [run.seconds / run.timed for run in runs]
    base = [run.seconds / run.timed for run in plain]
    stats = runs[0].stats
    depth = stats.per_position
    return {
        "model": of,
        "task": task.name,
        "temperature": temperature,
        "side": side,
        "tokens": stats.new,
        "speedup": quotients(base, per),
        "tokens_s": round(1 / median(per), 1),
        "accepted": round(stats.acceptance_rate, 3) if stats.draft_tokens else None,
        "accepted_first": round(depth[0], 3) if depth else None,
        "drafted_passes": round(stats.drafted_share, 3),
        "accepted_length": round(stats.mean_acceptance_length, 2) if stats.draft_tokens else None,
        "tokens_a_pass": round(stats.tokens_per_pass, 2),
        "draft_ms_a_token": round(1000 * median(run.drafting / run.stats.new for run in runs), 3),
        "verify_ms_a_pass": round(
            1000 * median((run.stats.decode - run.drafting) / run.stats.passes for run in runs), 3
        ),
        "kib": round((runs[0].nbytes - plain[0].nbytes) / 1024),
        "same": all(run.texts == texts for run in runs),
    }


def lengths(model: kvcli.Model, of: str, task: Task, prefix_cache: PrefixCache) -> list[int]:
    """Tokens until plain greedy decoding stops; what it has read is kept for all."""
    most, found = NEW[of].get(task.name, NEW[of][""]) if of in NEW else SHORT, []
    for prompt in task.prompts:
        session = side_of(model, PLAIN, 0.0).new_session()
        prefix_cache.load_prefix(session, prompt)
        run_to_end(session.read(prompt[len(session.ids) :]))
        prefix_cache.save(session)
        stop = () if task.name == "free" else model.lm.stop_ids
        list(iterate_events(session.stream(most, stop)))
        found.append(max(8, len(session.ids) - len(prompt)))
    return found


@measurement(
    "Each drafter at each task; tokens/s and times are medians, accepted shares are of draft tokens",
    schema="kvcli.bench.drafters/1",
    is_right=lambda rows: all(row["same"] for row in rows),
)
def drafters(
    reps: int = 2,
    tasks: Words = ("lookup", "summary", "copy", "free"),
    temperatures: Floats = (0, 0.8),
    models: Words = ("demo", "demo-wide"),
    sides: Words = tuple(side for side in SIDES if "eagle3" not in side),
    head: Annotated[str, "folder of an EAGLE-3 head"] = "",
) -> Rows:
    asked = picked(sides, SIDES)
    chosen = [side for side in SIDES if side in {PLAIN, *asked, *(TEXT_OF.get(side, PLAIN) for side in asked)}]
    with tempfile.TemporaryDirectory() as folder:
        if "demo-wide" in models:
            write(Path(folder, "demo-wide"))
        for of in models:
            model = looked_at(kvcli.load(str(Path(folder, of)) if of == "demo-wide" else of, profile="exact"))
            prefix_cache = PrefixCache(Path(folder, f"kept-{of}"), 1 << 33, model.lm, min_work=0)
            for task in tasks_of(model, of, tasks):
                for temperature in temperatures:
                    rows = partial(measure, model, of, task, temperature, chosen, reps, prefix_cache, head)
                    yield from once(f"{of} {task.name} {float(temperature)} {chosen}", rows)


if __name__ == "__main__":
    drafters.main()
