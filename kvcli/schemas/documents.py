"""List of the JSON documents kvcli prints, as models for writing them and for `kvcli config schema NAME`.

Bytes are integers, times seconds, text is not shortened. A value that is unknown or does not apply is null. Adding a
field keeps the number behind the name; any other change raises it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, get_args

from pydantic import TypeAdapter

from kvcli.schemas.base import Json
from kvcli.schemas.turn import EventDocument

MODULES = "turn chats pack listings fit bench quality spec heads summary".split()


def _documents() -> dict[str, Any]:
    """Return the documents by the name in their `schema`; events have one for all."""
    found = [kind for name in MODULES for kind in vars(import_module(f"kvcli.schemas.{name}")).values()]
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, Json)]
    fields = [(kind.model_fields["schema_"], kind) for kind in kinds if "schema_" in kind.model_fields]
    stated = {get_args(field.annotation)[0]: kind for field, kind in fields}
    return {name[6:].partition("/")[0]: kind for name, kind in stated.items()} | {"event": EventDocument}


DOCUMENTS = _documents()


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of one of `DOCUMENTS`."""
    schema = TypeAdapter(DOCUMENTS[name]).json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
