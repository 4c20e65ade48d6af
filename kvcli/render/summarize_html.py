"""Summaries as one HTML file that fetches nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files

from kvcli.documents.document import SIGNS
from kvcli.render.html import Markup, data_table, join, tag
from kvcli.render.summarize import scanned
from kvcli.schemas.summary import CiteFacts, PointFacts, SourceFacts, SummaryDocument

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_DEEPEST = 2  # of indented points


def html(documents: Sequence[SummaryDocument]) -> str:
    """The page of one summary or several."""
    style = Markup((files("kvcli.render") / "summary_page.css").read_text(encoding="utf-8"))
    names = ", ".join(_name(source) for document in documents for source in document.sources)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"Summary of {names}"),
        tag("style", style),
    )
    parts = [part for document in documents for part in _summary(document, alone=len(documents) == 1)]
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', *parts, _footer(documents))), lang='')}\n"


def _summary(document: SummaryDocument, *, alone: bool) -> Iterator[Markup]:
    names = ", ".join(_title(source) for source in document.sources)
    yield tag("h1" if alone else "h2", names)
    yield tag("p", " · ".join(_facts(document)), class_="sub")
    yield from _points(document.points)
    notes = [*_check(document), *(f"{s.path}: {note}" for s in document.sources for note in s.notes), *document.notes]
    if notes:
        yield tag("ul", [tag("li", note) for note in notes], class_="notes")
    if len(document.sources) > 1:
        rows = [[_name(s), str(s.pages or s.sections), f"{s.tokens:,}" if s.tokens else "–"] for s in document.sources]
        yield data_table(["", "pages or sections", "tokens"], rows)


def _points(points: Sequence[PointFacts]) -> Iterator[Markup]:
    """Bullets that follow each other are one list; sentences are paragraphs."""
    items: list[Markup] = []
    for point in points:
        body = join([point.text, *(_cite(cite) for cite in point.cites)])
        quotes = [tag("blockquote", cite.quote) for cite in point.cites if cite.quote]
        if point.kind == "bullet":
            level = min(point.level, _DEEPEST)
            items.append(tag("li", body, *quotes, class_=f"deep{level}" if level else None))
            continue
        if items:
            yield tag("ul", items, class_="points")
            items = []
        yield tag("h3" if point.kind == "heading" else "p", body)
        yield from quotes
    if items:
        yield tag("ul", items, class_="points")


def _cite(cite: CiteFacts) -> Markup:
    name = f"{cite.document_} " if cite.document_ else ""
    words = f"{name}{SIGNS[cite.unit]} {cite.label}".strip() if cite.label else "no place"
    kind = {True: "confirmed", False: "doubtful", None: ""}[cite.confirmed]
    title = {"confirmed": "has the words of this point", "doubtful": "could not be confirmed", "": "not checked"}[kind]
    if cite.instead_of:
        title += f"; the model named {cite.instead_of}"
    return join([" ", tag("span", words + "?" * (kind == "doubtful"), class_=f"cite {kind}".strip(), title=title)])


def _facts(document: SummaryDocument) -> Iterator[str]:
    pages = sum(source.pages or 0 for source in document.sources)
    if pages:
        yield f"{pages:,} pages"
    tokens = sum(source.tokens or 0 for source in document.sources)
    if tokens:
        yield f"{tokens:,} tokens"
    yield "read whole" if document.mode == "whole" else f"read in {document.parts} parts"
    if document.turns:
        model = document.turns[-1].turn.model
        yield f"by {model.id}" if model is not None else ""


def _check(document: SummaryDocument) -> Iterator[str]:
    cites = [cite for point in document.points for cite in point.cites]
    if document.unconfirmed:
        yield f'{document.unconfirmed} of {len(cites)} citations could not be confirmed, marked "?"'
    if document.corrected:
        yield f"{document.corrected} of {len(cites)} citations were moved to the place that has the words"
    for source in document.sources:
        if source.pages_without_text:
            yield scanned(source.path, source.pages_without_text)


def _footer(documents: Sequence[SummaryDocument]) -> Markup:
    checked = any(cite.confirmed is not None for d in documents for point in d.points for cite in point.cites)
    said = "Written by a language model. " + (
        "A citation in green names a place that has the words of its point; that is no proof that the point follows."
        if checked
        else "Nobody held its citations against the text."
    )
    return tag("footer", tag("p", said), tag("p", f"kvcli {documents[0].kvcli}" if documents else ""))


def _title(source: SourceFacts) -> str:
    return f"{source.title} ({_name(source)})" if source.title else _name(source)


def _name(source: SourceFacts) -> str:
    return source.path.rpartition("/")[2] or source.path
