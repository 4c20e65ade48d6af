"""Documents that list saved chats."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcli.schemas.base import Count, Json


class SessionEntry(Json):
    id: str
    title: str | None
    model: str = Field(description="as it is typed")
    saved: str = Field(description="when")
    questions: Count
    documents: Count
    files: list[str] = Field(default_factory=list, description="what its documents are called")
    found: str | None = Field(default=None, description="search: the words, with their neighbours")


class SessionsDocument(Json):
    """Saved chats that kvcli chats lists, finds, or removes."""

    schema_: Literal["kvcli.sessions/1"] = Field(default="kvcli.sessions/1", alias="schema")
    total: Count = Field(description="how many there are of these, shown or not")
    removed: bool = Field(default=False, description="whether they are gone")
    sessions: list[SessionEntry]
