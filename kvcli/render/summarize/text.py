"""Summary as plain text: no markup, lines of limited width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.render.terminal.terminal import fold

if TYPE_CHECKING:
    from kvcli.summarize.result import Point

WIDTH = 80  # columns without a terminal


def plain_text(points: Sequence[Point], width: int = WIDTH) -> str:
    """Return the points as text; the text of more points begins with the text of fewer points."""
    lines: list[str] = []
    running = ""  # a paragraph that may still grow
    for i, point in enumerate(points):
        if point.kind == "sentence":
            goes_on = bool(running) and not point.opens
            if not goes_on:
                lines += _paragraph(running, width) + ([""] if i else [])
            running = f"{running} {point.marked}" if goes_on else point.marked
        else:
            lines += _paragraph(running, width)
            running = ""
            lines += _item(point, width, is_first=not lines)
        quotes = [" ".join(cite.quote.text.split()) for cite in point.cites if cite.quote]
        if quotes:
            lines += _paragraph(running, width)
            running = ""
        for quote in quotes:
            pad = "  " * (point.level + 2)
            lines += _hung(pad, f'"{quote}"', width)
    lines += _paragraph(running, width)
    return "\n".join(lines) + "\n" if lines else ""


def _item(point: Point, width: int, *, is_first: bool) -> list[str]:
    if point.kind == "heading":
        return [*([] if is_first else [""]), *_hung("", point.marked, width)]
    return _hung("  " * point.level + "- ", point.marked, width)


def _paragraph(text: str, width: int) -> list[str]:
    return _hung("", text, width) if text else []


def _hung(first: str, text: str, width: int) -> list[str]:
    """Return lines with a hanging indent."""
    rows = fold(text, max(20, width - len(first)))
    return [(first if i == 0 else " " * len(first)) + row.rstrip() for i, row in enumerate(rows)]
