"""Table of a benchmark: one block for each context and workload, as wide as the terminal allows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.tables import columns, fitting
from kvcli.render.terminal.terminal import fold
from kvcli.settings.schema import NUMBERS

if TYPE_CHECKING:
    from kvcli.schemas.bench import BenchDocument, BenchRow, Ratio

NONE = "–"
DTYPES = {theirs: ours for ours, theirs in NUMBERS.items()}
# columns to drop one after the other if the terminal is too narrow
DROPPED = ("peak", "kv MiB", "read/s", "1st tok", "accept", "identical text")

Cell = Callable[["BenchRow", "BenchDocument"], str]


def table(document: BenchDocument, width: int) -> list[str]:
    """Return header, blocks, the meaning of the columns, and reasons for uncertainty."""
    lines = [*fold(heading(document), width), ""]
    shown = set[str]()
    for (ctx, workload), rows in blocks(document).items():
        names, cells_below = block(rows, document, width)
        lines += [*fold(f"{workload} · {ctx:,} tokens, {rows[0].new:,} of them new", width), *cells_below]
        lines += [*fold(ranges(rows), width), ""] if ranges(rows) else [""]
        shown |= set(names)
    for line in [legend(document, shown), *weights(document), *differences(document), where(document)]:
        lines += fold(line, width)
    for note in document.notes:
        lines += fold(f"note: {note}", width)
    return lines


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


def blocks(document: BenchDocument) -> dict[tuple[int, str], list[BenchRow]]:
    """Return table lines by (context, workload), in the order they ran."""
    found: dict[tuple[int, str], list[BenchRow]] = {}
    for row in document.rows:
        found.setdefault((row.ctx, row.workload), []).append(row)
    return found


def filled(rows: Sequence[BenchRow], document: BenchDocument) -> list[str]:
    """Return the columns that have a value."""
    return [name for name in CELLS if any(CELLS[name](row, document) != NONE for row in rows)]


def block(rows: Sequence[BenchRow], document: BenchDocument, width: int) -> tuple[list[str], list[str]]:
    """Return the columns that fit, and the lines of one table."""
    found = fitting(cells(rows, document, filled(rows, document)), width, DROPPED)
    return found[0][1:], columns(found, width)


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
