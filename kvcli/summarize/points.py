"""Points of a summary: text of the model, with each citation checked against the words it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcli.summarize.check import Checker
from kvcli.summarize.citations import Bracket, Place, find, same, without
from kvcli.summarize.claim_words import words
from kvcli.summarize.events import PointReady
from kvcli.summarize.result import Cite, Point
from kvcli.summarize.split import Raw, Splitter

MOST = 12  # distinct citations that are compared with one whole statement; more are ignored


def pieces(point: str, brackets: Sequence[Bracket]) -> list[str]:
    """Return the words that each citation stands for: those since the one before it, or all if those have no content.

    If the point begins with a citation, each stands for the words up to the next one. Beyond MOST different citations
    for the whole point, the rest stand for nothing.
    """
    if not brackets:
        return []
    starts, ends = [bracket.start for bracket in brackets], [bracket.end for bracket in brackets]
    if not any(c.isalnum() for c in point[: starts[0]]):
        spans = zip(ends, [*starts[1:], len(point)], strict=True)
    else:
        spans = zip([0, *ends[:-1]], starts, strict=True)
    whole = without(point, brackets)
    found = [point[a:b].strip(" ,;.") for a, b in spans]
    judged: set[tuple[Place, ...]] = set()
    claims = []
    for piece, bracket in zip(found, brackets, strict=True):
        if len(brackets) > 1 and words(piece):
            claims.append(piece)
            continue
        if len(judged) < MOST:
            judged.add(bracket.places)
        claims.append(whole if bracket.places in judged else "")
    return claims


def point_of(
    raw: Raw, checker: Checker | None, documents: Sequence[str] = (), *, quotes: bool = False, places: bool = False
) -> Point:
    """Return one point with its citations checked; without a checker they are unchanged.

    With `places`, a point without citations gets the place that has it.
    """
    brackets = find(raw.text, documents)
    if places and checker is not None and not brackets and (found := checker.place(raw.text, quotes=quotes)):
        return Point((f"{raw.text} ", *found), raw.kind, raw.level, raw.opens)
    # each verdict is computed once: many citations without words of their own all stand for the whole point
    verdicts: dict[tuple[str, tuple[Place, ...]], tuple[Cite, ...]] = {}
    said: list[str | Cite] = []
    at = 0
    for bracket, claim in zip(brackets, pieces(raw.text, brackets), strict=True):
        if (key := (claim, bracket.places)) not in verdicts:
            unchecked = tuple(Cite(place, None) for place in bracket.places)
            verdicts[key] = checker.judge(claim, bracket.places, quotes=quotes) if checker is not None else unchecked
        said += [raw.text[at : bracket.start], *verdicts[key]]
        at = bracket.end
    said = [one for one in (*said, raw.text[at:]) if one]
    return Point(tuple(said), raw.kind, raw.level, raw.opens)


class PointStream:
    """Incremental parser of an answer's points: each is emitted once, as soon as no later line can change it.

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
