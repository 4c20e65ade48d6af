"""Points of a summary: text of the model, with each citation checked against the words it stands for."""

from __future__ import annotations

from collections.abc import Sequence

from kvcli.summarize.check import Checker, Judged
from kvcli.summarize.citations import Bracket, Place, find, without, write
from kvcli.summarize.claim_words import words
from kvcli.summarize.result import Cite, Point
from kvcli.summarize.split import Raw

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
    raw: Raw,
    checker: Checker | None,
    documents: Sequence[str] = (),
    *,
    quotes: bool = False,
    places: bool = False,
) -> Point:
    """Return one point with its citations checked; without a checker they are unchanged.

    With `places`, a point without citations gets the place that has it.
    """
    brackets = find(raw.text, documents)
    if places and checker is not None and not brackets and (found := checker.place(raw.text, quotes=quotes)):
        return Point(raw.text, f"{raw.text} {found.text}", found.cites, raw.kind, raw.level, raw.opens)
    cites: list[Cite] = []
    # each verdict is computed once: many citations without words of their own all stand for the whole point
    verdicts: dict[tuple[str, tuple[Place, ...]], Judged] = {}
    marked, at = [], 0
    for bracket, claim in zip(brackets, pieces(raw.text, brackets), strict=True):
        if checker is None:
            cites += [Cite(place, False) for place in bracket.places]
            text = write(bracket.places)
        else:
            key = claim, bracket.places
            if key not in verdicts:
                verdicts[key] = checker.judge(claim, bracket, quotes=quotes)
            judged = verdicts[key]
            cites += judged.cites
            text = judged.text
        marked.append(raw.text[at : bracket.start] + text)
        at = bracket.end
    marked.append(raw.text[at:])
    return Point(without(raw.text, brackets), "".join(marked), tuple(cites), raw.kind, raw.level, raw.opens)
