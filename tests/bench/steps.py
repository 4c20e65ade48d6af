"""Answers by steps beside plain ones: tokens a second, steps accepted, and lines of the demo's summaries that differ.

    python tests/bench/steps.py [--model demo] [--draft demo] [--n 4] [--ctx 1024] [--new 160] [--out FILE]

Summaries of generated reports, greedy, one thread; sides take turns. *lines lost*: of those that plain decoding writes,
the share that the other text does not have. *like*: of the tokens of both, the share in common, in order. The drafting
model is the model itself unless another is named: then nothing can be gained, and what steps cost shows. *tokens*: the
same model drafts token by token (`spec.method = "model"`), which changes no text.
"""

from __future__ import annotations

import os
import sys
import time
from difflib import SequenceMatcher
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import torch

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import assemble, load
from kvcli.bench.workloads import prompt_of
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import run_to_end
from kvcli.engine.sequence.sampler import Sampler
from kvcli.environment import Paths
from kvcli.methods.steps.lookahead_reasoning import LookaheadReasoning
from kvcli.methods.steps.step_writer import Writer
from kvcli.methods.steps.step_writer import ends as step_ends
from kvcli.models.catalog import stands_for
from tests import make
from tests.bench.harness import Rows, measurement, quotients

SIDES: dict[str, dict[str, Any]] = {
    "exact": {"judge": "exact"},
    "alike 0.9": {"alike": 0.9},
    "alike 0.7": {"alike": 0.7},
    "likely 0.5": {"judge": "likely"},
    "likely, alpha 0.1": {"judge": "likely", "alpha": 0.1, "audit": 2},
}


def timed(model: Any, ids: list[int], new: int, draft: LM | None, writer: Writer | None) -> tuple[list[int], float]:
    """The answer, and seconds of writing it; what both models read before is not in them."""
    spec = {"method": "model", "model": "draft", "working": 0, "prefill": "full", "copies": False}
    tokens = model.profile.replace(spec=spec)
    pair = ModelPair(model.lm, draft) if draft is not None else None
    session = assemble.session(model.lm, tokens if pair is not None else model.profile, pair=pair)
    session.start_answer(ids, Sampler())
    while run_to_end(session.prefill_chunk(ids)):
        pass
    if writer is not None:
        its = writer._draft
        its.rewind(0)
        its.start_answer(ids, Sampler())
        while run_to_end(its.prefill_chunk(ids)):
            pass
    stop, began = model.lm.stop_ids, time.perf_counter()
    while (left := len(ids) + new - len(session.ids)) > 0 and session.ids[-1] not in stop:
        run_to_end(session.step(stop, left) if writer is None else writer.step(session, stop, left))
    return session.ids[len(ids) :], time.perf_counter() - began


@measurement(
    "{n} texts ({workload}) of {ctx:,} tokens by {model}, drafted by steps",
    schema="kvcli.bench.steps/1",
    note="In brackets: least and most of all texts.",
)
def steps(
    model: str = "demo",
    draft: Annotated[str, "as after -m; default: the model itself"] = "",
    ends: Annotated[str, "what ends a step"] = "line",
    workload: str = "summary",
    n: int = 4,
    ctx: int = 1024,
    new: int = 160,
) -> Rows:
    torch.set_num_threads(1)
    data = Paths.of(os.environ).data
    target = load(stands_for(model, data), "exact", offline=True)
    drafting = load(stands_for(draft or model, data), "exact", offline=True).lm
    words = target.tokenizer
    found: dict[str, list[dict[str, float]]] = {"plain": [], "tokens": [], **{side: [] for side in SIDES}}
    writers = {
        side: Writer(
            LookaheadReasoning(**settings, ends=ends),
            make.session(drafting),
            step_ends(words, ends),
        )
        for side, settings in SIDES.items()
    }
    for seed in range(n):
        ids = prompt_of(workload, {}, words, target.lm.vocab, ctx, seed=seed)
        want, took = timed(target, ids, new, None, None)
        lines = words.decode(want).strip().splitlines()
        found["plain"].append({"rate": len(want) / took})
        for side in list(found)[1:]:
            got, took = timed(target, ids, new, drafting if side == "tokens" else None, writers.get(side))
            its = words.decode(got).strip().splitlines()
            lost = sum(line not in its for line in lines) / len(lines)
            like = SequenceMatcher(None, want, got, autojunk=False).ratio()
            found[side].append({"rate": len(got) / took, "lost": lost, "like": like})
            assert side not in ("tokens", "exact") or got == want, "the same steps are not the same text"
    for side, runs in found.items():
        rates = [[run["rate"] for run in each] for each in (runs, found["plain"])]
        row: dict[str, Any] = {"judge": side, "tok/s": round(median(rates[0]), 1), "times plain": quotients(*rates, 2)}
        if (writer := writers.get(side)) is not None:
            row["steps"] = writer.drafted
            row["accepted"] = round(writer.accepted / max(1, writer.drafted), 2)
            row["word for word"] = round(writer.same / max(1, writer.drafted), 2)
            row["threshold"] = round(writer.judge.threshold, 2)
        if side != "plain":
            row |= {"lines lost": round(fmean(run["lost"] for run in runs), 2)}
            row |= {"like": round(fmean(run["like"] for run in runs), 2)}
        yield row
    return {"columns": list(row)}


if __name__ == "__main__":
    steps.main()
