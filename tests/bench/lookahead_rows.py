"""Do lookahead rows earn what they cost? Tokens a pass on a real model, and what the rows of its passes take.

    python tests/bench/lookahead_rows.py [--model smollm2-135m] [--texts prose,code] [--ctx 1024]
        [--new 48] [--only counts|times|all] [--resume FILE] [--out FILE]

counts  Tokens and rows of a pass by setting, every source in every pass (adaptive off), greedy. They do not depend on
        the machine: `--resume FILE` keeps them for the other parts.
cost    Milliseconds of a pass with so many rows behind `--ctx` tokens, over those of a pass with one row.
speed   A few settings against plain decoding, sides in turns, everything included: as profiles run them, where a source
        that does not pay is paused, and one in every pass.

"break even" is the time of a pass with the setting's rows, in plain passes: a setting gains where it writes more tokens
a pass than that. "expected" is their quotient, what speed the counts allow (modelled). Rows are rounded to those timed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from kvcli import load
from kvcli.bench.profile_side import ProfileSide
from kvcli.bench.workloads import prompt_of
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.environment import Paths
from kvcli.fit.calibrate import cache_of_length
from kvcli.fit.calibrate import once as one_pass
from kvcli.models.catalog import stands_for
from tests.bench.fafo import looked_at
from tests.bench.harness import Rows, Words, in_turns, measurement, once, quotients, ran

Table = dict[str, Any]

VIEW: Table = {"view": "stream", "sinks": 16, "recent": 496}
ALONE: Table = {"method": "lookahead", "view": "all"}
COPIES, LOGITS, SCOUTS = "prompt-lookup", ["stand", "token-recycling"], "lookahead"


def mix(*sources: str, **more: Any) -> Table:
    return {"method": "mix", "sources": sources, **(VIEW if SCOUTS in sources else {}), **more}


SETTINGS: Mapping[str, Table] = {
    "scouts, 3-grams, window 4": ALONE,
    "scouts over a view": ALONE | VIEW,
    "scouts over a view of 16 + 112": ALONE | VIEW | {"recent": 112},
    "scouts over a view, window 1": ALONE | VIEW | {"window": 1},
    "scouts over a view, window 8": ALONE | VIEW | {"window": 8},
    "scouts over a view, 5-grams": ALONE | VIEW | {"ngram": 5},
    "copies": mix(COPIES),
    "copies, scouts": mix(COPIES, SCOUTS),
    "copies, recycled logits": mix(COPIES, *LOGITS),
    "copies, recycled logits, scouts": mix(COPIES, *LOGITS, SCOUTS),
}
EVERY = "scouts over a view, every pass"
PACED = ("scouts over a view", "copies", "copies, scouts", "copies, recycled logits", "copies, recycled logits, scouts")
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)


def stored(model: Any, prompt: Sequence[int]) -> list[tuple[int, Any, Any, int]]:
    """The KV of a prompt but its last token, computed once for all settings."""
    session = model.new_session()
    run_to_end(session.read(list(prompt)))
    return [(at, kv.k.clone(), kv.v.clone(), 0) for at in model.lm.storing for kv in [session.cache.slots(at)]]


def counted(model: Any, table: Table, prompt: Sequence[int], past: Any, new: int) -> dict[str, float]:
    """Tokens, passes and rows of one continuation."""
    session = model.with_profile(model.profile.replace(spec={**table, "adaptive": False})).new_session()
    session.adopt(list(prompt), len(prompt) - 1, past())
    run_to_end(session.prefill_chunk(list(prompt)))  # nothing is left to prefill; the drafter is told of the prompt
    steps = list(iterate_events(session.stream(new)))
    return {"new": sum(len(s.new) for s in steps), "passes": len(steps), "rows": sum(s.rows.n_rows for s in steps)}


def times(model: Any, context: int, reps: int) -> dict[str, float]:
    """Seconds of a pass with so many rows."""
    kv = cache_of_length(model.lm, context)
    found = in_turns({str(rows): partial(one_pass, model.lm, kv, rows, context) for rows in ROWS}, reps)
    return {rows: median(took) for rows, took in found.items()}


def cost(took: Mapping[str, float], rows: float) -> float:
    """The time of a pass with so many rows, in passes with one row, between two that were timed."""
    for a, b in pairwise(ROWS):
        if rows <= b:
            share = (rows - a) / (b - a)
            return (took[str(a)] * (1 - share) + took[str(b)] * share) / took["1"]
    return took[str(ROWS[-1])] / took["1"] * rows / ROWS[-1]


def timed(model: Any, prompt: Sequence[int], new: int, reps: int) -> dict[str, list[float]]:
    """Seconds of a token behind the first, by side and repetition."""
    tables: Mapping[str, Table] = {"plain": {"method": "off"}, **{name: SETTINGS[name] for name in PACED}}
    tables = {**tables, EVERY: SETTINGS["scouts over a view"] | {"adaptive": False}}
    sides = {
        name: ProfileSide(name, looked_at(model.with_profile(model.profile.replace(spec=table))), 1)
        for name, table in tables.items()
    }
    found = in_turns({name: partial(side.run, prompt, new) for name, side in sides.items()}, reps, warmup=0)
    return {name: [1 / done.tok_s for done in each] for name, each in found.items()}


@measurement(
    "{model}, {new} tokens behind {ctx}: what lookahead rows bring, and what they cost",
    note="Texts: {texts}. Counts of all texts together; expected: tokens a pass over break even (modelled).",
)
def lookahead_rows(
    model: str = "smollm2-135m",
    texts: Words = ("prose", "code"),
    ctx: int = 1024,
    new: int = 48,
    only: Annotated[Literal["counts", "times", "all"], "what is measured now"] = "all",
    reps: int = 1,
) -> Rows:
    loaded = load(stands_for(model, Paths.of(os.environ).data), "exact")
    ran(loaded.lm)
    prompts = {name: prompt_of(name, {}, loaded.tokenizer, loaded.lm.vocab, ctx) for name in texts}
    has_counts, has_times = only != "times", only != "counts"
    took = once(f"cost {model} {ctx}", partial(times, loaded, ctx, 9)) if has_times else {}
    speeds: dict[str, dict[str, list[float]]] = {}
    for text, prompt in prompts.items() if has_times else ():
        speeds[text] = once(f"speed {model} {ctx} {new} {text}", partial(timed, loaded, prompt, new, reps))
    past = {text: cache(partial(stored, loaded, prompt)) for text, prompt in prompts.items()}
    for name, table in SETTINGS.items():
        row: dict[str, Any] = {"setting": name}
        if has_counts:
            found = {
                text: once(
                    f"{model} {ctx} {new} {text} {name}", partial(counted, loaded, table, prompt, past[text], new)
                )
                for text, prompt in prompts.items()
            }
            of_all = {key: sum(of[key] for of in found.values()) for key in ("new", "passes", "rows")}
            row["tokens a pass"] = round(of_all["new"] / of_all["passes"], 3)
            row |= {text: round(of["new"] / of["passes"], 3) for text, of in found.items()}
            row["rows"] = round(of_all["rows"] / of_all["passes"], 1)
        if has_counts and has_times:
            row["break even"] = round(cost(took, row["rows"]), 3)
            row["expected"] = round(row["tokens a pass"] / row["break even"], 3)
        if has_times:
            row["speed"], row["every pass"] = gain(speeds, name), gain(speeds, f"{name}, every pass")
        if has_counts or name in PACED:
            yield row
    if not took:
        return None
    passes = {rows: round(of / took["1"], 2) for rows, of in took.items()}
    note = ", ".join(f"{rows} rows {of}" for rows, of in passes.items())
    note = f"Texts: {', '.join(texts)}, spreads over them. A pass behind {ctx:,} tokens, in passes of one row: {note}."
    return {"cost": passes, "plain ms": round(1000 * took["1"], 2), "note": note}


def gain(speeds: Mapping[str, Mapping[str, list[float]]], side: str) -> list[float] | None:
    """Times the speed of plain decoding, text by text; None if the side was not timed."""
    pairs = [(median(of["plain"]), median(of[side])) for of in speeds.values() if side in of]
    return quotients(*zip(*pairs, strict=True), 3) if pairs else None


if __name__ == "__main__":
    lookahead_rows.main()
