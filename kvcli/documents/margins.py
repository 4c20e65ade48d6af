"""Numbers of lines in the margin, as manuscripts and listings have them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvcli.documents.lines import Block, Piece, is_fixed, rows, running_on
from kvcli.documents.raised import Part, joined, without

FEW = 3  # numbers that make a series
PROSE = 0.2  # share of the rows beside them that must go on in the next
MANUSCRIPT = 0.5  # and of rows in letters of one width, which may be code
MOST = 0.8  # share of them that must count on by one step


def line_numbers(parts: Sequence[Part]) -> set[int]:
    """The ids of the parts that count lines: alone in a strip of the page, by one step, beside text that runs on.

    The numbers of a table's rows, of a form's entries or of a contents stand beside lines that each begin anew.
    """
    numbers = [part for part in parts if part.piece.text.isdecimal() and len(part.piece.text) < 5]
    strips: list[list[Part]] = []
    for part in sorted(numbers, key=lambda part: part.piece.x0):
        if strips and part.piece.x0 < max(p.piece.x1 for p in strips[-1]):
            strips[-1].append(part)
        else:
            strips.append([part])
    found: set[int] = set()
    for strip in (sorted(strip, key=lambda part: part.base) for strip in strips if len(strip) >= FEW):
        left, right = min(p.piece.x0 for p in strip), max(p.piece.x1 for p in strip)
        top, bottom, own = strip[0].piece.y0, strip[-1].piece.y1, found | {id(p) for p in strip}
        beside = without(parts, own | {id(p) for p in parts if not top <= p.piece.middle <= bottom})
        if any(part.piece.x0 < right and part.piece.x1 > left for part in beside):
            continue
        if _counts([part.piece for part in strip], rows([piece for _, piece in joined(beside)])):
            found = own
    return found


def _counts(strip: Sequence[Piece], text: Block) -> bool:
    """Whether the numbers go up by one step, that of the rows beside them."""
    steps = [int(b.text) - int(a.text) for a, b in itertools.pairwise(strip)]
    step = max(steps, key=steps.count)
    if step < 1 or not text or steps.count(step) < MOST * len(steps):
        return False
    if step > 1:
        return abs(len(text) - 1 - step * len(steps)) <= 0.2 * len(text)
    is_code = sum(is_fixed(row[0]) for row in text) > len(text) / 2
    return running_on(text) > (MANUSCRIPT if is_code else PROSE)
