"""Render a benchmark as one HTML file that is complete and loads no other resource."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from kvcli.render.bench import charts
from kvcli.render.bench import html_quality as quality
from kvcli.render.bench import text as b
from kvcli.render.html import Markup, bullets, cards, data_table, join, number, page, section, tag
from kvcli.render.report import NONE
from kvcli.render.terminal.terminal import long_size
from kvcli.schemas.bench import BenchArgs, BenchDocument, BenchRow, Ratio

_TEXT = {
    "base": ("the baseline", "square"),
    "same": ("identical text", "circle"),
    "tie": ("difference explained by rounding", "diamond"),
    "differs": ("different text", "triangle"),
    "unknown": ("texts not compared", "cross"),
}
_KINDS = _TEXT | quality.KINDS


def html(document: BenchDocument) -> str:
    """Return the HTML page of a document."""
    title = tag("header", tag("h1", document.model.id), tag("p", b.heading(document), class_="sub"))
    parts = [_warnings(document), _glance(document), _headline(document)]
    parts += [_block(document, rows) for rows in b.cases(document).values()]
    parts += [_over_contexts(document), quality.panel(document), _checks(document), _fine_print(document)]
    return page(f"{document.model.id}: kvcli bench", ["bench_report.css"], title, *parts)


# ---- at a glance ----


def _warnings(document: BenchDocument) -> Markup:
    said = [*([] if document.complete else ["stopped before the end"]), *document.notes]
    failed = [check for check in document.checks if check.failed]
    if failed:
        said.insert(0, f"{len(failed)} of {len(document.checks)} checks failed")
    return bullets(said, "warnings")


def _glance(document: BenchDocument) -> Markup:
    """Show four facts about the longest context of the first workload."""
    if not document.rows:
        return Markup("")
    workload = document.rows[0].workload
    ctx = max(row.ctx for row in document.rows if row.workload == workload)
    rows = b.cases(document)[ctx, workload]
    return section(f"{workload}, {ctx:,} tokens", cards(_facts(document, rows)))


def _facts(document: BenchDocument, rows: Sequence[BenchRow]) -> Iterator[tuple[str, str, str]]:
    ranked = sorted((row for row in rows if row.median.tok_s), key=lambda row: -(row.median.tok_s or 0))
    for what, row in zip(("Fastest decoding", "Slowest decoding"), (ranked[:1], ranked[-1:]), strict=True):
        for side in row:
            yield (
                what,
                side.profile,
                f"{number(side.median.tok_s or 0)} tok/s, {_times(side, document, document.baseline)}",
            )
    held = sorted((row for row in rows if row.kv_bytes), key=lambda row: row.kv_bytes or 0)
    if held:
        small, large = held[0].kv_bytes or 0, held[-1].kv_bytes or 0
        alike = [row.profile for row in held if row.kv_bytes == small]
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        yield ("Smallest KV cache", alike[0] + more, f"{long_size(small)}; the largest has {long_size(large)}")
    compared = [row for row in rows if row.same is not None]
    if compared:
        equal = sum(row.same is not None and row.same.share == 1 for row in compared)
        yield "Identical text", f"{equal} of {len(compared)}", f"produce the same tokens as {document.baseline}"


def _headline(document: BenchDocument) -> Markup:
    """Show the speed of each side in each block, and its ratio to the baseline."""
    blocks = b.cases(document)
    many = len({workload for _, workload in blocks}) > 1
    head = [f"{workload} {ctx:,}" if many else f"{ctx:,} tokens" for ctx, workload in blocks]
    held = {(row.profile, row.ctx, row.workload): row for row in document.rows}
    names = dict.fromkeys(row.profile for row in document.rows)
    lines = [[name, *(_headline_cell(held.get((name, *block)), document) for block in blocks)] for name in names]
    text = tag("p", b.legend(document, b.filled(document.rows, document)), class_="legendtext")
    return section("Decoding, tokens per second", data_table(["", *head], lines), text)


def _headline_cell(row: BenchRow | None, document: BenchDocument) -> Markup:
    if row is None or row.median.tok_s is None:
        return tag("span", NONE if row is None or row.error is None else "failed", class_="faint")
    kind = _verdict(row, document)
    return join([tag("b", number(row.median.tok_s)), " ", tag("span", _times(row, document), class_=f"verdict {kind}")])


def _verdict(row: BenchRow, document: BenchDocument) -> str:
    """Return the style sheet class of a line."""
    if row.profile == document.baseline:
        return "base"
    return {"faster": "faster", "slower": "slower"}.get(row.ratio.tok_s.verdict if row.ratio.tok_s else "", "alike")


def _times(row: BenchRow, document: BenchDocument, of: str = "") -> str:
    if row.profile == document.baseline:
        return "the baseline"
    return _ratio(row.ratio.tok_s, of)


def _ratio(ratio: Ratio | None, of: str) -> str:
    """Return `▲ 1.80 × hf (1.71–1.88)`, or only the range if it contains 1."""
    if ratio is None:
        return NONE
    between = f"({b.range_words(ratio)})"
    sign = {"faster": "▲", "slower": "▼"}.get(ratio.verdict)
    words = [sign, f"{ratio.median:.2f} ×", of, between] if sign else ["≈", of, between]
    return " ".join(word for word in words if word)


# ---- one context and workload ----


def _block(document: BenchDocument, rows: Sequence[BenchRow]) -> Markup:
    base = next((row.median.tok_s for row in rows if row.profile == document.baseline), None)
    lines = [_bar(row, document) for row in rows]
    drawn = [charts.bars(lines, "tok/s", charts.from_zero(lines, base), base)]
    if any(row.median.tok_s for row in rows):
        drawn.append(tag("p", "bar: median · thin line: lowest to highest · dots: repetitions · dashed: ",
                         document.baseline, class_="legendtext"))  # fmt: skip
    left = tag("div", tag("h3", "Decoding speed"), drawn)
    head, *table = b.cells(rows, document, b.filled(rows, document))
    both = tag("div", left, _memory(document, rows), class_="pair")
    title = f"{rows[0].workload} · {rows[0].ctx:,} tokens, {rows[0].new:,} of them new"
    return section(title, both, data_table(["", *head[1:]], table))


def _span(row: BenchRow, figure: str) -> charts.Span | None:
    at = [getattr(holder, figure) for holder in (row.median, row.low, row.high)]
    return None if None in at else charts.Span(*at)


def _bar(row: BenchRow, document: BenchDocument) -> charts.Bar:
    span = _span(row, "tok_s")
    if span is None:
        return charts.Bar(row.profile, row.error or "no figures", "base", None, (), f"{row.profile}: no figures")
    note = f"{number(span.median)} · {_times(row, document)}"
    title = f"{row.profile}: {note}, lowest {number(span.low)}, highest {number(span.high)} tok/s"
    return charts.Bar(row.profile, note, _verdict(row, document), span, [x for x in row.samples.tok_s if x], title)


def _memory(document: BenchDocument, rows: Sequence[BenchRow]) -> Markup:
    """Plot speed against memory, coloured by quality or by agreement with the baseline's text."""
    points, absent, used = [], list[str](), dict[str, None]()
    for row in rows:
        span = _span(row, "tok_s")
        if span is None or row.kv_bytes is None:
            absent.append(row.profile)
            continue
        kind = _kind(document, row)
        words, shape = _KINDS[kind]
        used[kind] = None
        title = f"{row.profile}: {number(span.median)} tok/s, KV cache {long_size(row.kv_bytes)}, {words}"
        points.append(charts.Point(row.profile, row.kv_bytes / 2**20, span, kind, shape, title))
    if not points:
        return Markup("")
    key = charts.legend([(*_KINDS[kind], kind) for kind in used])
    rest = (
        [tag("p", f"not drawn, because the memory is not known: {', '.join(absent)}", class_="legendtext")]
        if absent
        else []
    )
    picture = charts.scatter(points, "KV cache, MiB", "tok/s; up and to the left is better")
    return tag("div", tag("h3", "Speed and memory"), picture, key, rest)


def _kind(document: BenchDocument, row: BenchRow) -> str:
    """Return the mark of a line by measured quality, or else by its text; one chart never mixes both."""
    if row.profile == document.baseline:
        return "base"
    if document.quality is not None:
        return quality.kind(document.quality, row.profile)
    if row.same is None:
        return "unknown"
    return "same" if row.same.share == 1 else "tie" if row.same.near_tie else "differs"


# ---- over contexts ----


def _over_contexts(document: BenchDocument) -> Markup:
    """Draw one chart per workload and figure, if several context lengths were measured."""
    drawn = []
    for workload in dict.fromkeys(row.workload for row in document.rows):
        for figure, words in (("tok_s", "decoding, tok/s"), ("first_token", "first token, seconds")):
            series: dict[str, list[tuple[int, charts.Span]]] = {}
            for row in sorted((row for row in document.rows if row.workload == workload), key=lambda row: row.ctx):
                if (span := _span(row, figure)) is not None:
                    series.setdefault(row.profile, []).append((row.ctx, span))
            if len({ctx for points in series.values() for ctx, _ in points}) > 1:
                picture = charts.lines(series, "context, tokens (logarithmic)", words)
                drawn.append(tag("div", tag("h3", f"{workload}: {words.partition(',')[0]}"), picture))
    return section("Over context lengths", tag("div", drawn, class_="pair")) if drawn else Markup("")


# ---- checks, command, machine, and setup of each side ----


def _checks(document: BenchDocument) -> Markup:
    if not document.checks:
        return Markup("")
    lines = [
        [f"{check.expression}", check.profile, f"{check.workload} {check.ctx:,}",
         NONE if check.value is None else number(check.value), "failed" if check.failed else "passed"]
        for check in document.checks
    ]  # fmt: skip
    return section("Checks", data_table(["--fail-if", "profile", "at", "value", "result"], lines))


def _fine_print(document: BenchDocument) -> Markup:
    env, model = document.env, document.model
    load = [
        f"{list_[0]:.2f} {when}" for list_, when in ((env.load_before, "before"), (env.load_after, "after")) if list_
    ]
    facts = {
        "machine": " · ".join([env.cpu or "", *env.gpus, f"{env.cores} cores", b.threads(document)]).strip(" ·"),
        "system": f"{env.system}, {long_size(env.memory_total)} of memory",
        "load": ", ".join(load) + ("" if env.quiet is not False else " (other programs were running)"),
        "model": f"{model.id}, {model.family}, {model.parameters:,} parameters, {model.dtype}, quant {model.quant}",
        "versions": ", ".join(f"{name} {found}" for name, found in env.versions.items() if found),
        "commit": env.commit or NONE,
        "date": env.date,
    }
    command = tag("pre", tag("code", f"$ {command_of(document)}"), tabindex="0")
    differences = [tag("li", line) for line in b.differences(document)]
    texts = [tag("h3", "First differences of texts"), tag("ul", differences)] if differences else []
    setups = {row.profile: row.setup for row in document.rows}
    sides = [tag("details", tag("summary", name), _pairs(setup)) for name, setup in setups.items()]
    return section("What was measured", command, _pairs(facts), texts, tag("h3", "Sides"), *sides)


def _pairs(facts: dict[str, str]) -> Markup:
    return tag("dl", [join([tag("dt", name), tag("dd", value)]) for name, value in facts.items()])


def command_of(document: BenchDocument) -> str:
    """Return the command that repeats this measurement, with defaults spelled out."""
    args, options = document.args, list[str]()
    for name, value in args:
        flag = f"--{name.replace('_', '-')}"
        if name in ("model", "profiles", "named", "current", "temperature"):
            continue  # of `_profiles` and --set
        elif name in ("interleave", "memory"):  # on without a flag
            options += [] if value else [f"--no-{name}"]
        elif name in ("ctx", "workloads"):
            options += [flag.removesuffix("s"), ",".join(map(str, value))]
        elif isinstance(value, list):
            options += [word for one in value for word in (flag.removesuffix("s"), one)]
        elif value is not None and value is not False:
            options += [flag] if value is True else [flag, str(value)]
    return shlex.join(["kvcli", "bench", args.model, *_profiles(args), *options])


def _profiles(args: BenchArgs) -> list[str]:
    """Return the profile options as the user named them.

    Varied entries have names of their own, and `--set` does not apply to an `exact` that the user did not name.
    """
    if args.named:
        return ["--profiles", ",".join(args.named)]
    if args.vary or args.set:
        return ["-P", args.current] if args.current else []
    return ["--profiles", ",".join(args.profiles)]
