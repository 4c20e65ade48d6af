"""Operations of the server: each is a route, and a part of /openapi.json with all its refusals."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from kvcli.serve.schemas import RequestJson
from kvcli.version import __version__

REFUSALS = {
    "400": "The request is wrong: `param` names the field.",
    "401": "A key is needed.",
    "403": "Another host, or a page of another site.",
    "404": "The model is not served here, or the path does not exist.",
    "405": "The path has another method.",
    "408": "The request took too long to arrive.",
    "413": "The request is too large, or the answer could never fit in memory.",
    "415": "The request is not application/json.",
    "429": "Too many requests wait; Retry-After has the seconds.",
    "431": "The head of the request is too large.",
    "500": "A fault of kvcli; its log has more.",
    "503": "The model is not ready, or out of memory.",
}


class ErrorFields(BaseModel):
    message: str
    type: str
    code: str
    param: str | None
    try_: list[str] = Field(alias="try", description="what to do about it")
    detail: dict[str, Any]


class Error(BaseModel):
    type: Literal["error"]
    error: ErrorFields


@dataclass(frozen=True, slots=True)
class Operation:
    """A path of the server. `run` returns the response; a KvcliError that it raises becomes one."""

    path: str
    summary: str
    run: Callable[[Request], Awaitable[ASGIApp]]
    body: type[RequestJson] | None = None  # of a POST; None: a GET
    gives: Sequence[str] = ("application/json",)  # content types of the response

    @property
    def route(self) -> Route:
        return Route(self.path, self.run, methods=["POST" if self.body else "GET"])


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document."""
    bodies: dict[type[BaseModel], None] = dict.fromkeys([Error, *(one.body for one in operations if one.body)])
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_SCHEMA + "{model}")
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvcli", "version": __version__},
        "paths": {
            one.path.replace(":path}", "}"): {"post" if one.body else "get": _described(one)} for one in operations
        },
        "security": [{}, {"key": []}],
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": key}},
    }


_SCHEMA = "#/components/schemas/"


def _described(one: Operation) -> dict[str, Any]:
    def json_of(kind: type[BaseModel]) -> dict[str, Any]:
        return {"content": {"application/json": {"schema": {"$ref": _SCHEMA + kind.__name__}}}}

    given = {"in": "path", "required": True, "schema": {"type": "string"}}
    content = {kind: {"schema": {"type": "object"} if kind == "application/json" else {}} for kind in one.gives}
    refusals = {status: {"description": said, **json_of(Error)} for status, said in REFUSALS.items()}
    return {
        "summary": one.summary,
        "operationId": re.sub(r"\W+", "_", one.path).strip("_") or "page",
        "parameters": [{"name": name, **given} for name in re.findall(r"{(\w+)", one.path)],
        "responses": {"200": {"description": "The answer.", "content": content}, **refusals},
        **({"requestBody": {"required": True, **json_of(one.body)}} if one.body else {}),
    }
