"""Summaries of generated PDFs by the bundled model: findings told, citations right, before and after the check.

python tests/bench/summarize.py --n 21 --json docs/benchmarks/summarize.json
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvcli
from kvcli.demo.report import Finding
from kvcli.demo.sample import SEED, pdf_bytes, write_sample
from kvcli.documents import document_of
from kvcli.local import Model
from kvcli.summarize.request import Request
from kvcli.summarize.result import Point, Summary
from kvcli.summarize.run import summary_of


def is_told(finding: Finding, points: Sequence[Point]) -> Point | None:
    """The point that tells a finding word for word."""
    wanted = f"section {finding.section}{', the last' if finding.is_last else ''}: {finding.text}"
    return next((p for p in points if wanted in p.text), None)


def count(summary: Summary, findings: Sequence[Finding]) -> dict[str, int]:
    told = [(finding, is_told(finding, summary.points)) for finding in findings]
    right = {id(point) for _, point in told if point is not None}
    pages = [
        (str(finding.page), [c.place.label for c in point.cites if c.confirmed]) for finding, point in told if point
    ]
    raw = " ".join(answered.turn.text for answered in summary.turns)
    return {
        "findings": len(findings),
        "told": len(right),
        "pages_by_model": sum(f"{f.text} [p. {f.page}]" in raw for f in findings),
        "pages_right": sum([page] == cited for page, cited in pages),
        "points": len(summary.points),
        "confirmed_wrong": sum(bool(cited) and [page] != cited for page, cited in pages)
        + sum(cite.confirmed for point in summary.points if id(point) not in right for cite in point.cites),
        "corrected": summary.corrected,
        "doubtful": summary.unconfirmed,
    }


def one(model: Model, seed: int, request: Request) -> dict[str, Any]:
    sample = write_sample(seed)
    document = document_of(pdf_bytes(sample), f"seed-{seed}.pdf")
    began = time.perf_counter()
    summary = summary_of(model, [document], request)
    figures = count(summary, sample.findings)
    is_all = figures["told"] == figures["points"] == figures["findings"] == figures["pages_right"]
    prompts = [answered.turn.stats.prompt for answered in summary.turns]
    seconds = round(time.perf_counter() - began, 1)
    return {"seed": seed, "perfect": is_all, **figures, "prompts": prompts, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=21)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--chunk", type=int, nargs="*", default=[0], help="tokens of a part; 0 = whole")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"schema": "kvcli.bench.summarize/1", "shipped_seed": SEED, "runs": {}}
    with kvcli.load("demo") as model:
        for chunk in options.chunk:
            rows = []
            for seed in range(options.seed, options.seed + options.n):
                rows.append(one(model, seed, Request(chunk=chunk or None)))
                print(chunk or "whole", json.dumps(rows[-1]), flush=True)
            found["runs"][str(chunk or "whole")] = {
                "documents": len(rows),
                "perfect": sum(row["perfect"] for row in rows),
                **{
                    k: sum(row[k] for row in rows)
                    for k in rows[0]
                    if isinstance(rows[0][k], int) and k not in ("seed", "perfect")
                },
                "rows": rows,
            }
            print(json.dumps({k: v for k, v in found["runs"][str(chunk or "whole")].items() if k != "rows"}))
    if options.json:
        text = re.sub(r"\n {5,}", " ", json.dumps(found, indent=1))
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
