"""Benchmark as Markdown, CSV or JSON lines, and its history as a trend."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.render import quality as q
from kvcli.render.bench.table import (
    CELLS,
    NONE,
    blocks,
    cells,
    differences,
    heading,
    legend,
    ranges,
    share_words,
    weights,
    where,
)
from kvcli.safe_output import escaped, neutralise
from kvcli.schemas.bench import BenchLine

if TYPE_CHECKING:
    from kvcli.schemas.bench import BenchDocument, BenchHistoryDocument, BenchRow, HistoryEntry

BARS = "▁▂▃▄▅▆▇█"
TREND = 12  # results in a sparkline


def markdown(document: BenchDocument) -> str:
    """Return a heading line, one table for each context and workload, and the meaning of the columns."""
    lines = [f"**{_cell(heading(document))}**", "", _cell(where(document))]
    for (ctx, workload), rows in blocks(document).items():
        lines += ["", f"{_cell(workload)}, {ctx:,} tokens, {rows[0].new:,} of them new:", ""]
        lines += _markdown_table(cells(rows, document, CELLS))
        lines += ["", _cell(ranges(rows))] if ranges(rows) else []
    lines += ["", legend(document, CELLS)]
    lines += [f"- {_cell(line)}" for line in (*weights(document), *differences(document))]
    lines += [f"- {_cell(note)}" for note in document.notes]
    if document.quality is not None:
        for name, table in q.shown(document.quality):
            lines += ["", f"{_cell(name)}:", "", *_markdown_table(table)]
        lines += ["", *(f"- {_cell(note)}" for note in q.notes(document.quality))]
    return "\n".join(lines) + "\n"


def _markdown_table(table: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = ("| " + " | ".join(map(_cell, line)) + " |" for line in table)
    return [head, "|---" + "|---:" * (len(table[0]) - 1) + "|", *rest]


def _cell(text: str) -> str:
    return neutralise(text, one_line=True).replace("|", "\\|")


def separated(document: BenchDocument, tabs: bool = False) -> str:
    """Return all figures, one line per result, separated by commas, or by tabs for `--plain`."""
    out = io.StringIO()
    table = csv.DictWriter(out, list(_flat(document, None)), delimiter="\t" if tabs else ",", lineterminator="\n")
    table.writeheader()
    for row in document.rows:
        table.writerow(_flat(document, row))
    return out.getvalue()


def _flat(document: BenchDocument, row: BenchRow | None) -> dict[str, object]:
    """Return the figures of a result under plain names; without a result, the names with no values."""
    flat: dict[str, object] = {}
    for name in ("profile", "ctx", "workload", "prompt", "new"):
        flat[name] = getattr(row, name, None)
    for figure in ("tok_s", "read_tok_s", "first_token"):
        for kind in ("median", "low", "high", "mean", "sd"):
            flat[figure if kind == "median" else f"{figure}_{kind}"] = getattr(getattr(row, kind, None), figure, None)
    ratio = row.ratio.tok_s if row else None
    for column, name in (("ratio", "median"), ("ratio_low", "low"), ("ratio_high", "high"), ("verdict", "verdict")):
        flat[column] = getattr(ratio, name, None)
    for name in ("mean_acceptance_length", "drafted_share", "tokens_per_pass", "acceptance_rate"):
        flat[name] = getattr(row.accept if row else None, name, None)
    for name in ("kv_bytes", "peak_bytes", "exactness", "ends"):
        flat[name] = getattr(row, name, None)
    same = row.same if row else None
    for name in ("tokens", "of", "share", "first_difference", "near_tie", "margin", "bound"):
        flat[f"same_{name}"] = getattr(same, name, None)
    flat |= {"reps": len(row.samples.tok_s) if row else None, "error": row.error if row else None}
    env, model = document.env, document.model
    flat |= {"baseline": document.baseline, "model": model.id, "dtype": model.dtype, "quant": model.quant}
    flat |= {"device": env.device, "cpu": env.cpu, "threads": env.threads, "torch": env.versions.get("torch")}
    return flat | {"kvcli": document.kvcli, "commit": env.commit, "date": env.date}


def json_lines(document: BenchDocument) -> str:
    """Return one self-contained JSON object per result."""
    lines = [BenchLine.from_attributes(row, document.env, document, model=document.model.id) for row in document.rows]
    return "".join(escaped(json.dumps(line.document(), ensure_ascii=False)) + "\n" for line in lines)


def trend(document: BenchHistoryDocument) -> list[list[list[str]]]:
    """Return a table per side, context and workload, oldest entry first, with a sparkline of speeds in the header."""
    groups: dict[tuple[str, int, str], list[HistoryEntry]] = {}
    for entry in document.entries:
        groups.setdefault((entry.profile, entry.ctx, entry.workload), []).append(entry)
    tables = []
    for (profile, ctx, workload), entries in groups.items():
        speeds = [entry.tok_s for entry in entries if entry.tok_s is not None]
        side = f"{profile} · {workload} {ctx:,}"
        head = [side, "tok/s", "×", "of", "1st tok", "identical text", "commit", bars(speeds)]
        tables.append([head, *map(_trend_row, entries)])
    return tables


def _trend_row(entry: HistoryEntry) -> list[str]:
    times = NONE
    if entry.ratio is not None:
        times = "≈" if entry.verdict == "≈" else f"{entry.ratio:.2f}"
    return [
        entry.date[:16].replace("T", " "),
        NONE if entry.tok_s is None else f"{entry.tok_s:,.1f}",
        times,
        entry.baseline,
        NONE if entry.first_token is None else f"{entry.first_token:.2f} s",
        NONE if entry.same is None else share_words(entry.same),
        entry.commit or NONE,
        "busy" if entry.quiet is False else "",
    ]


def bars(values: Sequence[float]) -> str:
    """Draw the last values as bars from zero to the largest, so that a small change looks small."""
    last = values[-TREND:]
    top = max(last, default=0)
    return "".join(BARS[min(len(BARS) - 1, int(v / top * (len(BARS) - 1) + 0.5))] for v in last) if top else ""
