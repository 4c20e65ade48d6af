"""Saved chat that `kvcli chat -c` continues."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from kvcli.api import Finish
from kvcli.schemas.base import Json

SCHEMA: Final = "kvcli.chat/1"
KEPT = ConfigDict(extra="ignore", strict=True)  # extra: a later version may have more fields


Whole = Annotated[int, Field(ge=0, lt=1 << 63)]  # the range of a database integer


class SavedDocument(Json):
    model_config = KEPT
    name: str
    sha256: str = Field(description="hash of the file")
    text: str


class Figures(Json):
    """Figures of an answer; null if not measured."""

    model_config = KEPT
    prompt: Whole | None = Field(default=None, description="tokens of the prompt")
    cached: Whole | None = Field(default=None, description="prompt tokens from the prefix cache")
    new: Whole | None = Field(default=None, description="tokens of the answer")
    first_token: float | None = Field(default=None, description="seconds to the first token")
    read_tok_s: float | None = Field(default=None, description="computed prompt tokens per second")
    decode_tok_s: float | None = Field(default=None, description="tokens of the answer per second")


class SavedMessage(Json):
    model_config = KEPT
    role: Literal["user", "assistant"]
    text: str
    documents: list[SavedDocument]
    finish: Finish | None = Field(description="answers only: why it ended")
    figures: Figures | None = Field(default=None, description="answers only")
    thinking: str = Field(default="", description="of an answer: what the model thought before it; it reads it no more")


class LeftOut(Json):
    """Messages that are no longer shown to the model, because the chat exceeds its context window."""

    model_config = KEPT
    messages: Annotated[int, Field(ge=2, multiple_of=2)] = Field(description="from the first on")
    notes: str = Field(description="that it wrote on them, in their place; may be empty")


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
    left_out: LeftOut | None = None

    @model_validator(mode="after")
    def _in_turn(self) -> ChatDocument:
        roles = [message.role for message in self.messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError("questions and answers do not take turns")
        if self.left_out is not None and self.left_out.messages > len(roles):
            raise ValueError("more is left out than there is")
        return self
