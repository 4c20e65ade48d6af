"""Parse page ranges as typed: `1-20,35`, and `paper.pdf:3-9` for a file with its pages."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from kvcli.errors import BadInput, UsageError

Span = tuple[int, int | None]  # first and last page, both included; None: to the end
RANGES = re.compile(r"\d{1,9}(-\d{0,9})?(,\d{1,9}(-\d{0,9})?)*")
SUFFIX = re.compile(rf"(.+):({RANGES.pattern})", re.DOTALL)
SHOWN = 12  # page numbers listed one by one in a message


def parse_pages(text: str) -> tuple[Span, ...]:
    """Parse `1-20,35` to spans; `7-` means from page 7 on. Refuse other text and a range that runs backwards."""
    compact = "".join(text.split())
    if not RANGES.fullmatch(compact):
        raise UsageError(f"{text!r} is not a range of pages", code="bad_pages", try_=["--pages 1-20,35"])
    spans: list[Span] = []
    for part in compact.split(","):
        first, dash, last = part.partition("-")
        span = int(first), (int(last) if last else None if dash else int(first))
        if span[0] < 1 or (span[1] is not None and span[1] < span[0]):
            why = "page numbers start at 1" if span[0] < 1 else "its end is before its beginning"
            raise UsageError(f"{part} is not a range of pages: {why}", code="bad_pages", try_=["--pages 1-20,35"])
        spans.append(span)
    return tuple(spans)


def split_pages(path: str) -> tuple[str, str | None]:
    """Split `paper.pdf:3-9` into the path and its pages; return the path alone if no page range follows it."""
    found = SUFFIX.fullmatch(path)
    return (found[1], found[2]) if found else (path, None)


def present(spans: Sequence[Span], numbers: Sequence[int], name: str) -> set[int]:
    """Return the pages of a file that the spans name. A range is never enumerated."""
    for first, last in spans:
        to = max(first, numbers[-1]) if last is None else last
        i = bisect_left(numbers, first)
        if to > numbers[-1] or i == len(numbers) or numbers[i] > to:
            beyond = to if first <= numbers[-1] < to else first  # the end that is beyond, or the start of a gap
            which = f": {listed(numbers)}" if numbers[-1] > len(numbers) else ""
            raise BadInput(
                f"{name} has no page {beyond}",
                code="no_such_page",
                lines=[f"it has {len(numbers):,} page{'s' * (len(numbers) != 1)}{which}"],
                detail={"page": beyond, "pages": len(numbers)},
                try_=[f"pages {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "leave the pages out"],
            )
    ranges = [(bisect_left(numbers, a), len(numbers) if b is None else bisect_right(numbers, b)) for a, b in spans]
    return {n for i, j in set(ranges) for n in numbers[i:j]}


def listed(pages: Sequence[int]) -> str:
    """Format page numbers for people: `1-3, 7, 9-12`, cut after a dozen."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][1] + 1:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:SHOWN]]
    return ", ".join(words) + (f" and {len(runs) - SHOWN:,} more" if len(runs) > SHOWN else "")
