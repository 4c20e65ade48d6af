"""Output of `kvcli fit` and of a calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from kvcli.fit.run_log import age_days
from kvcli.render.fit.explain import explained
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.tables import columns, turned, widest
from kvcli.render.terminal.terminal import Span, folded, styled, text_width
from kvcli.render.turn.turn_summary import joined
from kvcli.schemas.fit import CalibrationDocument, FitDocument, FitPlan, PassTime

GIB, MIB = 1 << 30, 1 << 20
STEADY = 1.5  # on an undisturbed machine, slowest pass / fastest pass is below this
TRY = "  try: "
_AWAY = {"host": "in host memory", "disk": "on disk"}
MEASURE = "no speed estimate yet: kvcli bench --calibrate measures this machine"
DESCRIBED = "no speed estimate: --ram/--vram describe another machine"


def fit_lines(document: FitDocument, width: int, explains: bool = False) -> Iterator[list[Span]]:
    """Yield the model, a table or list of plans, changes that make a plan fit, times and notes.

    With `explains`, the memory of each plan is explained before the times.
    """
    for line in joined(_model(document), width):
        yield [(line, "bold")]
    yield []
    yield from _plans(document, width)
    yield []
    for plan in document.plans:
        if not plan.fits:
            yield from _refused(plan, document, width)
    for plan in document.plans if explains else ():
        yield from explained(plan, width)
        yield []
    for text in _foot(document):
        yield from styled(text, width, "dim")


def plain_rows(document: FitDocument) -> list[list[str]]:
    """Return bytes and tokens for programs that read tables instead of JSON."""
    names = ["profile", "ctx", "fits", "weights", "kv", "draft", "base", "working", "loading", "total", "max_ctx"]
    rows = [[str(getattr(plan, name)) for name in names] for plan in document.plans]
    return [names, *([cell.lower() if cell in ("True", "False") else cell for cell in row] for row in rows)]


def _model(document: FitDocument) -> list[str]:
    per_token = document.plans[0].kv_per_token
    return [
        document.model,
        f"{document.layers} layers",
        f"{document.kv_heads} KV heads of {document.head_dim}",
        f"{f.long_size(per_token)} per token",
        f"limit {f.count(document.limit)}",
        document.device,
    ]


def _plans(document: FitDocument, width: int) -> Iterator[list[Span]]:
    unit = GIB if max(plan.total for plan in document.plans) >= 2 * GIB else MIB
    word = "GiB" if unit == GIB else "MiB"

    def size(n: int) -> str:
        return f"{n / unit:,.2f}" if unit == GIB else f"{n / unit:,.{int(n < 100 * MIB)}f}"

    names = ["profile", "ctx", "weights", "kv", "draft", "runtime", "activations", "loading", "peak"]
    names += ["fits", "max context"]
    rows = [[*_cells(plan, size)] for plan in document.plans]
    if not any(plan.loading for plan in document.plans):
        names, rows = [n for n in names if n != "loading"], [[*row[:7], *row[8:]] for row in rows]
    yield from _table(names, rows, [plan.fits for plan in document.plans], width)
    kept = f"in {word}; {size(document.free_bytes)} available, {size(document.kept_free)} of it stay free"
    yield from styled(kept, width, "dim")


def _table(names: list[str], rows: list[list[str]], fits: list[bool], width: int) -> Iterator[list[Span]]:
    """Yield a table. If it is too wide, equal columns are listed once below it, or each plan becomes a block."""
    shared = [i for i in range(1, len(names)) if len(rows) > 1 and len({row[i] for row in rows}) == 1]
    for left_out in ([], shared):
        shown = [i for i in range(len(names)) if i not in left_out]
        table = columns([[row[i] for i in shown] for row in (names, *rows)])
        if widest(table) < width:
            for i, line in enumerate(table):
                yield [(line, "dim" if not i else "" if fits[i - 1] else "yellow")]
            break
    else:
        yield from _blocks(names, rows, shown, fits, width)
    if left_out:
        alike = [f"{names[i]} {rows[0][i]}" for i in left_out]
        for line in joined([f"the same for all: {alike[0]}", *alike[1:]], width):
            yield [(line, "dim")]


def _blocks(
    names: list[str], rows: list[list[str]], shown: list[int], fits: list[bool], width: int
) -> Iterator[list[Span]]:
    left = max(map(text_width, names))
    for row, does in zip(rows, fits, strict=True):
        title = f"{row[0]} at {row[1]}" if 1 in shown else row[0]
        yield [(title, "bold" if does else "yellow")]
        facts = [i for i in shown if i > 1]
        if len(rows) == 1:  # a single plan has space for one fact per line
            yield from ([(f"  {names[i]}{' ' * (left - text_width(names[i]))}  {row[i]}", "")] for i in facts)
        else:
            yield from ([(f"  {line}", "")] for line in joined([f"{names[i]} {row[i]}" for i in facts], width - 2))


def _cells(plan: FitPlan, size: object) -> Iterator[str]:
    assert callable(size)
    yield plan.profile
    yield f.count(plan.ctx)
    for n in (plan.weights, plan.kv, plan.draft, plan.base, plan.working, plan.loading, plan.total):
        yield size(n) if n else "–"
    yield "yes" if plan.fits else "no"
    yield f.count(plan.max_ctx) if plan.max_ctx else "–"


def _refused(plan: FitPlan, document: FitDocument, width: int) -> Iterator[list[Span]]:
    if plan.ctx > document.limit:
        why = f"{plan.profile} at {f.count(plan.ctx)}: the context limit is {f.count(document.limit)} tokens"
    else:
        size = f"needs {f.long_size(plan.needed)}, {f.long_size(plan.missing)} more than available"
        why = f"{plan.profile} at {f.count(plan.ctx)} {size}; the limit is {plan.binding}"
    yield from styled(why, width, "yellow")
    for change in plan.changes:
        tokens = f" at {f.count(change.ctx)}" if change.ctx != plan.ctx and "--ctx" not in change.type else ""
        takes = f"{f.long_size(change.total)}{tokens}"
        words = folded(change.type, width, len(TRY))
        is_wide = len(TRY) + text_width(words[-1]) + 3 + text_width(takes) >= width
        for i, line in enumerate(words):
            last = "" if is_wide or i < len(words) - 1 else f"   {takes}"
            yield [(" " * len(TRY) if i else TRY, "green"), (line, ""), (last, "dim")]
        if is_wide:
            yield [(f"{' ' * len(TRY)}{takes}", "dim")]
    if not plan.changes:
        yield [("  no single change makes it fit", "")]


def _foot(document: FitDocument) -> Iterator[str]:
    timed = [(plan, plan.speed) for plan in document.plans if plan.speed is not None]
    for plan, speed in timed:
        by = "" if speed.basis == "model" else " (from figures of this machine, not measured on this model)"
        yield (
            f"{plan.profile} at {f.count(plan.ctx)}: first token {f.seconds(speed.first_token)} at full context, then "
            f"{f.rate(speed.tok_s)} without drafting{by}"
        )
    if document.calibrated:
        yield f"calibrated {_age(document.calibrated)}"
    elif not timed:
        yield DESCRIBED if document.described else MEASURE
    gave: dict[str, list[str]] = {}
    for plan in document.plans:
        for change in _gave_way(plan, document):
            gave.setdefault(change, []).append(f"{plan.profile} at {f.count(plan.ctx)}")
    for change, names in gave.items():
        yield f"{', '.join(names) if len(names) < len(document.plans) else 'all'}: {change}"
    for plan in document.plans:
        if plan.budget is not None:
            yield f"{plan.profile} at {f.count(plan.ctx)}: {plan.budget.told}"
        away = [f"{f.long_size(n)} {_AWAY[where]}" for where, n in plan.kv_tiers.items() if where in _AWAY]
        if away:
            yield f"{plan.profile} at {f.count(plan.ctx)}: {' and '.join(away)} of KV are not in column kv"
        if plan.order == "layers":
            yield f"{plan.profile} at {f.count(plan.ctx)}: prefill runs {f.ORDERS[plan.order]}"
    if document.plans[0].runs:
        yield _past(document.plans[0])
    yield from (f"note: {note}" for note in document.notes)


def _gave_way(plan: FitPlan, document: FitDocument) -> Iterator[str]:
    """Yield notes on weights that do not fit on the device: their place, and what that costs."""
    if (quant := plan.chosen.get("load.quant")) == "none":
        yield "weights keep the quantization of their file; --quant int8 would need more memory"
    elif quant:
        yield f"weights quantized to {quant} to fit {document.device} (--quant none: not quantized, layers on the CPU)"
    split, n = plan.split, plan.chosen.get("load.experts_on_gpu")
    if n is not None or "load.embeddings" in plan.chosen or (split is not None and split.layers == split.of):
        what = "embeddings" if n is None else f"embeddings and experts (of all but {n} layers)"
        yield f"{f.long_size(plan.places.get('host', 0))} of {what} are in host memory (few of them are read)"
    if "load.head" in plan.chosen:
        yield f"output layer quantized to {plan.chosen['load.head']} to fit {document.device} (--set load.head=none)"
    if split is None or split.layers == split.of:
        return
    by = "" if split.basis == "machine" else " (assumed)"
    yield (
        f"{split.layers} of {split.of} layers on {document.device}, the first {split.of - split.layers} on the CPU: "
        f"{f.long_size(plan.places.get('host', 0))} of host memory, {f.seconds(split.seconds)} more per token "
        f"at {f.long_size(split.bandwidth)}/s{by}"
        f"{f'; all layers fit with {split.whole_with}' if split.whole_with else ''}"
    )


def _past(plan: FitPlan) -> str:
    assert plan.runs is not None
    low, high = plan.runs.low, plan.runs.high
    took = _beyond(low) if low == high else f"{_beyond(low)} to {_beyond(high)}"
    runs = f"Your last {f.count(plan.runs.runs)} runs of this model" if plan.runs.runs > 1 else "Your last run"
    added = f"so runtime is corrected to {_beyond(plan.correction)}" if plan.correction else "not corrected yet"
    return f"{runs} took {took} than estimated, {added}."


def _beyond(n: int) -> str:
    return f"{f.long_size(abs(n))} {'more' if n >= 0 else 'less'}"


def _age(date: str) -> str:
    days = age_days(date)
    return "today" if not days else "yesterday" if days == 1 else f"{days} days ago"


def calibration_lines(found: CalibrationDocument, width: int) -> list[str]:
    """Return measured speeds of a machine, then the pass times as a grid of contexts and rows."""
    gemm = [f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in found.gemm.items()]
    links = [f"{name.replace('_', ' ')} {f.long_size(rate)}/s" for name, rate in found.links.items()]
    facts = [
        found.cpu or found.device,
        f.plural(found.threads, "thread"),
        f"memory {f.long_size(found.bandwidth)}/s",
        *gemm,
        f"{found.launch * 1e6:.1f} µs per call",
        *links,
        f"disk {f.long_size(found.disk)}/s" if found.disk else "",
    ]
    return [*joined(facts, width), *(_grid(found, width) if found.model else []), *_doubt(found, width)]


def _doubt(found: CalibrationDocument, width: int) -> list[str]:
    """Return a note if pass times were disturbed. They are kept, because the machine may never be idle."""
    apart = median(p.high / p.low for p in found.model.passes) if found.model else 1.0
    if apart < STEADY:
        return []
    note = f"note: the slowest repetition of a pass took {apart:.1f}× its fastest; other programs may have been running"
    return folded(note, width)


def _grid(found: CalibrationDocument, width: int) -> Sequence[str]:
    assert found.model is not None
    return pass_grid(found.model.passes, width)


def pass_grid(passes: Sequence[PassTime], width: int) -> Sequence[str]:
    """Return one line per context: milliseconds of a pass by number of rows."""
    rows = sorted({p.rows for p in passes})
    times = {(p.context, p.rows): p.seconds for p in passes}
    table = [["ms per pass", *(f"{n} rows" if n > 1 else "1 row" for n in rows)]]
    for context in sorted({p.context for p in passes}):
        known = (times.get((context, n)) for n in rows)
        table.append([f"at {f.count(context)}", *("–" if t is None else f"{1000 * t:,.1f}" for t in known)])
    return turned(table, width)
