"""Points of an answer during generation: each is emitted once, as soon as no later line can change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcli.summarize.citations import same
from kvcli.summarize.events import PointReady
from kvcli.summarize.result import Point
from kvcli.summarize.split import Raw, Splitter


class PointStream:
    """Incremental parser of an answer's points; final points are emitted at once.

    `documents` are their names in citations. `take` extracts the part of an answer that is used.
    """

    def __init__(
        self,
        point_of: Callable[[Raw], Point],
        documents: Sequence[str] = (),
        *,
        is_final: bool,
        take: Callable[[str], str] = str,
    ) -> None:
        self.points: list[Point] = []
        self.repeated = 0
        self._point_of, self._take, self._is_final = point_of, take, is_final
        self._splitter = Splitter(documents)
        self._taken = 0  # parsed characters of the answer, in whole lines
        self._is_begun = False  # the beginning of the next line has already completed the point before it
        self._n_raws = 0  # raw points that became points

    def write(self, answer: str, *, whole: bool = False) -> Iterator[PointReady]:
        """Yield new points of this answer, which extends the one before. `whole` means that no text follows."""
        answer = self._take(answer)
        end = len(answer) if whole else max(self._taken, answer.rfind("\n", self._taken) + 1)
        if end > self._taken:
            for line in answer[self._taken : end].splitlines():
                self._splitter.feed(line)
            self._taken, self._is_begun = end, False
        if whole:
            self._splitter.end()
        raws = self._splitter.found
        if not whole and not self._is_begun and (begun := answer[end:].splitlines()):
            after = self._splitter.after(begun[0])
            self._is_begun, raws = bool(after), [*raws, *after]
        fresh, self._n_raws = raws[self._n_raws :], max(self._n_raws, len(raws))
        yield from self._add([self._point_of(raw) for raw in fresh])

    def forget(self) -> None:
        """Start over, because the text so far turned out to be a thought."""
        self.points, self._splitter = [], Splitter(self._splitter.documents)
        self._taken, self._is_begun, self._n_raws = 0, False, 0

    def _add(self, fresh: Sequence[Point]) -> Iterator[PointReady]:
        kept = unique([*self.points, *fresh])
        self.repeated += len(self.points) + len(fresh) - len(kept)
        new = kept[len(self.points) :]
        self.points = kept
        if self._is_final:
            for point in new:
                yield PointReady(point)


def unique(points: Sequence[Point]) -> list[Point]:
    """Return the points without repetitions of earlier ones."""
    seen: set[str] = set()
    found = []
    for point in points:
        key = same(point.text)
        if key not in seen or point.kind == "heading":
            found.append(point)
        seen.add(key)
    return found
