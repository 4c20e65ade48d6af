"""Numbers of lines in the margin, as manuscripts and listings have them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvcli.documents.lines import Block, Piece, is_fixed, rows, runs_on

FEW = 3  # numbers that make a series
MOST = 0.8  # share of them that must count on by one step


def line_numbers(pieces: Sequence[Piece]) -> set[int]:
    """The ids of the pieces that count lines: alone in a strip of the page, by one step, beside text that runs on.

    The numbers of a table's rows, of a form's entries or of a contents stand beside lines that each begin anew.
    """
    strips: list[list[Piece]] = []
    for piece in sorted((p for p in pieces if p.text.isdecimal() and len(p.text) < 5), key=lambda p: p.x0):
        if strips and piece.x0 < max(p.x1 for p in strips[-1]):
            strips[-1].append(piece)
        else:
            strips.append([piece])
    found: set[int] = set()
    for strip in (sorted(strip, key=lambda p: p.y0) for strip in strips if len(strip) >= FEW):
        left, right = min(p.x0 for p in strip), max(p.x1 for p in strip)
        own = {id(p) for p in strip} | found
        beside = [p for p in pieces if strip[0].y0 <= p.middle <= strip[-1].y1 and id(p) not in own]
        if not any(p.x0 < right and p.x1 > left for p in beside) and _counts(strip, rows(beside)):
            found |= own
    return found


def _counts(strip: Sequence[Piece], text: Block) -> bool:
    """Whether the numbers go up by one step, that of the rows beside them."""
    steps = [int(b.text) - int(a.text) for a, b in itertools.pairwise(strip)]
    step = max(steps, key=steps.count)
    if step < 1 or steps.count(step) < MOST * len(steps):
        return False
    if step > 1:
        return abs(len(text) - 1 - step * len(steps)) <= 0.2 * len(text)
    return runs_on(text) or sum(is_fixed(row[0]) for row in text) > MOST * len(text)
