"""Quality suite as tables and short notes."""

from __future__ import annotations

from collections.abc import Iterator

from kvcli.render.report import NONE, Block, ReportTable, Text
from kvcli.render.terminal.terminal import count, percent
from kvcli.schemas.quality import AgreementDocument, Difference, Estimate, McNemar, QualityDocument, QualityRow

NOTHING = 0.05  # highest mean score of the full cache at which a task counts as too hard for the model
SMALL = 0.001  # smaller p are printed as below this value


def table(document: QualityDocument) -> list[list[str]]:
    """Return a header and one line per profile: mean, difference to the full cache with interval, worst task."""
    head = ["profile", "kept", "mean", "vs full", "95 %", "p", "worst task", "score"]
    return [head, *(_line(row) for row in document.rows)]


def by_task(document: QualityDocument) -> list[list[str]]:
    """Return one line per task and one column per profile; the last line is the mean."""
    head = ["task", "n", *(_name(row) for row in document.rows)]
    first = document.rows[0]
    body = [
        [task.task, count(task.questions), *(_score(row.tasks[i].mean) for row in document.rows)]
        for i, task in enumerate(first.tasks)
    ]
    total = ["mean", count(sum(t.questions for t in first.tasks)), *(_score(row.mean) for row in document.rows)]
    return [head, *body, total]


def grid(row: QualityRow) -> list[list[str]]:
    """Return the passkey grid of one profile: lengths by depths; empty without the task."""
    if not row.passkey:
        return []
    depths = sorted({cell.depth for cell in row.passkey})
    score = {(cell.length, cell.depth): _score(cell.score) for cell in row.passkey}
    lengths = sorted({cell.length for cell in row.passkey})
    lines = [[count(n), *(score.get((n, depth), NONE) for depth in depths)] for n in lengths]
    return [["tokens", *(f"at {percent(depth)}" for depth in depths)], *lines]


def turns(document: QualityDocument) -> list[list[str]]:
    """Return scores of late questions by turn of the conversation; empty without the task."""
    if not document.rows[0].turns:
        return []
    head = ["turn", *(str(turn.turn) for turn in document.rows[0].turns)]
    return [head, *([_name(row), *(_score(turn.score) for turn in row.turns)] for row in document.rows)]


def agreement_table(document: AgreementDocument) -> list[list[str]]:
    """Return a line per profile: share of equal first choices, KL and added nats per token, each with its interval."""
    head = ["profile", "kept", "agree", "95 %", "KL", "95 %", "ΔNLL", "95 %"]
    lines = []
    for row in document.rows:
        name = row.profile + (" (control)" if row.role == "control" else "")
        share = [percent(row.agreement.mean), _interval(row.agreement, "{:.0%}")]
        nats = [text for e in (row.kl, row.delta_nll) for text in (f"{e.mean:.3f}", _interval(e, "{:.3f}"))]
        lines.append([name, percent(row.kept), *share, *nats])
    return [head, *lines]


def notes(document: QualityDocument) -> list[str]:
    """Return notes on the numbers for the reader, one line each."""
    args, full = document.args, document.rows[0]
    moment = "after the question is in the prompt" if args.query_visible else "before the question is in the prompt"
    lengths = ", ".join(count(n) for n in args.lengths)
    lines = [
        f"{count(document.contexts)} contexts of {lengths} tokens, seed {args.seed}; compressed {moment}",
        f"controls keep {args.budget}: random keeps random tokens, streaming the newest",
        "vs full = mean score minus that of the full cache on the same contexts, with its 95 % bootstrap interval",
    ]
    beyond = [task.task for task in full.tasks if task.mean <= NOTHING]
    if beyond:
        lines.append(f"too hard for this model even with the full cache, so not comparable: {', '.join(beyond)}")
    whole = [row for row in document.rows if row.role == "profile" and row.kept > 0.995]
    if whole:
        names = ", ".join(_name(row) for row in whole)
        lines.append(f"{names} evicted no tokens at these lengths; --quality-lengths sets longer texts")
    if any(row.difference and row.difference.low is None for row in document.rows):
        lines.append("no intervals: they need at least two contexts per task and length")
    if not document.complete:
        lines.append("stopped before the end: scores cover the contexts that all profiles completed")
    return lines


def _line(row: QualityRow) -> list[str]:
    worst = row.worst
    lost = "" if worst.difference is None else f" ({worst.difference:+.2f})"
    return [
        _name(row),
        percent(row.kept),
        _score(row.mean),
        NONE if row.difference is None else f"{row.difference.mean:+.2f}",
        _interval(row.difference),
        _p(row.mcnemar),
        worst.task,
        _score(worst.score) + lost,
    ]


def _name(row: QualityRow) -> str:
    return row.profile + (" (control)" if row.role == "control" else "")


def _score(share: float) -> str:
    return f"{share:.2f}"


def _interval(of: Difference | Estimate | None, form: str = "{:+.2f}") -> str:
    if of is None or of.low is None or of.high is None:
        return NONE
    return f"{form.format(of.low)} … {form.format(of.high)}"


def _p(test: McNemar | None) -> str:
    if test is None:
        return NONE
    return f"< {SMALL}" if test.p < SMALL else f"{test.p:.3f}"


def tables(document: QualityDocument) -> list[tuple[str, list[list[str]]]]:
    """Return all non-empty tables with their headings."""
    grids = [(f"passkey, {_name(row)}: length by depth", grid(row)) for row in document.rows]
    found = [("quality", table(document)), ("by task", by_task(document)), *grids]
    found.append(("late questions, by turn", turns(document)))
    if document.agreement is not None:
        found.append(("agreement with the full cache", agreement_table(document.agreement)))
    return [(heading, lines) for heading, lines in found if lines]


def blocks(document: QualityDocument) -> Iterator[Block]:
    """Yield all tables, then the notes."""
    for heading, lines in tables(document):
        yield Text("heading", heading)
        yield ReportTable(lines)
    yield from (Text("item", note) for note in notes(document))
