"""Documents that list saved chats."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcli.schemas.base import Count, Json


class ChatEntry(Json):
    id: str
    title: str | None
    model: str = Field(description="name of the model, as typed")
    saved: str = Field(description="date of the last change")
    questions: Count
    documents: Count
    files: list[str] = Field(default_factory=list, description="names of its documents")
    found: str | None = Field(default=None, description="search: text around the match")


class ChatsDocument(Json):
    """Saved chats that kvcli chats lists, finds, or removes."""

    schema_: Literal["kvcli.chats/1"] = Field(default="kvcli.chats/1", alias="schema")
    total: Count = Field(description="number of matching chats, including those not listed")
    removed: bool = Field(default=False, description="true: the chats were deleted")
    chats: list[ChatEntry]
