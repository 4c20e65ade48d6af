"""The paper profiles of the four systems on a real model, beside what their papers say, and why that differs.

    python tests/bench/paper_profiles.py [--model smollm2-135m] [--profiles fafo-paper,lazy-paper]
        [--only texts|lookups] [--resume FILE] [--out FILE]

texts    Texts that are gone on with, `exact` and the profile in turns: times the speed of reading and of a token,
         tokens and rows of a pass, and whether the text is that of `exact`.
lookups  Lookups of the quality suite, right with the profile and with `exact`, for profiles that may change the answer.

With `--resume FILE` both may be measured apart, profile by profile; the last run, of everything, prints all of them.
SmolLM2 has no smaller sibling, so under `specextend-paper` it drafts for itself over the kept chunks: what is accepted
is what the small cache leaves of perfect drafts, and cannot be faster. A figure of a paper is that of its abstract or
table, as `PAPERS` says.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import Profile, load
from kvcli.bench.workloads import prompt_of
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.sequence.sampler import Sampler
from kvcli.environment import Paths
from kvcli.models.catalog import stands_for
from kvcli.models.text import decode
from tests.bench.harness import Rows, Words, in_turns, measurement, once, quotients, ran
from tests.bench.kv_quality import kept
from tests.bench.prune_asked import Asked, lookups


@dataclass(frozen=True)
class Paper:
    """What a paper says of its method, and why the figures here are others."""

    speed: str
    quality: str
    why: str
    tokens: int = 1024  # of the prompts here
    lookups: bool = False  # the answers may change


PAPERS = {
    "fafo-paper": Paper(
        "1.20–2.71 (7B and 8B, A100)",
        "the same text",
        "a row costs a sixth to a quarter of a pass on a CPU, and almost nothing on a card that waits for memory",
    ),
    "specextend-paper": Paper(
        "2.65 (Vicuna-7B and 68M, A100, 16K)",
        "the same text; 3.07 tokens a pass",
        "no smaller model drafts: a drafted token costs as much as a written one, a hundredth in the paper",
        tokens=3072,
    ),
    "lazy-paper": Paper(
        "2.34 to the first token (Llama-2-7B, A100)",
        "22.31 of 22.43",
        "attention over a short prompt is little of a pass; each token of an answer takes a pass of its own to select",
        tokens=600,
        lookups=True,
    ),
    "fastgen-paper": Paper(
        "1.06 (7B, V100, 2,048 tokens)",
        "37.7% of answers are preferred, 50% = no loss; 60% kept (7B, T 0.95)",
        "1,024 rows are measured and heads compressed at each token: on a CPU more than a small KV cache saves",
        lookups=True,
    ),
}


def table_of(profile: str, itself: str) -> dict[str, Any]:
    """The changes to `exact` that the profile makes."""
    found = Profile.load(profile)
    changed = {key: value for key, value in found.written.items() if key.split(".")[0] in ("spec", "prune", "policy")}
    return {"exactness": found.exactness, **changed, **({"spec.model": itself} if "specextend" in profile else {})}


def answered(model: Any, ids: Sequence[int], new: int, stop: Any = ()) -> dict[str, Any]:
    """Seconds to the first token and of those behind it, the tokens, and the passes and rows that wrote them."""
    session = model.new_session()
    session.start_answer(list(ids), Sampler())
    began = time.perf_counter()
    run_to_end(session.read(list(ids)))
    steps, at = [], list[float]()
    for step in iterate_events(session.stream(new, stop)):
        steps.append(step)
        at.append(time.perf_counter() - began)
    said = [i for step in steps for i in step.new]
    behind = len(said) - len(steps[0].new)
    rows = sum(step.rows.n_rows for step in steps)
    found = {"first": at[0], "token": (at[-1] - at[0]) / max(1, behind), "said": said, "kept": kept(session)}
    return found | {"passes": len(steps), "rows": rows}


def right(model: Any, asked: Asked) -> dict[str, Any]:
    """Whether the answer to a lookup is right, and the share of the KV cache that was left."""
    assert asked.score is not None
    stop = model.lm.stop_ids
    found = answered(model, asked.ids, asked.new, stop)
    return {
        "right": asked.score(decode(model.tokenizer, [i for i in found["said"] if i not in stop])),
        "kept": found["kept"],
    }


@measurement(
    "{model} under the profiles of the papers, in multiples of `exact`",
    note="{new} tokens, texts: {texts}; lookups in prompts as long. Spreads are over texts.",
)
def paper_profiles(
    model: str = "smollm2-135m",
    profiles: Words = tuple(PAPERS),
    texts: Words = ("article",),
    new: int = 24,
    n: Annotated[int, "lookups of a kind"] = 1,
    only: Annotated[Literal["texts", "lookups", "all"], "what is measured now"] = "all",
) -> Rows:
    path = stands_for(model, Paths.of(os.environ).data)
    exact = load(path, "exact")
    ran(exact.lm)
    seen = set[str]()
    for name in profiles:
        paper, other = PAPERS[name], exact.with_profile(exact.profile.replace(**table_of(name, path)))
        prompts = {text: prompt_of(text, {}, exact.tokenizer, exact.lm.vocab, paper.tokens) for text in texts}
        row: dict[str, Any] = {"profile": name, "tokens": paper.tokens}
        if only in ("texts", "all"):
            pairs = []
            for text, ids in prompts.items():
                sides = {side: partial(answered, of, ids, new) for side, of in (("exact", exact), (name, other))}
                found = once(f"{name} {text} {new}", lambda sides=sides: in_turns(sides, 1, warmup=0))
                pairs.append((found["exact"][0], found[name][0]))
            for key, column in (("first", "first token"), ("token", "a token")):
                row[column] = quotients((a[key] for a, _ in pairs), (b[key] for _, b in pairs), 3)
            mine = [b for _, b in pairs]
            passes = sum(of["passes"] for of in mine)
            row["tokens a pass"] = round(sum(len(of["said"]) for of in mine) / passes, 2)
            row["rows a pass"] = round(sum(of["rows"] for of in mine) / passes, 1)
            row["same text"] = all(a["said"] == b["said"] for a, b in pairs)
            row["kept"] = round(fmean(of["kept"] for of in mine), 3)
        if paper.lookups and only in ("lookups", "all"):
            asked = list(lookups(exact, paper.tokens, n))
            found = {
                side: [
                    once(f"{side} {paper.tokens} {n} lookup {i}", partial(right, of, one))
                    for i, one in enumerate(asked)
                ]
                for side, of in (("exact", exact), (name, other))
            }
            counts = {side: sum(of["right"] for of in each) for side, each in found.items()}
            row["lookups"] = f"{counts[name]:g} of {len(asked)}, `exact` {counts['exact']:g}"
            row["kept"] = round(fmean(of["kept"] for of in found[name]), 3)
        seen |= row.keys()
        yield row | {"the paper: speed": paper.speed, "the paper: quality": paper.quality, "why it differs": paper.why}
    return {"columns": [name for name in COLUMNS if name in seen or name.startswith(("the paper", "why"))]}


COLUMNS = (
    "profile", "tokens", "first token", "a token", "tokens a pass", "rows a pass", "kept", "same text", "lookups",
    "the paper: speed", "the paper: quality", "why it differs",
)  # fmt: skip


if __name__ == "__main__":
    paper_profiles.main()
