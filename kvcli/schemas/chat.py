"""A conversation as it is kept: what `kvcli chat -c` goes on with."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from kvcli.api import Finish
from kvcli.schemas.base import Json

KEPT = ConfigDict(extra="ignore", strict=True)  # extra: a later version may know more


class SavedDocument(Json):
    model_config = KEPT
    name: str
    sha256: str = Field(description="of the bytes the text was read from")
    text: str


class SavedMessage(Json):
    model_config = KEPT
    role: Literal["user", "assistant"]
    text: str
    documents: list[SavedDocument]
    finish: Finish | None = Field(description="of an answer: how it ended")


class ChatDocument(Json):
    """Questions and answers in turn, documents with their text."""

    model_config = KEPT
    schema_: Literal["kvcli.chat/1"] = Field(alias="schema")
    title: str | None
    model: str = Field(description="as it is typed")
    saved: str = Field(default="", description="when")
    system: str | None
    messages: list[SavedMessage]
    pending: list[SavedDocument] = Field(description="attached, and not asked about yet")

    @model_validator(mode="after")
    def _in_turn(self) -> ChatDocument:
        roles = [message.role for message in self.messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError("questions and answers do not take turns")
        return self
