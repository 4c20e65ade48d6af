"""Operations of the server: each is a route, and a part of /openapi.json with all its refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    refusal = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for one in operations:
        found: dict[str, Any] = {"summary": one.summary, "operationId": one.path.strip("/").replace("/", "_") or "page"}
        content = {kind: {"schema": {} if kind != "application/json" else {"type": "object"}} for kind in one.gives}
        found["responses"] = {
            "200": {"description": "The answer.", "content": content},
            **{status: {"description": said, **refusal} for status, said in REFUSALS.items()},
        }
        if one.body:
            schema = {"$ref": f"#/components/schemas/{one.body.__name__}"}
            found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(one.path, {})["post" if one.body else "get"] = found
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvcli", "version": __version__},
        "paths": paths,
        "security": [{}, {"key": []}],
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
