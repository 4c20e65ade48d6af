"""Answers by steps beside plain ones: tokens a second, steps accepted, and lines of the demo's summaries that differ.

    python tests/bench/steps.py [--model demo] [--draft demo] [--n 4] [--ctx 1024] [--new 160] [--out FILE]

Summaries of generated reports, greedy, one thread; sides take turns. *lines lost*: of those that plain decoding writes,
the share that the other text does not have. *like*: of the tokens of both, the share in common, in order. The drafting
model is the model itself unless another is named: then nothing can be gained, and what steps cost shows. *tokens*: the
same model drafts token by token (`spec.method = "model"`), which changes no text. Prints JSON last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli import assemble, load
from kvcli.bench.workloads import prompt_of
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import run_to_end
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.environment import Paths
from kvcli.kv.tiers.dense import Dense
from kvcli.methods.drafts.off import Off
from kvcli.methods.steps.lookahead_reasoning import LookaheadReasoning
from kvcli.methods.steps.step_writer import Writer, ends
from kvcli.models.fetch import stands_for
from tests.bench.harness import machine

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default="", help="as after -m; default: the model itself")
    parser.add_argument("--ends", default="line", help="what ends a step")
    parser.add_argument("--workload", default="summary")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--new", type=int, default=160)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = Paths.of(os.environ).data
    model = load(stands_for(args.model, data), "exact", offline=True)
    draft = load(stands_for(args.draft or args.model, data), "exact", offline=True).lm
    words = model.tokenizer
    found: dict[str, list[dict[str, float]]] = {"plain": [], "tokens": [], **{side: [] for side in SIDES}}
    writers = {
        side: Writer(
            LookaheadReasoning(**settings, ends=args.ends),
            GenerationSession(draft, Dense(draft.shapes, draft.dtype, draft.device), Off(), Sampler()),
            ends(words, args.ends),
        )
        for side, settings in SIDES.items()
    }
    for seed in range(args.n):
        ids = prompt_of(args.workload, {}, words, model.lm.vocab, args.ctx, seed=seed)
        want, seconds = timed(model, ids, args.new, None, None)
        lines = words.decode(want).strip().splitlines()
        found["plain"].append({"rate": len(want) / seconds})
        for side in list(found)[1:]:
            by_tokens = draft if side == "tokens" else None
            got, seconds = timed(model, ids, args.new, by_tokens, writers.get(side))
            its = words.decode(got).strip().splitlines()
            found[side].append(
                {
                    "rate": len(got) / seconds,
                    "lost": sum(line not in its for line in lines) / len(lines),
                    "like": SequenceMatcher(None, want, got, autojunk=False).ratio(),
                }
            )
            assert side not in ("tokens", "exact") or got == want, "the same steps are not the same text"
    rows = []
    for side, runs in found.items():
        row: dict[str, Any] = {"judge": side, "tok/s": round(statistics.median(run["rate"] for run in runs), 1)}
        times = [run["rate"] / plain["rate"] for run, plain in zip(runs, found["plain"], strict=True)]
        row["times plain"] = [round(x, 2) for x in (min(times), statistics.median(times), max(times))]
        if (writer := writers.get(side)) is not None:
            row["steps"] = writer.drafted
            row["accepted"] = round(writer.accepted / max(1, writer.drafted), 2)
            row["word for word"] = round(writer.same / max(1, writer.drafted), 2)
            row["threshold"] = round(writer.judge.threshold, 2)
        if side != "plain":
            row["lines lost"] = round(statistics.mean(run["lost"] for run in runs), 2)
            row["like"] = round(statistics.mean(run["like"] for run in runs), 2)
        rows.append(row)
        print(row)
    by = args.draft or f"{args.model} itself"
    given = " ".join(f"--{name} {getattr(args, name)}" for name in ("model", "workload", "ends", "n", "ctx", "new"))
    given += f" --draft {args.draft}" if args.draft else ""
    result = {
        "schema": "kvcli.bench.steps/1",
        "title": f"{args.n} texts ({args.workload}) of {args.ctx:,} tokens by {args.model}, steps of {by}",
        "machine": ", ".join(f"{key} {value}" for key, value in machine().items()),
        "command": f"python tests/bench/steps.py {given}",
        "columns": list(rows[-1]),
        "rows": rows,
        "note": "In brackets: least and most of all texts.",
    }
    text = json.dumps(result)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
