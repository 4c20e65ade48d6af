"""What all JSON documents are made of: the base class, and numbers with their units."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Json(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)

    def document(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)
