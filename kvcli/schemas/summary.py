"""A summary, its sources and its citations; and the plan of one, which --dry-run prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvcli import __version__
from kvcli.schemas.base import Bytes, Count, Json, Seconds
from kvcli.schemas.turn import TurnDocument

if TYPE_CHECKING:
    from kvcli.documents import Document
    from kvcli.summarize.cites import Place
    from kvcli.summarize.plan import Plan
    from kvcli.summarize.result import Cite, Point, Summary

Unit = Literal["page", "heading", "chapter", "line"]


class SourceFacts(Json):
    path: str = Field(description="as the user named it")
    name: str = Field(description="as citations name it where there are several")
    sha256: str = Field(description="of the file's bytes")
    kind: str
    title: str | None
    unit: Unit = Field(description="what a citation names")
    pages: Count | None = Field(description="of the file; null where it has none")
    pages_without_text: list[int]
    sections: Count = Field(description="pages, headings, chapters or blocks of lines that were read")
    tokens: Count | None = Field(description="of the text as the model's tokenizer counts; null where nobody counted")
    notes: list[str]


class CiteFacts(Json):
    page: Count | None = Field(description="null where the place is no single page")
    unit: Unit
    label: str = Field(
        description='the place as a citation names it: "12", "Methods", "41-80"; "" where none was named'
    )
    document_: str | None = Field(alias="document", description="null where there is only one")
    confirmed: bool | None = Field(description="the place has the words of the claim; null with --no-check")
    corrected: bool = Field(description="the model named another place; the claim stands at this one alone")
    instead_of: str | None = Field(description="what the model wrote, where it was corrected")
    quote: str | None = Field(description="the sentence that says so, with --quotes")
    chars: tuple[int, int] | None = Field(description="first character of the quote in the section's text, and its end")


class PointFacts(Json):
    text: str = Field(description="without citations")
    marked: str = Field(description='with them, doubtful ones with "?"')
    kind: Literal["bullet", "sentence", "heading"]
    level: Count = Field(description="depth in an outline")
    opens: bool = Field(description="a sentence that begins a paragraph")
    cites: list[CiteFacts]


class SummaryTurn(Json):
    parts: tuple[int, int] = Field(description="the first and the last part it is about")
    merge: bool
    cached: bool = Field(description="from an earlier run; the figures are of then")
    turn: TurnDocument


class SummaryDocument(Json):
    """What a text says in short, and where it says so."""

    schema_: Literal["kvcli.summary/1"] = Field(default="kvcli.summary/1", alias="schema")
    kvcli: str
    source: SourceFacts | None = Field(description="the only one; null where there are several")
    sources: list[SourceFacts]
    mode: Literal["whole", "map"]
    parts: Count
    text: str = Field(description="the summary as markdown")
    points: list[PointFacts]
    unconfirmed: Count
    corrected: Count
    notes: list[str]
    turns: list[SummaryTurn]


class PartFacts(Json):
    part: Count
    first: str = Field(description="place it begins at")
    last: str
    document_: str | None = Field(alias="document", description="that it begins in; null where there is only one")
    prompt: Count = Field(description="tokens")


class SummaryPlanDocument(Json):
    """How a summary would be made; printed by `kvcli summarize --dry-run`."""

    schema_: Literal["kvcli.summary_plan/1"] = Field(default="kvcli.summary_plan/1", alias="schema")
    kvcli: str
    sources: list[SourceFacts]
    mode: Literal["whole", "map"]
    why: str
    parts: list[PartFacts]
    merges: Count = Field(description="turns after the parts, at most")
    tokens: Count = Field(description="of all documents with their marks")
    answer: Count = Field(description="tokens of an answer at most")
    limit: Count = Field(description="the window in use")
    seconds: Seconds | None = Field(description="about; null where nobody timed the model here")
    estimate_bytes: Bytes | None
    available_bytes: Bytes | None


class SectionFacts(Json):
    number: Count = Field(description="of the page, else 1, 2, .. in order")
    label: str = Field(description="what a citation of it says")
    text: str


class Extracted(Json):
    source: SourceFacts
    sections: list[SectionFacts]


class ExtractDocument(Json):
    """Documents as they are read; printed by `kvcli summarize --extract-only`."""

    schema_: Literal["kvcli.extract/1"] = Field(default="kvcli.extract/1", alias="schema")
    kvcli: str
    documents: list[Extracted]


def extract_document(sources: Sequence[SourceFacts], documents: Sequence[Document]) -> ExtractDocument:
    """`kvcli.extract/1`; `sources` are the facts of `documents` in order."""
    return ExtractDocument(
        kvcli=__version__,
        documents=[
            Extracted(
                source=source,
                sections=[SectionFacts(number=s.number, label=s.label, text=s.text) for s in document.sections],
            )
            for source, document in zip(sources, documents, strict=True)
        ],
    )


def summary_document(
    summary: Summary, sources: Sequence[SourceFacts], turns: Sequence[TurnDocument]
) -> SummaryDocument:
    """`kvcli.summary/1`; `turns` are the documents of `summary.turns` in order."""
    told = [
        SummaryTurn(parts=answered.parts, merge=answered.is_merge, cached=answered.is_cached, turn=turn)
        for answered, turn in zip(summary.turns, turns, strict=True)
    ]
    return SummaryDocument(
        kvcli=__version__,
        source=sources[0] if len(sources) == 1 else None,
        sources=list(sources),
        mode=summary.mode,
        parts=summary.n_parts,
        text=summary.markdown(),
        points=[_point(point, summary.checked) for point in summary.points],
        unconfirmed=summary.unconfirmed,
        corrected=summary.corrected,
        notes=list(summary.notes),
        turns=told,
    )


def plan_document(plan: Plan, sources: Sequence[SourceFacts]) -> SummaryPlanDocument:
    parts = [
        PartFacts(
            part=part.number,
            first=part.span[0].label,
            last=part.span[1].label,
            document=part.span[0].document or None,
            prompt=prompt,
        )
        for part, prompt in zip(plan.parts, plan.prompts, strict=True)
    ]
    return SummaryPlanDocument(
        kvcli=__version__,
        sources=list(sources),
        mode=plan.mode,
        why=plan.why,
        parts=parts,
        merges=plan.merges,
        tokens=plan.tokens,
        answer=plan.answer,
        limit=plan.limit,
        seconds=plan.seconds,
        estimate_bytes=plan.estimate or None,
        available_bytes=plan.available or None,
    )


def source_facts(document: Document, path: str, tokens: int | None = None, *, name: str = "") -> SourceFacts:
    """`name` is that of citations, if it is not the document's own."""
    return SourceFacts(
        path=path,
        name=name or document.name,
        sha256=document.sha256,
        kind=document.kind,
        title=document.title,
        unit=document.unit,
        pages=document.n_pages,
        pages_without_text=list(document.without_text),
        sections=len(document.sections),
        tokens=tokens,
        notes=list(document.notes),
    )


def _point(point: Point, checked: bool) -> PointFacts:
    cites = [_cite(cite, checked) for cite in point.cites]
    return PointFacts(
        text=point.text, marked=point.marked, kind=point.kind, level=point.level, opens=point.opens, cites=cites
    )


def _cite(cite: Cite, checked: bool) -> CiteFacts:
    return CiteFacts(
        page=_page(cite.place),
        unit=cite.place.unit,
        label=cite.place.label,
        document=cite.place.document or None,
        confirmed=cite.confirmed if checked else None,
        corrected=cite.corrected,
        instead_of=cite.instead_of,
        quote=cite.quote.text if cite.quote else None,
        chars=(cite.quote.start, cite.quote.end) if cite.quote else None,
    )


def _page(place: Place) -> int | None:
    return int(place.label) if place.unit == "page" and place.label.isdecimal() else None
