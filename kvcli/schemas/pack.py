"""Description of a pack: documents that were prefilled once, with their KV cache."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcli.schemas.base import Bytes, Count, Json
from kvcli.schemas.chat import KEPT


class PackedFile(Json):
    model_config = KEPT
    bytes: Bytes
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class PackDocument(Json):
    """Model, settings and documents of a pack."""

    model_config = KEPT
    schema_: Literal["kvcli.pack/1"] = Field(alias="schema")
    made: str = Field(description="when")
    model: str = Field(description="as it is typed")
    profile: str = Field(description="the name of the settings that it was read under")
    promise: str = Field(description="what may be said of an answer from it: exact, approx, ...")
    documents: list[str] = Field(description="their names")
    tokens: Count = Field(description="that need not be read again")
    ids: str = Field(description="a digest of these tokens")
    fingerprint: dict[str, str] = Field(description="all that keys and values depend on; each must be the same")
    settings: dict[str, str] = Field(description="keys of a profile that shape them, each as --set takes it")
    files: dict[str, PackedFile] = Field(description="what lies beside this")
