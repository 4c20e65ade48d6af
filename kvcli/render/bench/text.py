"""Benchmark as a table, for terminals and Markdown, as CSV or JSON lines, and its history as a trend."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from kvcli.render import quality as q
from kvcli.render.report import NONE, Block, ReportTable, Text
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.tables import fitting
from kvcli.safe_output import escaped
from kvcli.schemas.bench import BenchDocument, BenchHistoryDocument, BenchLine, BenchRow, HistoryEntry, Ratio
from kvcli.settings.schema import NUMBERS

DTYPES = {theirs: ours for ours, theirs in NUMBERS.items()}
# columns to drop one after the other if the terminal is too narrow
DROPPED = ("peak", "kv MiB", "read/s", "1st tok", "accept", "identical text")
# column of CSV -> field of a row
SEPARATED = {
    **{name: name for name in ("profile", "ctx", "workload", "prompt", "new")},
    **{
        figure if kind == "median" else f"{figure}_{kind}": f"{kind}.{figure}"
        for figure in ("tok_s", "read_tok_s", "first_token")
        for kind in ("median", "low", "high", "mean", "sd")
    },
    "ratio": "ratio.tok_s.median",
    **{f"ratio_{end}": f"ratio.tok_s.{end}" for end in ("low", "high")},
    "verdict": "ratio.tok_s.verdict",
    **{n: f"accept.{n}" for n in ("mean_acceptance_length", "drafted_share", "tokens_per_pass", "acceptance_rate")},
    **{name: name for name in ("text_tok_s", "kv_bytes", "peak_bytes", "exactness", "ends")},
    **{f"same_{n}": f"same.{n}" for n in ("tokens", "of", "share", "first_difference", "near_tie", "margin", "bound")},
}
BARS = "▁▂▃▄▅▆▇█"
TREND = 12  # results in a sparkline

Cell = Callable[["BenchRow", "BenchDocument"], str]


def blocks(document: BenchDocument, width: int | None = None) -> Iterator[Block]:
    """Yield a table for each context and workload, the meaning of the columns, reasons for uncertainty, and quality.

    The tables have the columns with values that fit into `width`; None = all columns.
    """
    yield Text("title", heading(document))
    shown, batch = set[str](), document.args.batch
    beside = f" · {batch} texts side by side, tok/s of all" if batch > 1 else ""
    for (ctx, workload), rows in cases(document).items():
        every = [name for name in CELLS if name != "a text" or batch > 1]
        table = cells(rows, document, every if width is None else filled(rows, document))
        table = table if width is None else fitting(table, width, DROPPED)
        shown |= {*table[0]}
        yield Text("heading", f"{workload} · {ctx:,} tokens, {rows[0].new:,} of them new{beside}")
        yield ReportTable(table, is_split=False)
        if said := ranges(rows):
            yield Text("caption", said)
    yield Text("paragraph", legend(document, shown))
    yield from (Text("item", line) for line in (*weights(document), *differences(document), where(document)))
    yield from (Text("note", note) for note in document.notes)
    if document.quality is not None:
        yield from q.blocks(document.quality)


def cases(document: BenchDocument) -> dict[tuple[int, str], list[BenchRow]]:
    """Return the rows by (context, workload), in the order they ran."""
    found: dict[tuple[int, str], list[BenchRow]] = {}
    for row in document.rows:
        found.setdefault((row.ctx, row.workload), []).append(row)
    return found


def heading(document: BenchDocument) -> str:
    env, args, model = document.env, document.args, document.model
    where = f"cpu {threads(document)}" if env.device == "cpu" else ", ".join(env.gpus) or env.device
    order = "interleaved" if args.interleave else "not interleaved"
    parts = [
        model.id,
        DTYPES.get(model.dtype, model.dtype) + ("" if model.quant == "none" else f" {model.quant}"),
        where,
        f"torch {env.versions.get('torch')}",
        f"{f.plural(args.reps, 'rep')} {order}",
        *([f"temperature {args.temperature:g}"] if args.temperature else []),
        *([] if document.complete else ["incomplete"]),
    ]
    return " · ".join(parts)


def threads(document: BenchDocument) -> str:
    n = document.env.threads
    return f.plural(n, "thread") if n is not None else "threads unknown"


def where(document: BenchDocument) -> str:
    """Return the machine, the versions and the load, in one line."""
    env = document.env
    versions = [f"{name} {number}" for name, number in env.versions.items() if number and name != "torch"]
    parts = [*env.gpus, *([env.cpu] if env.cpu else []), f"{env.cores} cores", *versions]
    if env.commit:
        parts.append(f"commit {env.commit}")
    if env.load_before and env.load_after:
        parts.append(f"load {env.load_before[0]:.2f} → {env.load_after[0]:.2f}")
    return " · ".join([*parts, env.date[:16].replace("T", " ")])


def filled(rows: Sequence[BenchRow], document: BenchDocument) -> list[str]:
    """Return the columns that have a value."""
    return [name for name in CELLS if any(CELLS[name](row, document) != NONE for row in rows)]


def cells(rows: Sequence[BenchRow], document: BenchDocument, names: Collection[str]) -> list[list[str]]:
    """Return a header and one line per result, with these columns."""
    return [["profile", *names], *([row.profile, *(CELLS[name](row, document) for name in names)] for row in rows)]


def speed(row: BenchRow, _: BenchDocument) -> str:
    if row.median.tok_s is None:
        return NONE
    sd = f" ±{_number(row.sd.tok_s)}" if row.sd.tok_s is not None else ""
    return f"{_number(row.median.tok_s)}{sd}"


def times(row: BenchRow, document: BenchDocument) -> str:
    """Return `1.80`, or `≈` if the spread is too wide to call one side faster."""
    if row.profile == document.baseline:
        return "1.00"
    return ratio_words(row.ratio.tok_s)


def ratio_words(ratio: Ratio | None) -> str:
    if ratio is None:
        return NONE
    return "≈" if ratio.verdict == "≈" else f"{ratio.median:.2f}"


def _why(row: BenchRow, document: BenchDocument) -> str:
    """Return why a text differs beyond rounding, from the exactness of both sides and their number formats."""
    if _promise(row) != "exact":
        return f"{_promise(row)}: text may differ"
    on_case = (b for b in document.rows if (b.ctx, b.workload) == (row.ctx, row.workload))
    base = next((b for b in on_case if b.profile == document.baseline), row)
    if _promise(base) != "exact":
        return f"expected, because {base.profile} is {_promise(base)}, not exact"
    if _numbers(row) != _numbers(base):
        return f"expected with {_numbers(row)} against {_numbers(base)}"
    return "not explained by rounding"


def _promise(row: BenchRow) -> str:
    """Return the exactness of a side; a side that is no profile states it in its setup if it is not exact."""
    return row.exactness or row.setup.get("exactness", "exact")


def _numbers(row: BenchRow) -> str:
    quant = row.setup.get("quant", "none")
    dtype = row.setup.get("dtype", "")
    return DTYPES.get(dtype, dtype) + ("" if quant == "none" else f" {quant}")


def ranges(rows: Sequence[BenchRow]) -> str:
    """Return the ranges of the ratios of single repetitions, also for ratios shown as ≈."""
    shown = []
    for row in rows:
        ratio = row.ratio.tok_s
        if ratio is not None and ratio.low < ratio.high:
            shown.append(f"{row.profile} {range_words(ratio)}")
    return f"range of ×: {', '.join(shown)}" if shown else ""


def range_words(ratio: Ratio) -> str:
    """Return `0.68–0.96`, with more digits if rounding would make a range without 1 contain 1."""
    for digits in (2, 3, 4):
        low, high = f"{ratio.low:.{digits}f}", f"{ratio.high:.{digits}f}"
        if ratio.verdict == "≈" or not float(low) <= 1 <= float(high):
            break
    return f"{low}–{high}"


def accept(row: BenchRow, _: BenchDocument) -> str:
    if row.accept is None:
        return NONE
    return f"{row.accept.mean_acceptance_length:.2f}·{f.percent(row.accept.drafted_share)}"


def same(row: BenchRow, document: BenchDocument) -> str:
    if row.same is None:
        return "100 %" if row.profile == document.baseline and row.samples.tok_s else NONE
    return share_words(row.same.share)


def share_words(share: float) -> str:
    """Return a share in percent that is never rounded up to 100 %."""
    return "100 %" if share == 1 else f"{int(1000 * share) / 10:.1f} %"


def _mib(n: int | None, digits: int) -> str:
    return NONE if n is None else f"{n / 2**20:,.{digits}f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.1f}"


CELLS: Mapping[str, Cell] = {
    "read/s": lambda row, _: NONE if row.median.read_tok_s is None else f"{row.median.read_tok_s:,.0f}",
    "1st tok": lambda row, _: NONE if row.median.first_token is None else f.seconds(row.median.first_token),
    "tok/s": speed,
    "a text": lambda row, d: NONE if row.text_tok_s is None or d.args.batch == 1 else _number(row.text_tok_s),
    "×": times,
    "accept": accept,
    "kv MiB": lambda row, _: _mib(row.kv_bytes, 1),
    "peak": lambda row, _: _mib(row.peak_bytes, 0),
    "identical text": same,
}


def legend(document: BenchDocument, shown: Collection[str]) -> str:
    """Return the meaning of the columns that are shown."""
    base = document.baseline
    sentences = ["± is one standard deviation."] if document.args.reps > 1 else []
    ratios = [row.ratio.tok_s for row in document.rows if row.ratio.tok_s is not None]
    if ratios:
        how = "median of paired repetitions" if ratios[0].samples else "median over median"
        near = "no significant difference" if document.args.reps > 1 else "one repetition has no range"
        sentences.append(f"×: decoding speed relative to {base}, {how}; ≈: {near}.")
    if "accept" in shown:
        sentences.append("accept: acceptance length (tokens per drafted pass) · share of passes that drafted.")
    if "identical text" in shown:
        how = f"sampled with seed {document.args.seed}" if document.args.temperature else "greedy"
        sentences.append(f"identical text: share of tokens before the first difference from {base}, {how}.")
        if any(_promise(row) == "approx" for row in document.rows):
            sentences[-1] += " With approx, --quality all measures the agreement of all tokens."
    if "peak" in shown:
        sentences.append("peak: MiB, measured in a separate process.")
    return " ".join(sentences)


def weights(document: BenchDocument) -> Iterator[str]:
    """Yield the weights that each side runs, if they differ."""
    held: dict[str, dict[str, None]] = {}  # weights -> sides
    for row in document.rows:
        if form := row.setup.get("weights"):
            held.setdefault(form, {})[row.profile] = None
    if len(held) > 1:
        yield "weights: " + "; ".join(f"{', '.join(sides)}: {form}" for form, sides in held.items())


def differences(document: BenchDocument) -> Iterator[str]:
    """Yield the position where a text first differs from the baseline's, and whether rounding explains it."""
    for row in document.rows:
        same = row.same
        if same is None or same.first_difference is None:
            continue
        where = f"{row.profile}, {row.workload} {row.ctx:,}: first differs at token {same.first_difference + 1}"
        if same.near_tie is None or same.margin is None or same.bound is None:
            yield f"{where}, not checked"
            continue
        logits = f"logit difference {same.margin:.3g}, rounding error up to {same.bound:.3g}"
        if same.near_tie and _promise(row) == "exact":
            yield f"{where}, explained by rounding ({logits})"
        else:
            yield f"{where}, {_why(row, document)} ({logits})"


# ---- CSV, JSON lines, history ----


def separated(document: BenchDocument, tabs: bool = False) -> str:
    """Return all figures, one line per result, separated by commas, or by tabs for `--plain`."""
    env, model, out = document.env, document.model, io.StringIO()
    of_run = {
        "baseline": document.baseline, "model": model.id, "dtype": model.dtype, "quant": model.quant,
        "device": env.device, "cpu": env.cpu, "threads": env.threads, "torch": env.versions.get("torch"),
        "kvcli": document.kvcli, "commit": env.commit, "date": env.date,
    }  # fmt: skip
    columns = [*SEPARATED, "reps", "error", *of_run]
    table = csv.DictWriter(out, columns, delimiter="\t" if tabs else ",", lineterminator="\n")
    table.writeheader()
    for row in document.rows:
        figures = {column: _at(row, path) for column, path in SEPARATED.items()}
        table.writerow({**figures, "reps": len(row.samples.tok_s), "error": row.error, **of_run})
    return out.getvalue()


def _at(value: Any, path: str) -> Any:
    """Return the value at a dotted path; None if a part of it is."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


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
