"""Find line numbers in the margin, as in manuscripts and listings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvcli.documents.reading_order import Block, LinePiece, is_fixed, rows, running_on
from kvcli.documents.superscripts import joined

FEW = 3  # fewest numbers in a series
PROSE = 0.2  # share of the text lines beside them that must run on into the next line
MANUSCRIPT = 0.5  # the same share for lines in monospaced letters, which may be code
MOST = 0.8  # share of the numbers that must increase by one common step


def line_numbers(pieces: Sequence[LinePiece]) -> set[int]:
    """Return ids of line numbers: alone in a strip of the page, counting by one step, beside running text.

    Numbers of table rows, form entries or a table of contents are excluded: the lines beside them do not run on.
    """
    numbers = [p for p in pieces if p.text.isdecimal() and len(p.text) < 5]
    strips: list[list[LinePiece]] = []
    for number in sorted(numbers, key=lambda p: p.x0):
        if strips and number.x0 < max(p.x1 for p in strips[-1]):
            strips[-1].append(number)
        else:
            strips.append([number])
    found: set[int] = set()
    for strip in (sorted(strip, key=lambda p: p.base) for strip in strips if len(strip) >= FEW):
        left, right = min(p.x0 for p in strip), max(p.x1 for p in strip)
        own = found | {id(p) for p in strip}
        gone = own | {id(p) for p in pieces if not strip[0].y0 <= p.middle <= strip[-1].y1}
        is_alone = not any(p.x0 < right and p.x1 > left for p in pieces if id(p) not in gone)
        if is_alone and _counts(strip, rows(joined(pieces, gone))):
            found = own
    return found


def _counts(strip: Sequence[LinePiece], text: Block) -> bool:
    """True if the numbers increase by one step that matches the lines beside them."""
    steps = [int(b.text) - int(a.text) for a, b in itertools.pairwise(strip)]
    step = max(steps, key=steps.count)
    if step < 1 or not text or steps.count(step) < MOST * len(steps):
        return False
    if step > 1:
        return abs(len(text) - 1 - step * len(steps)) <= 0.2 * len(text)
    is_code = sum(is_fixed(row[0]) for row in text) > len(text) / 2
    return running_on(text) > (MANUSCRIPT if is_code else PROSE)
