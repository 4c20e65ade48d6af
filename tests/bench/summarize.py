"""Summaries of generated PDFs by the bundled model: findings told, citations right, before and after the check.

    python tests/bench/summarize.py [--n 21] [--chunk 0,2500] [--out FILE]

Whole documents, and with --chunk also in parts. The first is the shipped demo:pdf.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.chat.model import Model
from kvcli.demo.report import Finding
from kvcli.documents import document_of
from kvcli.summarize.request import Request
from kvcli.summarize.result import Point, Summary
from tests.bench.harness import Ints, Rows, measurement
from tests.demo_model.sample import SEED, pdf_bytes, write_sample
from tests.summarize.scribe import summary_of


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
    summary = summary_of(model, [document], request)
    figures = count(summary, sample.findings)
    is_all = figures["told"] == figures["points"] == figures["findings"] == figures["pages_right"]
    prompts = [answered.turn.stats.prompt for answered in summary.turns]
    return {"seed": seed, "perfect": is_all, **figures, "prompts": prompts}


@measurement("Summaries of generated PDFs by the bundled model", schema="kvcli.bench.summarize/1", is_counts=True)
def summarize(n: int = 21, chunk: Annotated[Ints, "tokens of a part; 0 = whole"] = (0,)) -> Rows:
    runs = []
    with kvcli.load("demo") as model:
        for size in chunk:
            rows = []
            for seed in range(SEED, SEED + n):
                rows.append(one(model, seed, Request(chunk=size or None)))
                yield {"chunk": size or None, **rows[-1]}
            sums = {key: sum(row[key] for row in rows) for key in rows[0] if key not in ("seed", "prompts")}
            runs.append({"chunk": size or None, "documents": len(rows), **sums})
    return {"shipped_seed": SEED, "runs": runs}


if __name__ == "__main__":
    summarize.main()
