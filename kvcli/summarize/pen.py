"""Points of an answer while it grows: each comes once, as soon as it is complete and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcli.summarize.cites import same
from kvcli.summarize.events import Said
from kvcli.summarize.result import Point


class Pen:
    """Points of an answer as it grows; those that are final are said at once, each only once."""

    def __init__(self, points_of: Callable[[str], list[Point]], *, is_final: bool) -> None:
        self.points: list[Point] = []
        self.repeated = 0
        self._points_of, self._is_final = points_of, is_final
        self._taken = 0  # characters of the answer

    def write(self, answer: str, *, whole: bool = False) -> Iterator[Said]:
        end = len(answer) if whole else settled(answer)
        if end <= self._taken:
            return
        fresh = self._points_of(answer[self._taken : end])
        self._taken = end
        kept = unique([*self.points, *fresh])
        self.repeated += len(self.points) + len(fresh) - len(kept)
        new = kept[len(self.points) :]
        self.points = kept
        if self._is_final:
            for point in new:
                yield Said(point)


def settled(answer: str) -> int:
    """How much of a growing answer will be split as it is now: up to its last whole bullet, heading or paragraph."""
    end = answer.rfind("\n") + 1
    while end:
        line = answer[answer.rfind("\n", 0, end - 1) + 1 : end].strip()
        is_bullet = bool(line) and (line[0] in "-*•" or line[0].isdigit())
        if not line or line[0] == "#" or (is_bullet and answer[end : end + 1].strip(" \t")):
            return end  # behind a bullet, an indented line may go on with it
        end = answer.rfind("\n", 0, end - 1) + 1
    return 0


def unique(points: Sequence[Point]) -> list[Point]:
    """Without those that say again what one before them said."""
    seen: set[str] = set()
    found = []
    for point in points:
        key = same(point.text)
        if key not in seen or point.kind == "heading":
            found.append(point)
        seen.add(key)
    return found
