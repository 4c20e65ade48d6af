"""FastGen from a prompt to its answer, with and without the head map that ships, and as published, at equal memory.

    python tests/bench/fastgen.py [--model demo] [--texts 6] [--length 2048] [--keep 0.25] [--reps 0] [--out FILE]

Four numbers are hidden in each text, and all are asked for when it has been read and compressed. `accuracy` is the
share of numbers that the likeliest tokens spell; `kl` is how far the predictions of their tokens are from those of the
full cache, in nats a token. FastGen without a map goes first; what it kept of that text is what the others get, the
published FastGen by the T at which its heads keep at least as much. A map whose heads need more than that keeps more.

`--reps` measures speed instead, sides in turns: `read` and `token` are the seconds that reading the first text and each
of `--new` tokens behind it take, over those of the full cache of the same turn (least, median, most).

`--question` measures instead whether the question should be protected: `--new` tokens that the full cache wrote behind
a report and a question are predicted again, in steps of a compression interval; `kl` is of those whose question is
older than the protected newest tokens.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import load
from kvcli.chat.transcript import chat_spans
from kvcli.demo.report import write_report
from kvcli.engine.engine import iterate_events, run, run_to_end
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.forward_request import Rows as PassRows
from kvcli.engine.sequence.state import QUESTION
from kvcli.environment import Paths
from kvcli.heads.ablate import answers
from kvcli.heads.sample import samples
from kvcli.models.catalog import stands_for
from kvcli.models.text import encode
from tests.bench.harness import Row, Rows, in_turns, measurement, once, quotients
from tests.bench.kv_quality import HELD_OUT, Text, answered, published

INTERVAL = 64  # tokens between two compression points
GUARD = 128  # newest tokens that FastGen protects anyway

Changes = dict[str, Any]


def fastgen(keep: float, **more: Any) -> Changes:
    return {"policy": {"name": "fastgen", "keep": keep, **more}}


def compared(model: Any, sample: Any, keep: float) -> dict[str, Row]:
    """What becomes of one text on all sides."""
    text = lru_cache(1)(lambda: Text(model, sample.context))
    truth: Any = None

    def answer(changes: Changes) -> tuple[Row, Any]:
        nonlocal truth
        row, session = answered(model, sample, changes, text())
        said = answers(session, sample)
        truth = said if truth is None else truth
        return row | {"kl": float((truth.exp() * (truth - said)).sum(-1).mean())}, session

    found = {"full cache": answer({})[0], "without a map": answer(fastgen(keep))[0]}
    kept = found["without a map"]["kept"]
    found["with its map"] = answer(fastgen(kept, headmap="shipped"))[0]
    found["as published"] = published(answer, kept)
    return found


def speed(model: Any, ids: list[int], keep: float, t: float, new: int, reps: int) -> Rows:
    """Seconds of reading and of each token, over those of the full cache."""
    paper = {"policy": {"name": "fastgen", "paper": True, "recovery": t, "compression_interval": 1}}
    sides = {"full cache": {}, "without a map": fastgen(keep), "with its map": fastgen(keep, headmap="shipped")}

    def timed(changes: Changes) -> tuple[float, float]:
        session = model.with_profile(model.profile.replace(exactness="approx", **changes)).new_session()
        start = time.perf_counter()
        run_to_end(session.read(ids))
        read = time.perf_counter()
        for _ in iterate_events(session.stream(new)):
            pass
        return read - start, (time.perf_counter() - read) / new

    turns: dict[str, Callable[[], tuple[float, float]]] = {
        name: lambda changes=changes: timed(changes) for name, changes in {**sides, "as published": paper}.items()
    }
    found = in_turns(turns, reps)
    for name, times in found.items():
        ratios = [quotients(*([one[at] for one in of] for of in (times, found["full cache"]))) for at in (0, 1)]
        yield {"side": name, "read": ratios[0], "token": ratios[1]}
    return None


def write(session: Any, tokens: list[int]) -> Any:
    """Log-probabilities [n, V] of an answer's tokens, which are stored; the cache is compressed behind them."""
    rows = PassRows.chain([session.ids[-1], *tokens[:-1]], session.committed)
    hear = range(rows.n_rows)
    (made,) = run([ForwardRequest(session.lm, rows, session.cache, want=hear, record_queries=hear)])
    session.ids += tokens
    session.next_compression_at = session.committed + rows.n_rows
    session._commit(rows, hear, made, hear)
    run_to_end(session.compress_cache("answering"))
    return made.logits.float().log_softmax(-1)


def questions(model: Any, texts: int, length: int, keep: float, new: int) -> Rows:
    """How far predictions of a long answer are from those of the full cache, by whether its question is protected."""
    sides = {"not protected": {}, "protected": {"protect_question": True}}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(texts):
        report = write_report(Random(HELD_OUT + i), length, 0.5).text
        asked = [{"role": "user", "content": f"{report}\n\nSummarise what this report says about every station."}]
        ids = encode(model.tokenizer, model.tokenizer.apply_chat_template(asked, tokenize=False, **CHAT))

        def opened(changes: Changes, asked: Any = asked, ids: list[int] = ids) -> Any:
            session = model.with_profile(model.profile.replace(exactness="approx", **changes)).new_session()
            session.kind_spans = chat_spans(model.tokenizer, asked, ids, {QUESTION})
            run_to_end(session.read(ids))
            return session

        full = opened({})
        list(iterate_events(full.stream(new)))
        answer = full.ids[len(ids) :]
        steps = [answer[at : at + INTERVAL] for at in range(0, len(answer), INTERVAL)]
        exact = opened({})
        truth = [write(exact, some) for some in steps]
        for name, more in sides.items():
            session = opened(fastgen(keep, headmap="shipped", **more))
            said = [write(session, some) for some in steps]
            later = [(a.exp() * (a - b)).sum(-1).mean().item() for a, b in zip(truth, said, strict=True)]
            found[name].append(fmean(later[GUARD // INTERVAL :]))
    for name, kl in found.items():
        yield {"side": name, "kl": round(fmean(kl), 5), "worse in": sum(map(float.__gt__, kl, found["protected"]))}
    return None


CHAT = {"add_generation_prompt": True}


@measurement("FastGen at {keep} of the KV cache of {model}, texts of {length} tokens")
def fastgen_end_to_end(
    model: str = "demo",
    texts: int = 6,
    length: int = 2048,
    keep: float = 0.25,
    new: int = 48,
    reps: int = 0,
    question: bool = False,
) -> Rows:
    loaded = load(stands_for(model, Paths.of(os.environ).data), "exact")
    if question:
        return (yield from questions(loaded, texts, length, keep, new))
    asked = samples(loaded, texts, length, HELD_OUT)
    if reps:
        t = once(f"T {length} {keep}", lambda: compared(loaded, asked[0], keep)["as published"]["t"])
        return (yield from speed(loaded, asked[0].context, keep, t, new, reps))
    found: dict[str, list[Row]] = {}
    for i, sample in enumerate(asked):
        outcome = once(f"{model} {length} {keep} {i}", lambda sample=sample: compared(loaded, sample, keep))
        for side, row in outcome.items():
            found.setdefault(side, []).append(row)
        print(f"\r{i + 1} of {texts} texts", end="", file=sys.stderr, flush=True)
    for side, rows in found.items():
        yield {
            "side": side,
            "kept": round(fmean(row["kept"] for row in rows), 3),
            "kv mib": round(fmean(row["bytes"] for row in rows) / 2**20, 3),
            "accuracy": round(fmean(fmean(row["right"]) for row in rows), 3),
            "kl": round(fmean(row["kl"] for row in rows), 5),
        }
    return {"t": [row["t"] for row in found["as published"]]}


if __name__ == "__main__":
    fastgen_end_to_end.main()
