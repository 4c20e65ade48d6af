"""Charts of a benchmark report: speeds as bars, speed against memory, and lines over context lengths.

Positions are shares of the drawing's width, so that text keeps its size on a phone and on paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from kvcli.render.html import Markup, join, number, percent, plain, tag, ticks
from kvcli.render.terminal.tables import clip

HEIGHT = 300  # pixels of a plot
ROOM = 1.06  # margin factor between the farthest mark and the edge
NEAR = 17 / HEIGHT  # smallest vertical distance of labels: the height of a line
LETTER, GAP = 7 / 290, 9 / 290  # of the width of a plot on a phone: one character, and half a mark with its margin
LONGEST = 18  # characters of a label
SHAPES = {
    "circle": "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0z",
    "square": "M-5.5 -5.5h11v11h-11z",
    "triangle": "M0 -7l7 12h-14z",
    "diamond": "M0 -7.5l7.5 7.5l-7.5 7.5l-7.5 -7.5z",
    "flag": "M-7 -5h14l-7 12z",
    "cross": "M-2 -7h4v5h5v4h-5v5h-4v-5h-5v-4h5z",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A median with its lowest and highest value."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a bar chart. Without a span only the note is shown."""

    name: str | Markup
    note: str
    kind: str  # a class of the style sheet
    span: Span | None
    dots: Sequence[float] = ()
    title: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One mark of a scatter plot."""

    name: str
    x: float
    y: Span
    kind: str
    shape: str
    title: str


def bars(rows: Sequence[Bar], unit: str, marks: Sequence[tuple[float, str]], reference: float | None = None) -> Markup:
    """Draw bars from zero; the thin line is the range, dots are repetitions, the dashed line is the reference.

    `marks`: positions on the axis and their words, the ends of the axis first and last.
    """
    left, right = marks[0][0], marks[-1][0]

    def share(value: float) -> float:
        return (value - left) / (right - left)

    def line(value: float, kind: str, top: int = 0, bottom: int = 30) -> Markup:
        return tag("line", x1=percent(share(value)), x2=percent(share(value)), y1=top, y2=bottom, class_=kind)

    def drawn(row: Bar) -> Markup:
        inner = [line(mark, "base" if left < mark == 0 else "grid") for mark, _ in marks]
        if (span := row.span) is not None:
            at, width = share(min(0.0, span.median)), abs(span.median) / (right - left)
            inner.append(
                tag("rect", x=percent(at), y=5, width=percent(width), height=20, rx=2, class_=f"fill {row.kind}")
            )
            if span.low < span.high:
                low, high = percent(share(span.low)), percent(share(span.high))
                inner.append(tag("line", x1=low, x2=high, y1=15, y2=15, class_="range"))
                inner += [line(end, "range", 10, 20) for end in (span.low, span.high)]
            inner += [tag("circle", cx=percent(share(dot)), cy=15, r=2, class_="dot") for dot in row.dots]
        inner += [] if reference is None else [line(reference, "ref")]
        picture = tag("svg", tag("title", row.title), inner, role="img", aria_label=row.title)
        return tag(
            "div", tag("span", row.name, class_="name"), picture, tag("span", row.note, class_="note"), class_="bar"
        )

    words = [
        tag("text", word, x=percent(share(mark)), y=14, class_="tick", text_anchor=_anchor(share(mark)))
        for mark, word in marks
    ]
    foot = [tag("span", unit, class_="unit"), tag("svg", words, class_="axis", aria_hidden="true")]
    return tag("div", map(drawn, rows), tag("div", *foot, class_="bar foot"), class_="bars")


def from_zero(rows: Sequence[Bar], reference: float | None) -> list[tuple[float, str]]:
    """Return round marks from zero to beyond the longest bar and the reference."""
    return [(m, f"{m:,g}") for m in ticks(max([*(row.span.high for row in rows if row.span), reference or 0.0]))]


def scatter(points: Sequence[Point], x_label: str, y_label: str) -> Markup:
    """Draw a scatter plot with both axes from zero; the line through each mark is its range."""
    across, up = ticks(ROOM * max(p.x for p in points)), ticks(max(p.y.high for p in points))
    drawn = [*_grid_x([(m / across[-1], f"{m:,g}") for m in across]), *_grid_y(up)]
    names = [clip(plain(p.name), LONGEST) for p in points]
    places = [(p.x / across[-1], 1 - p.y.median / up[-1]) for p in points]
    sides = _sides([(*place, name) for place, name in zip(places, names, strict=True)])
    for point, name, place, (dx, dy, anchor) in zip(points, names, places, sides, strict=True):
        x, y = map(percent, place)
        low, high = percent(1 - point.y.low / up[-1]), percent(1 - point.y.high / up[-1])
        drawn.append(tag("line", x1=x, x2=x, y1=low, y2=high, class_=f"spread {point.kind}"))
        drawn.append(mark(point.shape, f"fill {point.kind}", x, y, point.title))
        drawn.append(tag("text", name, x=x, y=y, dx=dx, dy=dy, text_anchor=anchor))
    return _plot(drawn, x_label, y_label, "; ".join(p.title for p in points))


def _sides(points: Sequence[tuple[float, float, str]]) -> list[tuple[int, int, str]]:
    """Return the offset of each label from its mark: (dx, dy in pixels, anchor).

    An overlapping label moves to the other side, then down. Overlaps are computed for the width of a phone.
    """
    taken: list[tuple[float, float, float]] = []  # left, right, height
    taken += [(x - GAP, x + GAP, y) for x, y, _ in points]
    found: dict[int, tuple[int, int, str]] = {}
    for i in sorted(range(len(points)), key=lambda i: points[i][1]):
        x, y, name = points[i]
        width = LETTER * len(name)
        right, left = (x + GAP, x + GAP + width), (x - GAP - width, x - GAP)
        sides = [side for side in (right, left) if side[0] > 0 and side[1] <= 1.04] or [left if x > 0.5 else right]
        steps = (y + step * NEAR / 4 for step in range(40 * len(points)))
        spots = ((side, at) for at in steps for side in sides if _is_free(side, at, taken))
        side, at = next(spots, (sides[0], y))
        taken.append((*side, at))
        found[i] = (11, 0, "start") if side is right else (-11, 0, "end")
        found[i] = (found[i][0], round((at - y) * HEIGHT) + 4, found[i][2])
    return [found[i] for i in range(len(points))]


def _is_free(side: tuple[float, float], at: float, taken: Sequence[tuple[float, float, float]]) -> bool:
    return not any(side[0] < right and left < side[1] and abs(at - y) < NEAR for left, right, y in taken)


def lines(series: Mapping[str, Sequence[tuple[int, Span]]], x_label: str, y_label: str) -> Markup:
    """Draw one line per side over context lengths on a logarithmic x axis; y starts at zero."""
    lengths = sorted({x for points in series.values() for x, _ in points})
    up = ticks(max(span.high for points in series.values() for _, span in points))
    first, whole = log2(lengths[0]), log2(lengths[-1]) - log2(lengths[0])

    def across(x: int) -> str:
        return percent(0.04 + 0.92 * ((log2(x) - first) / whole if whole else 0.5))

    def height(value: float) -> str:
        return percent(1 - value / up[-1])

    drawn = [*_grid_y(up)]
    drawn += [tag("text", f"{n:,}", x=across(n), y="100%", dy=18, class_="tick", text_anchor="middle") for n in lengths]
    look = {name: _look(i) for i, name in enumerate(series)}
    for name, points in series.items():
        shape, kind = look[name]
        for (x1, a), (x2, b) in pairwise(points):
            places = {"x1": across(x1), "y1": height(a.median), "x2": across(x2), "y2": height(b.median)}
            drawn.append(tag("line", **places, class_=f"line {kind}"))
        for x, span in points:
            place = {"x1": across(x), "x2": across(x), "y1": height(span.low), "y2": height(span.high)}
            drawn.append(tag("line", **place, class_=f"spread {kind}"))
            title = f"{name}, {x:,} tokens: {number(span.median)} ({number(span.low)}–{number(span.high)})"
            drawn.append(mark(shape, f"fill {kind}", across(x), height(span.median), title))
    key = legend([(name, *look[name]) for name in series])
    return join([_plot(drawn, x_label, y_label, f"{y_label} by context length"), key])


def _look(i: int) -> tuple[str, str]:
    """Return shape and class of a side; once all colours are used, they repeat with other shapes."""
    n = len(SHAPES)
    return list(SHAPES)[(i + i // n) % n], f"s{i % n}"


def legend(entries: Sequence[tuple[str, str, str]]) -> Markup:
    """Draw entries (words, shape, class) in one line."""
    keys = [
        tag("li", tag("svg", mark(shape, f"fill {kind}", "9", "9", ""), class_="key", aria_hidden="true"), words)
        for words, shape, kind in entries
    ]
    return tag("ul", keys, class_="legend")


def mark(shape: str, kind: str, x: str, y: str, title: str) -> Markup:
    """Draw a shape at a position, with a title on hover."""
    inner = [tag("title", title)] if title else []
    return tag("svg", tag("path", *inner, d=SHAPES[shape], class_=kind), x=x, y=y, overflow="visible")


def _plot(drawn: Sequence[str], x_label: str, y_label: str, words: str) -> Markup:
    picture = tag("svg", drawn, class_="area", role="img", aria_label=words, height=HEIGHT)
    head, foot = tag("div", y_label, class_="ylabel"), tag("div", x_label, class_="xlabel")
    return tag("div", head, picture, foot, class_="plot")


def _grid_x(marks: Sequence[tuple[float, str]]) -> list[str]:
    drawn: list[str] = [tag("line", x1=percent(x), x2=percent(x), y1=0, y2="100%", class_="grid") for x, _ in marks]
    return drawn + [
        tag("text", words, x=percent(x), y="100%", dy=18, class_="tick", text_anchor="middle") for x, words in marks
    ]


def _grid_y(marks: Sequence[float]) -> list[str]:
    drawn = list[str]()
    for m in marks:
        y = percent(1 - m / marks[-1])
        drawn.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="base" if m == 0 else "grid"))
        drawn.append(tag("text", f"{m:,g}", x=0, dx=-7, y=y, dy=4, class_="tick", text_anchor="end"))
    return drawn


def _anchor(share: float) -> str:
    return "start" if share < 0.01 else "end" if share > 0.99 else "middle"
