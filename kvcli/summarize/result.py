"""Summary: points with their citations, the way it was made, and the figures of every turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from kvcli.summarize.citations import Place, write

if TYPE_CHECKING:
    from kvcli.api import Turn

Mode = Literal["whole", "parts"]
PointKind = Literal["bullet", "sentence", "heading"]


@dataclass(frozen=True, slots=True)
class Quote:
    """An exact sentence of a section: section.text[start:end]."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Cite:
    """One place that a point cites, after the check."""

    place: Place
    confirmed: bool | None  # None: not checked
    instead_of: str | None = None  # the model's citation, if it was corrected: "p. 3"
    quote: Quote | None = None
    is_ocr: bool = False  # the text of the place was recognized in a picture

    @property
    def corrected(self) -> bool:
        return self.instead_of is not None


@dataclass(frozen=True, slots=True)
class Point:
    """One statement of a summary: its words, and the citations among them. Adjacent citations share their brackets."""

    said: tuple[str | Cite, ...]
    kind: PointKind = "bullet"
    level: int = 0  # depth in an outline
    opens: bool = False  # begins a paragraph

    @property
    def cites(self) -> tuple[Cite, ...]:
        return tuple(one for one in self.said if isinstance(one, Cite))

    @property
    def text(self) -> str:
        """The point without its citations and the spaces before them."""
        before_cite = [isinstance(after, Cite) for after in self.said[1:]] + [False]
        words = zip(self.said, before_cite, strict=True)
        return "".join(one.rstrip(" ") if cuts else one for one, cuts in words if isinstance(one, str)).strip()

    @property
    def marked(self) -> str:
        """The point with its citations, as displayed: doubtful ones with "?"."""
        runs = [list(run) for _, run in groupby(self.said, key=type)]
        return "".join(marks([one for one in run if isinstance(one, Cite)]) or "".join(map(str, run)) for run in runs)

    @property
    def n_words(self) -> int:
        return len(self.text.split())


def marks(cites: Sequence[Cite]) -> str:
    """Return one bracket for adjacent citations; "" for none."""
    doubtful = [cite.place for cite in cites if cite.confirmed is False]
    recognized = [cite.place for cite in cites if cite.is_ocr]
    return write([cite.place for cite in cites], doubtful, recognized) if cites else ""


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn of the model: about a part, or a merge."""

    turn: Turn
    parts: tuple[int, int]  # its first and last part, from 1
    is_merge: bool
    is_cached: bool  # from an earlier run, whose figures it has


@dataclass(frozen=True, slots=True)
class Summary:
    """The finished summary."""

    points: tuple[Point, ...]
    mode: Mode
    n_parts: int
    turns: tuple[Answered, ...]
    notes: tuple[str, ...] = ()

    @property
    def cites(self) -> list[Cite]:
        return [cite for point in self.points for cite in point.cites]

    @property
    def unconfirmed(self) -> int:
        return sum(cite.confirmed is False for cite in self.cites)

    @property
    def corrected(self) -> int:
        return sum(cite.corrected for cite in self.cites)

    def markdown(self) -> str:
        """Return the summary alone, with quotations under their points."""
        return written(self.points)


def written(points: Sequence[Point]) -> str:
    """Return points as markdown."""
    lines: list[str] = []
    for point in points:
        if point.kind == "sentence":
            if lines and not point.opens and not lines[-1].startswith((">", "#", "-")):
                lines[-1] += f" {point.marked}"
            else:
                lines += [*([""] if lines else []), point.marked]
        elif point.kind == "heading":
            lines += [*([""] if lines else []), f"{'#' * (point.level + 1)} {point.marked}"]
        else:
            lines.append(f"{'  ' * point.level}- {point.marked}")
        pad = "  " * (point.level + 1) if point.kind == "bullet" else ""
        lines += [f"{pad}> {' '.join(c.quote.text.split())}" for c in point.cites if c.quote]
    return "\n".join(lines).strip() + "\n" if lines else ""
