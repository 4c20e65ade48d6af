"""Documents of a summary: its sources and citations, and its plan, which --dry-run prints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcli.schemas.base import Bytes, Count, Json, Seconds
from kvcli.schemas.turn import TurnDocument

Unit = Literal["page", "heading", "chapter", "line"]


class SourceFacts(Json):
    path: str = Field(description="path as typed")
    name: str = Field(description="name in citations, if there are several documents")
    sha256: str = Field(description="hash of the file")
    kind: str
    title: str | None
    unit: Unit = Field(description="unit of citations")
    pages: Count | None = Field(description="pages of the file; null: it has no pages")
    pages_without_text: list[int]
    recognized: list[int] = Field(default=[], description="pages whose text was recognized in a picture (OCR)")
    sections: Count = Field(description="number of pages, headings, chapters or blocks of lines read")
    tokens: Count | None = Field(description="tokens of the text; null: not counted")
    notes: list[str]


class CiteFacts(Json):
    page: Count | None = Field(description="null: the place is not a single page")
    unit: Unit
    label: str = Field(description='place in a citation: "12", "Methods", "41-80"; "" = none')
    document_: str | None = Field(alias="document", description="null: only one document")
    confirmed: bool | None = Field(description="true: the place contains the words of the claim; null with --no-check")
    is_ocr: bool = Field(default=False, description="true: the text of the place was recognized in a picture (OCR)")
    corrected: bool = Field(description="true: the model cited another place, and the citation was moved to this one")
    instead_of: str | None = Field(description="place that the model cited, if corrected")
    quote: str | None = Field(description="confirming sentence, with --quotes")
    chars: tuple[int, int] | None = Field(description="start and end of the quote in the text of the section")


class PointFacts(Json):
    text: str = Field(description="text without citations")
    marked: str = Field(description='text with citations; unconfirmed ones end in "?"')
    kind: Literal["bullet", "sentence", "heading"]
    level: Count = Field(description="depth in an outline")
    opens: bool = Field(description="true: the first sentence of a paragraph")
    cites: list[CiteFacts]


class SummaryTurn(Json):
    parts: tuple[int, int] = Field(description="first and last part of the request")
    merge: bool
    cached: bool = Field(description="true: result and figures are from an earlier run")
    turn: TurnDocument


class SummaryDocument(Json):
    """Summary of a text, with the places it cites."""

    schema_: Literal["kvcli.summary/2"] = Field(default="kvcli.summary/2", alias="schema")
    kvcli: str
    source: SourceFacts | None = Field(description="the document; null: several documents")
    sources: list[SourceFacts]
    mode: Literal["whole", "parts"]
    parts: Count
    text: str = Field(description="the summary as markdown")
    points: list[PointFacts]
    unconfirmed: Count
    corrected: Count
    notes: list[str]
    turns: list[SummaryTurn]


class PartFacts(Json):
    part: Count
    first: str = Field(description="first place")
    last: str
    document_: str | None = Field(alias="document", description="first document; null: only one")
    prompt: Count = Field(description="tokens")


class SummaryPlanDocument(Json):
    """Plan of a summary; printed by `kvcli summarize --dry-run`."""

    schema_: Literal["kvcli.summary_plan/2"] = Field(default="kvcli.summary_plan/2", alias="schema")
    kvcli: str
    sources: list[SourceFacts]
    mode: Literal["whole", "parts"]
    why: str
    parts: list[PartFacts]
    merges: Count = Field(description="maximum number of merges")
    tokens: Count = Field(description="tokens of all documents with page marks")
    answer: Count = Field(description="maximum tokens of an answer")
    limit: Count = Field(description="context window, tokens")
    seconds: Seconds | None = Field(description="estimated time; null: the model was not measured here")
    estimate_bytes: Bytes | None
    available_bytes: Bytes | None
    notes: list[str] = Field(description="on the files: for example those of a folder that were not read")


class SectionFacts(Json):
    number: Count = Field(description="page number, else 1, 2, ...")
    label: str = Field(description="label in citations")
    is_ocr: bool = Field(default=False, description="true: the text was recognized in a picture (OCR)")
    text: str


class Extracted(Json):
    source: SourceFacts
    sections: list[SectionFacts]


class ExtractDocument(Json):
    """Text extracted from documents; printed by `kvcli summarize --extract-only`."""

    schema_: Literal["kvcli.extract/1"] = Field(default="kvcli.extract/1", alias="schema")
    kvcli: str
    documents: list[Extracted]
    notes: list[str] = Field(description="on the files: for example those of a folder that were not read")
