"""Inputs of a merge: which part summaries are merged together, their text, and the places that may be cited."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcli.summarize.check import Passage, named
from kvcli.summarize.citations import write
from kvcli.summarize.result import Point


def grouped(found: Sequence[Sequence[Point]], size: Callable[[list[str]], int], room: int) -> list[list[int]]:
    """Group summaries to merge at once: as many as fit into `room` tokens, at least two. `size` adds the question."""
    made: list[list[int]] = [[]]
    for i in range(len(found)):
        texts = [for_merge(p) for j in [*made[-1], i] for p in found[j]]
        if len(made[-1]) >= 2 and size(texts) > room:
            made.append([])
        made[-1].append(i)
    return made


def for_merge(point: Point) -> str:
    """Return a point as input of a merge, with its confirmed citations."""
    places = list(dict.fromkeys(cite.place for cite in point.cites if cite.confirmed))
    return f"{point.text.removesuffix('.')} {write(places)}." if places else point.text


def cited(points: Sequence[Point], passages: Sequence[Passage]) -> list[Passage]:
    """Return the passages that a merge may cite: those that its input points cite."""
    places = [passage.place for passage in passages]
    confirmed = {cite.place for point in points for cite in point.cites if cite.confirmed}
    allowed = {i for place in confirmed for i in named(place, places)}
    return [passages[i] for i in sorted(allowed)]
