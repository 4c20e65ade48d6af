"""A bound on what one attention kernel over the rows of several texts could save: passes of N texts with one row
each beside passes of one text with as many rows.

    python tests/bench/ragged.py [--model smollm2-135m] [--texts 8] [--contexts 16,512,2048] [--reps 15]

Both run the same linear layers over as many rows. They differ by the calls of attention, one a text and layer, and by
what is read: each text has KV of its own. At 16 tokens hardly any KV is read, so the difference there is that of the
calls, which a kernel over ragged rows (BASS, arXiv 2404.15778) would make one. Milliseconds are CPU time of the thread.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import load
from kvcli.engine.engine import run, run_to_end
from kvcli.engine.forward_request import Draft, ForwardRequest, Rows
from tests.bench.harness import Ints, in_turns, measurement, quotients, spread
from tests.bench.harness import Rows as Table
from tests.bench.together import prompts_of


def pass_of(sessions: list[Any], rows: int) -> float:
    """CPU milliseconds of a pass with `rows` rows of each session; nothing is kept."""
    requests = []
    for session in sessions:
        built = Rows.build(session.ids[-1], len(session.ids) - 1, Draft.chain(list(range(9, 8 + rows))))
        requests.append(ForwardRequest(session.lm, built, session.cache, want=range(built.n_rows)))
    began = time.thread_time()
    run(requests)
    return 1000 * (time.thread_time() - began)


@measurement(
    "Passes of {model}: {texts} texts with one row each, and one text with {texts} rows",
    columns=["context", "texts ms", "rows ms", "texts over rows", "at most saved"],
    note="CPU time. In brackets: least and most. At most saved: the difference at the first context, over this pass.",
)
def ragged(model: str = "demo", texts: int = 8, contexts: Ints = (16, 512, 2048), reps: int = 15) -> Table:
    torch.set_num_threads(1)
    calls = None
    with load(model, "exact") as loaded:
        for context in contexts:
            sessions = [loaded.new_session() for _ in range(texts)]
            for session, ids in zip(sessions, prompts_of(loaded, texts, max(contexts)), strict=True):
                run_to_end(session.read(ids[:context]))
            sides = {"texts": lambda s=sessions: pass_of(s, 1), "rows": lambda s=sessions: pass_of(s[:1], texts)}
            runs = in_turns(sides, reps, 2)
            apart = sorted(a - b for a, b in zip(runs["texts"], runs["rows"], strict=True))[reps // 2]
            calls = apart if calls is None else calls
            whole = sorted(runs["texts"])[reps // 2]
            row = {"context": context, "texts ms": spread(runs["texts"], 2), "rows ms": spread(runs["rows"], 2)}
            yield row | {"texts over rows": quotients(runs["texts"], runs["rows"], 2), "at most saved": calls / whole}


if __name__ == "__main__":
    ragged.main()
