"""What drafting and its control take between passes, in Python: propose and observe over a text of 32k tokens.

    python tests/bench/draft_overhead.py [--context 32768] [--passes 300] [--out FILE]

The text is the standard library's source, tokenized by words; it is replayed as if a model had written its end, and the
logits of each row prefer the true next token among 16,384. No model runs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.engine.rows import Rows as PassRows
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.stats import Step
from kvcli.methods.drafts.lookahead import Lookahead
from kvcli.methods.drafts.mix import Mix
from kvcli.methods.drafts.ngram import Ngram
from tests.bench.harness import Rows, measurement, spread
from tests.bench.overhead import words

VOCAB = 16384


def replay(drafter: Any, text: list[int], context: int, passes: int, temperature: float) -> dict[str, Any]:
    """Milliseconds of propose and observe, pass by pass."""
    torch.manual_seed(0)
    base = torch.randn(64, VOCAB)
    sampler = Sampler(temperature=temperature)
    drafter.start(text[:context], sampler)
    at, proposing, observing, rows_seen = context, [], [], 0
    for _ in range(passes):
        ids = text[:at]
        began = time.perf_counter()
        draft = drafter.propose(ids, 64)
        proposing.append(1000 * (time.perf_counter() - began))
        rows = PassRows.build(ids[-1], at - 1, draft)
        path, node = [0], 0
        below = rows.children()
        while match := [r for r in below[node] if int(rows.ids[r]) == text[at + len(path) - 1]]:
            node = match[0]
            path.append(node)
        new = text[at : at + len(path)]
        logits = base[: len(rows.want)].clone()
        for row, token in zip(path, new, strict=True):
            logits[row, token] = 12.0
        rows_seen += rows.n_rows
        logits_hook = drafter.logits_hook
        hook_output = (
            (lambda row, logits_hook=logits_hook, of=logits: logits_hook(of[row : row + 1])[0].tolist())
            if logits_hook
            else None
        )
        step = Step(rows, logits, path, new, 0.02, *([hook_output] if hook_output else []))
        began = time.perf_counter()
        drafter.observe(step)
        observing.append(1000 * (time.perf_counter() - began))
        at += len(new)
    both = [a + b for a, b in zip(proposing, observing, strict=True)]
    return {
        "ms": spread(both),
        "ms_p90": round(quantiles(both, n=10)[-1], 4),
        "propose_ms": spread(proposing)[1],
        "observe_ms": spread(observing)[1],
        "rows": round(rows_seen / passes, 1),
        "tokens_per_pass": round((at - context) / passes, 2),
    }


@measurement("Milliseconds of drafting a pass", schema="kvcli.bench.draft_overhead/1")
def draft_overhead(context: int = 32768, passes: int = 300) -> Rows:
    text = words(context + 40 * passes, VOCAB)
    torch.set_num_threads(1)
    for temperature in (0.0, 0.8):
        for name, config in (("ngram", Ngram()), ("lookahead", Lookahead()), ("fafo", Mix(view="stream"))):
            replay(config.drafter(), text, context, 20, temperature)
            row = {"side": name, "temperature": temperature}
            yield row | replay(config.drafter(), text, context, passes, temperature)


if __name__ == "__main__":
    draft_overhead.main()
