"""Documents of a summary: its sources and citations, and its plan, which --dry-run prints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcli.schemas.base import Bytes, Count, Json, Seconds
from kvcli.schemas.turn import TurnDocument

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
    """Summary of a text, with the places it cites."""

    schema_: Literal["kvcli.summary/2"] = Field(default="kvcli.summary/2", alias="schema")
    kvcli: str
    source: SourceFacts | None = Field(description="the only one; null where there are several")
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
    first: str = Field(description="place it begins at")
    last: str
    document_: str | None = Field(alias="document", description="that it begins in; null where there is only one")
    prompt: Count = Field(description="tokens")


class SummaryPlanDocument(Json):
    """Plan of a summary; printed by `kvcli summarize --dry-run`."""

    schema_: Literal["kvcli.summary_plan/2"] = Field(default="kvcli.summary_plan/2", alias="schema")
    kvcli: str
    sources: list[SourceFacts]
    mode: Literal["whole", "parts"]
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
    """Text extracted from documents; printed by `kvcli summarize --extract-only`."""

    schema_: Literal["kvcli.extract/1"] = Field(default="kvcli.extract/1", alias="schema")
    kvcli: str
    documents: list[Extracted]
