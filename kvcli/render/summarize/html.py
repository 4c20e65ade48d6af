"""Render summaries as one HTML file that loads and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcli.documents.document import SIGNS, scanned
from kvcli.render.html import Markup, data_table, join, page, tag
from kvcli.render.summarize.notes import checked
from kvcli.schemas.summary import SummaryDocument
from kvcli.summarize.result import Cite, Point

_DEEPEST = 2  # levels of indented points


def html(summaries: Sequence[tuple[SummaryDocument, Sequence[Point]]]) -> str:
    """Return the page of one or more summaries, each with its points."""
    alone = len(summaries) == 1
    documents = [document for document, _ in summaries]
    names = ", ".join(name for document in documents for name in _names(document, alone=alone))
    parts = [part for document, points in summaries for part in _summary(document, points, alone=alone)]
    return page(f"Summary of {names}", ["summary_page.css"], *parts, _footer(documents), lang="")


def _summary(document: SummaryDocument, points: Sequence[Point], *, alone: bool) -> Iterator[Markup]:
    names = _names(document, alone=alone)
    titled = [f"{s.title} ({name})" if s.title else name for s, name in zip(document.sources, names, strict=True)]
    yield tag("h1" if alone else "h2", ", ".join(titled))
    yield tag("p", " · ".join(_facts(document)), class_="sub")
    yield from _points(points)
    notes = [*_check(document), *(f"{s.path}: {note}" for s in document.sources for note in s.notes), *document.notes]
    if notes:
        yield tag("ul", [tag("li", note) for note in notes], class_="notes")
    if len(document.sources) > 1:
        rows = [[s.name, str(s.pages or s.sections), f"{s.tokens:,}" if s.tokens else "–"] for s in document.sources]
        yield data_table(["", "pages or sections", "tokens"], rows)


def _points(points: Sequence[Point]) -> Iterator[Markup]:
    """Yield a list for consecutive bullets; sentences form paragraphs, as the model wrote them."""
    for block in _blocks(points):
        first = block[0]
        if first.kind == "bullet":
            yield tag("ul", [_item(point) for point in block], class_="points")
            continue
        bodies = [part for point in block for part in (" ", _body(point))][1:]
        yield tag("h3" if first.kind == "heading" else "p", *bodies)
        yield from (quote for point in block for quote in _quotes(point))


def _blocks(points: Sequence[Point]) -> list[list[Point]]:
    """Group points into lists, paragraphs and headings. A quotation ends a paragraph."""
    blocks: list[list[Point]] = []
    for point in points:
        before = blocks[-1][-1] if blocks else None
        if before is None or before.kind != point.kind or point.kind == "heading":
            goes_on = False
        else:
            goes_on = point.kind == "bullet" or not (point.opens or _quotes(before))
        if goes_on:
            blocks[-1].append(point)
        else:
            blocks.append([point])
    return blocks


def _item(point: Point) -> Markup:
    level = min(point.level, _DEEPEST)
    return tag("li", _body(point), *_quotes(point), class_=f"deep{level}" if level else None)


def _quotes(point: Point) -> list[Markup]:
    return [tag("blockquote", cite.quote.text) for cite in point.cites if cite.quote]


def _body(point: Point) -> Markup:
    """Return the text with each citation in its place."""
    return join([_cite(one) if isinstance(one, Cite) else one.rstrip(" ") for one in point.said])


def _cite(cite: Cite) -> Markup:
    place = cite.place
    name = f"{place.document} " if place.document else ""
    sign = SIGNS[place.unit] + ("\N{NO-BREAK SPACE}" if SIGNS[place.unit] == "§" else " ")
    words = f"{name}{sign}{place.label}".strip() if place.label else "no place"
    words += ", OCR" * cite.is_ocr
    kind = {True: "confirmed", False: "doubtful", None: ""}[cite.confirmed]
    title = {"confirmed": "has the words of this point", "doubtful": "could not be confirmed", "": "not checked"}[kind]
    if cite.instead_of:
        title += f"; the model cited {cite.instead_of}"
    is_long = bool(place.document) or SIGNS[place.unit] == "§"
    classes = " ".join(filter(None, ["cite", kind, "long" if is_long else ""]))
    return join([" ", tag("span", words + "?" * (kind == "doubtful"), class_=classes, title=title)])


def _facts(document: SummaryDocument) -> Iterator[str]:
    pages = sum(source.pages or 0 for source in document.sources)
    if pages:
        yield f"{pages:,} pages"
    tokens = sum(source.tokens or 0 for source in document.sources)
    if tokens:
        yield f"{tokens:,} tokens"
    yield "read in one part" if document.mode == "whole" else f"read in {document.parts} parts"
    if document.turns:
        model = document.turns[-1].turn.model
        yield f"by {model.id}" if model is not None else ""


def _check(document: SummaryDocument) -> Iterator[str]:
    yield from checked(document.unconfirmed, document.corrected, sum(len(point.cites) for point in document.points))
    for source in document.sources:
        if source.pages_without_text:
            yield scanned(source.path, source.pages_without_text, source.kind)


def _footer(documents: Sequence[SummaryDocument]) -> Markup:
    checked = any(cite.confirmed is not None for d in documents for point in d.points for cite in point.cites)
    said = "Written by a language model. " + (
        "A green citation names a place that contains the words of its point; that does not prove the point."
        if checked
        else "Its citations were not verified."
    )
    return tag("footer", tag("p", said), tag("p", f"kvcli {documents[0].kvcli}" if documents else ""))


def _names(document: SummaryDocument, *, alone: bool) -> list[str]:
    """Return names of the sources on the page: as in citations if there are several, or else the file name or path."""
    if len(document.sources) > 1:
        return [source.name for source in document.sources]
    if not alone:
        return [source.path for source in document.sources]
    return [s.name if s.path == "-" else s.path.rpartition("/")[2] or s.path for s in document.sources]
