"""What a merge reads of the summaries of parts, which of them at once, and which places it may cite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcli.summarize.check import Passage, named
from kvcli.summarize.citations import write
from kvcli.summarize.result import Point


def grouped(found: Sequence[Sequence[Point]], size: Callable[[list[str]], int], room: int) -> list[list[int]]:
    """Which summaries are merged at once: as many as `room` tokens hold, two at least. `size` counts the question."""
    made: list[list[int]] = [[]]
    for i in range(len(found)):
        texts = [for_merge(p) for j in [*made[-1], i] for p in found[j]]
        if len(made[-1]) >= 2 and size(texts) > room:
            made.append([])
        made[-1].append(i)
    return made


def for_merge(point: Point) -> str:
    """A point as the merge reads it: with the citations that hold."""
    places = list(dict.fromkeys(cite.place for cite in point.cites if cite.confirmed))
    return f"{point.text.removesuffix('.')} {write(places)}." if places else point.text


def cited(points: Sequence[Point], passages: Sequence[Passage]) -> list[Passage]:
    """The passages that a merge may cite: those that the points before it cite."""
    places = [passage.place for passage in passages]
    confirmed = {cite.place for point in points for cite in point.cites if cite.confirmed}
    allowed = {i for place in confirmed for i in named(place, places)}
    return [passages[i] for i in sorted(allowed)]
