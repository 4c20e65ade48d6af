"""Build the JSON documents of `--json`: a summary, the plan of one, or extracted text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.schemas.summary import (
    CiteFacts,
    ExtractDocument,
    Extracted,
    PartFacts,
    PointFacts,
    SectionFacts,
    SourceFacts,
    SummaryDocument,
    SummaryPlanDocument,
    SummaryTurn,
)
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.documents import Document
    from kvcli.schemas.turn import TurnDocument
    from kvcli.summarize.citations import Place
    from kvcli.summarize.plan import Plan
    from kvcli.summarize.result import Cite, Summary


def extract_document(
    sources: Sequence[SourceFacts], documents: Sequence[Document], notes: Sequence[str] = ()
) -> ExtractDocument:
    """Return `kvcli.extract/1`; `sources` are the facts of `documents` in order."""
    return ExtractDocument(
        kvcli=__version__,
        documents=[
            Extracted(source=source, sections=[SectionFacts.from_attributes(section) for section in document.sections])
            for source, document in zip(sources, documents, strict=True)
        ],
        notes=list(notes),
    )


def summary_document(
    summary: Summary, sources: Sequence[SourceFacts], turns: Sequence[TurnDocument]
) -> SummaryDocument:
    """Return `kvcli.summary/2`; `turns` are the documents of `summary.turns` in order."""
    told = [
        SummaryTurn(parts=answered.parts, merge=answered.is_merge, cached=answered.is_cached, turn=turn)
        for answered, turn in zip(summary.turns, turns, strict=True)
    ]
    return SummaryDocument.from_attributes(
        summary,
        kvcli=__version__,
        source=sources[0] if len(sources) == 1 else None,
        sources=list(sources),
        parts=summary.n_parts,
        text=summary.markdown(),
        points=[PointFacts.from_attributes(point, cites=[*map(_cite, point.cites)]) for point in summary.points],
        turns=told,
    )


def plan_document(plan: Plan, sources: Sequence[SourceFacts], notes: Sequence[str] = ()) -> SummaryPlanDocument:
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
    return SummaryPlanDocument.from_attributes(
        plan,
        kvcli=__version__,
        sources=list(sources),
        parts=parts,
        estimate_bytes=plan.estimate or None,
        available_bytes=plan.available or None,
        notes=list(notes),
    )


def source_facts(document: Document, path: str, tokens: int | None = None, *, name: str = "") -> SourceFacts:
    """Return the facts of a document; `name` is its name in citations, if it differs from the document's."""
    return SourceFacts.from_attributes(
        document,
        path=path,
        name=name or document.name,
        pages=document.n_pages,
        pages_without_text=document.without_text,
        sections=len(document.sections),
        tokens=tokens,
    )


def _cite(cite: Cite) -> CiteFacts:
    return CiteFacts.from_attributes(
        cite,
        cite.place,
        page=_page(cite.place),
        document=cite.place.document or None,
        quote=cite.quote.text if cite.quote else None,
        chars=(cite.quote.start, cite.quote.end) if cite.quote else None,
    )


def _page(place: Place) -> int | None:
    return int(place.label) if place.unit == "page" and place.label.isdecimal() else None
