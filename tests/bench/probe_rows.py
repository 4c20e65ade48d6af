"""How few probed rows still tell FastGen what a head needs: what they say beside what all rows say, and the answers.

    python tests/bench/probe_rows.py [--texts 24] [--rows 8,16,32,64,128] [--out FILE]

The demo model reads held-out texts. Recovered attention (mean of the worst tenth) is measured on so many rows spread
over the second half and as many newest ones (32 at most), and on every row of the second half; then heads choose by a
budget, and hidden facts are asked for. Counts do not depend on the machine. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli import load
from kvcli.engine.engine import run_to_end
from kvcli.heads.query_probe import listening
from kvcli.heads.sample import ProbeSample, samples
from kvcli.methods.policies.fastgen.policy import FastGen
from kvcli.methods.policies.fastgen.recovery import recover
from tests.bench.harness import machine
from tests.bench.kv_quality import HELD_OUT, Text, answered

LENGTH, KEEP = 2048, (0.5, 0.4)


def errors(model: Any, sample: ProbeSample, counts: list[int]) -> dict[int, tuple[float, float]]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--rows", default="8,16,32,64,128")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = load("demo", "exact")
    counts = [int(n) for n in args.rows.split(",")]
    texts = samples(model, args.texts, LENGTH, HELD_OUT + 1)
    read = [(sample, Text(model, sample.context)) for sample in texts]
    measured = [errors(model, sample, counts) for sample in texts]
    rows = []
    for n in counts:
        row: dict[str, Any] = {"rows": len(FastGen(probe_rows=n).probes(LENGTH))}
        row["distance"] = round(fmean(m[n][0] for m in measured), 4)
        row["same choice"] = round(fmean(m[n][1] for m in measured), 3)
        for keep in KEEP:
            policy = {"policy": {"name": "fastgen", "keep": keep, "probe_rows": n}}
            right = fmean(fmean(answered(model, sample, policy, text)[0]["right"]) for sample, text in read)
            row[f"accuracy at {keep:.0%}"] = round(right, 4)
        rows.append(row)
        print(json.dumps(row), flush=True)
    about = machine()
    result = {
        "title": "What FastGen sees by the number of rows it measures",
        "machine": f"torch {about['torch']}, commit {about['commit']}",
        "command": f"python tests/bench/probe_rows.py --texts {args.texts}",
        "rows": rows,
        "note": "distance: mean difference of recovered attention to that of all rows of the second half.",
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
