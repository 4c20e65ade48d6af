"""Description of a pack: documents that were prefilled once, with their KV cache."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcli.schemas.base import Bytes, Count, Json
from kvcli.schemas.turn import KEPT


class PackedFile(Json):
    model_config = KEPT
    bytes: Bytes
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class PackDocument(Json):
    """Model, settings and documents of a pack."""

    model_config = KEPT
    schema_: Literal["kvcli.pack/1"] = Field(alias="schema")
    made: str = Field(description="when")
    model: str = Field(description="name of the model, as typed")
    profile: str = Field(description="name of the profile")
    promise: str = Field(description="exactness of answers: exact, approx, ...")
    documents: list[str] = Field(description="names of the documents")
    tokens: Count = Field(description="number of prefilled tokens")
    ids: str = Field(description="hash of these tokens")
    fingerprint: dict[str, str] = Field(description="properties that determine the KV cache; all must match")
    settings: dict[str, str] = Field(description="profile keys that affect the KV cache, as for --set")
    notes: list[str] = Field(default=[], description="on the files: for example those of a folder that were not read")
    files: dict[str, PackedFile] = Field(description="other files of the pack")
