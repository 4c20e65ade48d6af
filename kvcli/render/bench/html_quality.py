"""Quality suite in the HTML report of a benchmark: loss of each profile against the full cache, by task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.render import quality as q
from kvcli.render.bench.charts import Bar, Span, bars
from kvcli.render.html import Markup, data_table, join, tag

if TYPE_CHECKING:
    from kvcli.schemas.bench import BenchDocument
    from kvcli.schemas.quality import Difference, QualityDocument, QualityRow

LEAST = 0.1  # smallest range of the axis, so that noise does not fill it
KINDS = {
    "kept": ("no significant loss in the quality suite", "circle"),
    "lost": ("lower score", "triangle"),
    "unasked": ("quality not measured", "cross"),
}


def kind(asked: QualityDocument, profile: str) -> str:
    """Return `lost` if the interval of the mean is below zero, `unasked` for a side without scores, or else `kept`."""
    row = next((row for row in asked.rows if row.profile == profile and row.role != "control"), None)
    if row is None:
        return "unasked"
    return "lost" if row.difference is not None and _class(row.difference) == "slower" else "kept"


def panel(document: BenchDocument) -> Markup:
    """Return the quality section, or nothing if quality was not measured."""
    asked = document.quality
    if asked is None:
        return Markup("")
    parts: list[str] = [tag("h2", "Quality"), _lead(asked)]
    reach = _reach(asked)
    parts += [_row(row, reach) for row in asked.rows if row.difference is not None]
    parts.append(tag("ul", [tag("li", note) for note in q.notes(asked)], class_="legendtext"))
    parts += [
        tag("details", tag("summary", heading), data_table(lines[0], lines[1:])) for heading, lines in q.tables(asked)
    ]
    return tag("section", *parts)


def _lead(asked: QualityDocument) -> Markup:
    """Return the worst task of each profile, in words."""
    lines = []
    for row in asked.rows:
        if row.role != "control":
            name, lost = tag("b", row.profile), row.worst.difference
            if lost is not None and lost >= 0:
                lines.append(tag("li", name, f": mean {row.mean:.2f}, no task below the full cache"))
                continue
            said = f" ({row.worst.score:.2f}{'' if lost is None else f', {lost:+.2f}'})"
            rank = "lowest at " if lost is None else "worst at "
            lines.append(tag("li", name, f": mean {row.mean:.2f}, {rank}", tag("b", row.worst.task), said))
    return tag("ul", lines, class_="worst")


def _reach(asked: QualityDocument) -> float:
    """Return one scale for all lines, symmetric around zero."""
    found = [
        d for row in asked.rows for d in (row.difference, *(task.difference for task in row.tasks)) if d is not None
    ]
    ends = [abs(x) for d in found for x in (d.mean, d.low, d.high) if x is not None]
    return max([LEAST, *ends])


def _row(row: QualityRow, reach: float) -> Markup:
    role = " (control)" if row.role == "control" else ""
    title = tag("h3", f"{row.profile}{role}, keeps {row.kept:.0%} of the KV cache")
    compared = [(task, task.difference) for task in row.tasks if task.difference is not None]
    if not any(x for _, d in compared for x in (d.mean, d.low, d.high)):
        return tag("div", title, tag("p", "all tasks have the score of the full cache"), class_="keep")
    worst = row.worst.task if row.worst.difference else ""
    lines = [_bar(task.task, task.mean, difference, task.task == worst) for task, difference in compared]
    if row.difference is not None:
        lines.append(_bar("mean of all tasks", row.mean, row.difference, is_worst=False))
    marks = [(-reach, f"−{reach:.2f}"), (0.0, "0, as the full cache"), (reach, f"+{reach:.2f}")]
    return tag("div", title, bars(lines, "score − full", marks), class_="keep")


def _bar(name: str, score: float, difference: Difference, is_worst: bool) -> Bar:
    low, high, mean = difference.low, difference.high, difference.mean
    said = f"{mean:+.2f}" + ("" if low is None or high is None else f" ({low:+.2f} to {high:+.2f})")
    label = join([name, tag("span", "worst task", class_="flag")]) if is_worst else name
    span = Span(mean, mean if low is None else low, mean if high is None else high)
    title = f"{name}: score {score:.2f}, {said} against the full cache"
    return Bar(label, f"{score:.2f} · {said}", _class(difference), span, title=title)


def _class(difference: Difference) -> str:
    """Return the class of a bar: `slower` is the colour of a loss whose interval excludes zero."""
    if difference.high is not None and difference.high < 0:
        return "slower"
    return "faster" if difference.low is not None and difference.low > 0 else "alike"
