"""Base class of all JSON documents, and numbers with their units."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

SURROGATE = re.compile("[\ud800-\udfff]")

Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]

OR_NULL = BeforeValidator(lambda value: value or None)  # null instead of 0 or "", which stand for "not measured"


class Json(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)

    @classmethod
    def from_attributes(cls, *sources: object, **said: Any) -> Self:
        """Build a document from the given fields, and others from attributes of the first source that has them."""
        rest = cls.model_fields.keys() - said.keys() - {"schema_"}
        named = {key: getattr(one, key) for one in reversed(sources) for key in rest if hasattr(one, key)}
        return cls(**named | said)

    def document(self) -> dict[str, Any]:
        """Plain data of the document. Surrogates for bytes of a non-UTF-8 name are replaced: they are no valid JSON."""
        made: dict[str, Any] = valid(self.model_dump(mode="json", by_alias=True))
        return made


def valid(value: Any) -> Any:
    """Return JSON data without surrogates, which stand for bytes that are no text."""
    if isinstance(value, str):
        return value if value.isascii() else SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {valid(key): valid(item) for key, item in value.items()}
    return [valid(item) for item in value] if isinstance(value, list) else value
