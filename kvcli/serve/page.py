"""The page at `/`, and the text of documents that its citations open."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvcli.chat.overflow import refuse_longer
from kvcli.documents import notes_of
from kvcli.serve.host import Host
from kvcli.serve.openapi import Operation
from kvcli.serve.schemas import FileData, parsed

FILES = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}  # paths that need no key
_OWN = [f"{what}-src 'self'" for what in ("script", "style", "connect")]
_NONE = [f"{what} 'none'" for what in ("default-src", "frame-ancestors", "base-uri", "form-action")]
HEADERS = {
    "Content-Security-Policy": "; ".join(_NONE + _OWN),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageFile(FileData):
    type: Literal["input_file"] = "input_file"


def operations(host: Host) -> list[Operation]:
    """Return the operations of the page."""

    async def file(request: Request) -> Response:
        path = request.url.path
        data = Path(__file__).with_name(path[1:] or "page.html").read_bytes()
        return Response(data, media_type=FILES[path], headers=HEADERS)

    async def add(request: Request) -> Response:
        found = await host.documents.read(await parsed(PageFile, request))
        tokenizer, limit = host.model.tokenizer, host.model.limit
        await host.text_of(partial(refuse_longer, found.text, tokenizer, limit))
        tokens = await host.text_of(partial(found.tokens, tokenizer))
        said = {"id": found.sha256, "name": found.name, "unit": found.unit, "tokens": tokens}
        return JSONResponse({**said, "notes": notes_of(found)})

    async def pages(request: Request) -> Response:
        found = host.documents.get(request.path_params["id"])
        sections = [{"label": one.label, "text": one.text} for one in found.sections]
        return JSONResponse({"name": found.name, "unit": found.unit, "sections": sections})

    return [
        *(Operation(path, "Return a file of the page.", file, gives=[kind]) for path, kind in FILES.items()),
        Operation("/kvcli/pages", "Read a document and keep its text in memory.", add, PageFile),
        Operation("/kvcli/pages/{id}", "Return the text of a document, by its sections.", pages),
    ]
