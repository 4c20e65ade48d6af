"""Render summaries as one HTML file that loads and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcli.documents.document import SIGNS
from kvcli.render.html import Markup, data_table, join, page, tag
from kvcli.render.summarize.notes import scanned
from kvcli.schemas.summary import CiteFacts, PointFacts, SummaryDocument
from kvcli.summarize.citations import find

_DEEPEST = 2  # levels of indented points


def html(documents: Sequence[SummaryDocument]) -> str:
    """Return the page of one or more summaries."""
    alone = len(documents) == 1
    names = ", ".join(name for document in documents for name in _names(document, alone=alone))
    parts = [part for document in documents for part in _summary(document, alone=alone)]
    return page(f"Summary of {names}", ["summary_page.css"], *parts, _footer(documents), lang="")


def _summary(document: SummaryDocument, *, alone: bool) -> Iterator[Markup]:
    names = _names(document, alone=alone)
    titled = [f"{s.title} ({name})" if s.title else name for s, name in zip(document.sources, names, strict=True)]
    yield tag("h1" if alone else "h2", ", ".join(titled))
    yield tag("p", " · ".join(_facts(document)), class_="sub")
    yield from _points(document.points)
    notes = [*_check(document), *(f"{s.path}: {note}" for s in document.sources for note in s.notes), *document.notes]
    if notes:
        yield tag("ul", [tag("li", note) for note in notes], class_="notes")
    if len(document.sources) > 1:
        rows = [[s.name, str(s.pages or s.sections), f"{s.tokens:,}" if s.tokens else "–"] for s in document.sources]
        yield data_table(["", "pages or sections", "tokens"], rows)


def _points(points: Sequence[PointFacts]) -> Iterator[Markup]:
    """Yield a list for consecutive bullets; sentences form paragraphs, as the model wrote them."""
    for block in _blocks(points):
        first = block[0]
        if first.kind == "bullet":
            yield tag("ul", [_item(point) for point in block], class_="points")
            continue
        bodies = [part for point in block for part in (" ", _body(point))][1:]
        yield tag("h3" if first.kind == "heading" else "p", *bodies)
        yield from (quote for point in block for quote in _quotes(point))


def _blocks(points: Sequence[PointFacts]) -> list[list[PointFacts]]:
    """Group points into lists, paragraphs and headings. A quotation ends a paragraph."""
    blocks: list[list[PointFacts]] = []
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


def _item(point: PointFacts) -> Markup:
    level = min(point.level, _DEEPEST)
    return tag("li", _body(point), *_quotes(point), class_=f"deep{level}" if level else None)


def _quotes(point: PointFacts) -> list[Markup]:
    return [tag("blockquote", cite.quote) for cite in point.cites if cite.quote]


def _body(point: PointFacts) -> Markup:
    """Return the text with each citation in its place."""
    brackets = find(point.marked, [cite.document_ for cite in point.cites if cite.document_])
    cites = iter(point.cites)
    if sum(len(bracket.places) for bracket in brackets) != len(point.cites):  # the text itself has similar brackets
        return join([point.text, *map(_cite, cites)])
    parts: list[str] = []
    at = 0
    for bracket in brackets:
        parts += [point.marked[at : bracket.start].rstrip(" "), *(_cite(next(cites)) for _ in bracket.places)]
        at = bracket.end
    return join([*parts, point.marked[at:]])


def _cite(cite: CiteFacts) -> Markup:
    name = f"{cite.document_} " if cite.document_ else ""
    sign = SIGNS[cite.unit] + ("\N{NO-BREAK SPACE}" if SIGNS[cite.unit] == "§" else " ")
    words = f"{name}{sign}{cite.label}".strip() if cite.label else "no place"
    kind = {True: "confirmed", False: "doubtful", None: ""}[cite.confirmed]
    title = {"confirmed": "has the words of this point", "doubtful": "could not be confirmed", "": "not checked"}[kind]
    if cite.instead_of:
        title += f"; the model cited {cite.instead_of}"
    is_long = bool(cite.document_) or SIGNS[cite.unit] == "§"
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
    cites = [cite for point in document.points for cite in point.cites]
    if document.unconfirmed:
        yield f'{document.unconfirmed} of {len(cites)} citations could not be confirmed, marked "?"'
    if document.corrected:
        moved = "was" if document.corrected == 1 else "were"
        yield f"{document.corrected} of {len(cites)} citations {moved} moved to the place that has the words"
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
    return [source.name if source.path == "-" else _last(source.path) for source in document.sources]


def _last(path: str) -> str:
    return path.rpartition("/")[2] or path
