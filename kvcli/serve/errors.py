"""Errors of the server, in OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from kvcli.errors import BadInput, Busy, ContextOverflow, DoesNotFit, ExitStatus, KvcliError
from kvcli.schemas.base import valid

_ON_THIS_SIDE = (ExitStatus.INTERNAL, ExitStatus.ENGINE_UNREACHABLE)
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# what a command line types -> what a request has in its place; other options are not for requests
_FIELDS = {
    r"-P (\w+)": r'profile: "\1"',
    r"-t ([\d.]+)": r"temperature: \1",
    r"--spec (\w+)": r'set: {"spec.method": "\1"}',
    r"--set ((?:spec|sample)\.\w+)=([\d.]+)": r'set: {"\1": \2}',
    r"--set ((?:spec|sample)\.\w+)=(\w+)": r'set: {"\1": "\2"}',
}


class Refused(BadInput):
    """A refusal with an HTTP status of its own. `param`: the field of the request that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] = {}, **told: Any
    ) -> None:
        super().__init__(message, **told)
        self.status, self.param, self.headers = status, param, headers


def status_of(error: KvcliError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, Busy):
        return 429
    if isinstance(error, DoesNotFit):
        return 413 if error.code == "no_room" else 503
    return 500 if error.exit in _ON_THIS_SIDE else 400


def error_body(error: KvcliError) -> dict[str, Any]:
    """Return the error in OpenAI's form and Anthropic's, with what to do about it as `try`."""
    status = status_of(error)
    usual = "invalid_request_error" if status < 500 else "server_error"
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else error.code
    problems: Any = error.detail.get("problems", ())  # of settings, which a command line shows with a caret
    lines = [f"{one['key']}: {one['message']}; {one['hint']}" for one in problems]
    said = {
        "message": "; ".join(lines or [error.message, *error.lines]),
        "type": _TYPES.get(status, usual),
        "param": getattr(error, "param", None),
        "code": code,
        "try": [hint for one in error.try_ if not (hint := _as_field(one)).startswith(("-", "/"))],
        "detail": {key: value for key, value in error.detail.items() if key != "answer"},
    }
    return {"type": "error", "error": valid(said)}  # the type is for Anthropic's clients


def _as_field(hint: str) -> str:
    """Return a hint for a command line as one for a request, if it has such a field."""
    for option, field in _FIELDS.items():
        hint = re.sub(f"^{option}", field, hint)
    return hint


def error_response(error: KvcliError) -> JSONResponse:
    """Return the error as a response with its status."""
    headers = error.headers if isinstance(error, Refused) else {}
    if isinstance(error, Busy):
        headers = {"Retry-After": str(max(1, round(error.retry_after)))}
    return JSONResponse(error_body(error), status_of(error), headers=headers)
