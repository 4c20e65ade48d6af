"""How few probed rows still tell FastGen what a head needs: what they say beside what all rows say, and the answers.

    python tests/bench/probe_rows.py [--texts 24] [--rows 8,16,32,64,128] [--out FILE]

The demo model reads held-out texts. Recovered attention (mean of the worst tenth) is measured on so many rows spread
over the second half and as many newest ones (32 at most), and on every row of the second half; then heads choose by a
budget, and hidden facts are asked for. Counts do not depend on the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli import load
from kvcli.engine.engine import run_to_end
from kvcli.heads.query_probe import listening
from kvcli.heads.sample import ProbeSample, samples
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.methods.policies.fastgen.recovery import recover
from tests.bench.harness import Ints, Rows, measurement
from tests.bench.kv_quality import HELD_OUT, Text, answered

LENGTH, KEEP = 2048, (0.5, 0.4)


def errors(model: Any, sample: ProbeSample, counts: Ints) -> dict[int, tuple[float, float]]:
    """By number of rows: mean distance to what every row says, and the share of heads that choose alike by T = 0.8."""
    found: dict[int, list[tuple[float, float]]] = {n: [] for n in counts}

    def hear(s: Any, at: Any) -> None:
        def value(rows: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
            judged = recover(at.q[:, rows], at.q_pos[rows], s, at.kinds, FastGen(), at.scale, n_prompt=at.n_prompt)
            each = judged.value("cvar10", "mean")
            enough = (each >= 0.8).index_fill(0, torch.tensor(each.shape[0] - 1), True)
            return each, judged.cost.double().masked_fill(~enough, torch.inf).argmin(0).tolist()

        whole, right = value(torch.arange(at.q_pos.shape[0]))
        for n in counts:
            wanted = torch.tensor(FastGen(probe_rows=n).probes(at.n_prompt))
            some, chosen = value(torch.isin(at.q_pos, wanted).nonzero()[:, 0])
            same = fmean(a == b for a, b in zip(chosen, right, strict=True))
            found[n].append((float((some - whole)[:-1].abs().mean()), same))

    run_to_end(listening(model, lambda n: range(n // 2, n), hear).read(sample.context))
    return {n: (fmean(e for e, _ in each), fmean(s for _, s in each)) for n, each in found.items()}


@measurement(
    "What FastGen sees by the number of rows it measures",
    note="distance: mean difference of recovered attention to that of all rows of the second half.",
    is_counts=True,
)
def probe_rows(texts: int = 24, rows: Ints = (8, 16, 32, 64, 128)) -> Rows:
    model = load("demo", "exact")
    chosen = samples(model, texts, LENGTH, HELD_OUT + 1)
    read = [(sample, Text(model, sample.context)) for sample in chosen]
    measured = [errors(model, sample, rows) for sample in chosen]
    for n in rows:
        row: dict[str, Any] = {"rows": len(FastGen(probe_rows=n).probes(LENGTH))}
        row["distance"] = round(fmean(m[n][0] for m in measured), 4)
        row["same choice"] = round(fmean(m[n][1] for m in measured), 3)
        for keep in KEEP:
            policy = {"policy": {"name": "fastgen", "keep": keep, "probe_rows": n}}
            right = fmean(fmean(answered(model, sample, policy, text)[0]["right"]) for sample, text in read)
            row[f"accuracy at {keep:.0%}"] = round(right, 4)
        yield row


if __name__ == "__main__":
    probe_rows.main()
