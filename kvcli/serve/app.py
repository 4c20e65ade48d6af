"""The server's application: its paths, behind the gate."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router

from kvcli.errors import BadInput
from kvcli.models.text import decode, encode
from kvcli.models.tool_calls import check_tools
from kvcli.serve import completions, messages, page, responses
from kvcli.serve.gate import Gate
from kvcli.serve.host import Asked, Host
from kvcli.serve.openapi import Operation, document
from kvcli.serve.schemas import DetokenizeRequest, TokenizeRequest, parsed
from kvcli.settings.profile import Profile

STUCK = 60.0  # seconds without a sign of life of the engine


def server_app(
    host: Host, *, hosts: Collection[str] = (), origins: Collection[str] = (), key: bytes | None = None
) -> CORSMiddleware:
    """Return the ASGI application. Parameters are those of the gate."""
    made = [one for api in (completions, responses, messages, page) for one in api.operations(host)]
    made += _operations(host)
    openapi = document(made)

    async def described(_: Request) -> Response:
        return JSONResponse(openapi)

    made.append(Operation("/openapi.json", "Describe this API.", described))
    router = Router([one.route for one in made], redirect_slashes=False)
    gate = Gate(router, host.bug, host.metrics.request, hosts, origins, key)
    heads = ("authorization", "content-type", "x-api-key")
    return CORSMiddleware(gate, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=heads)


def _operations(host: Host) -> list[Operation]:
    began, model = int(time.time()), host.model

    def entry(name: str, of: Profile) -> dict[str, Any]:
        about = {"object": "model", "created": began, "owned_by": "kvcli", "max_model_len": model.limit}
        meta = {"profile": of.name, "exactness": of.exactness, "description": of.description}
        return {"id": name, **about, "meta": meta}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [entry(*each) for each in host.names.items()]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        return JSONResponse(entry(name, host.profile_of(Asked(name))))

    async def tokenize(request: Request) -> Response:
        body = await parsed(TokenizeRequest, request)
        plain, tools = await completions.plain(host, body, []), check_tools(body.tools, "tools") if body.tools else ()
        asked = Asked(body.model, messages=plain, variables=body.chat_template_kwargs, tools=tools)
        profile = host.profile_of(asked)
        if body.prompt is None:
            ids = await host.prompt_of(asked, profile)
        else:
            text, special = body.prompt, body.add_special_tokens
            ids = await host.text_of(lambda: encode(model.tokenizer, text, special))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": model.limit, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = await host.text_of(lambda: [*map(host.word, ids)])
        return JSONResponse(found)

    async def detokenize(request: Request) -> Response:
        body = await parsed(DetokenizeRequest, request)
        host.profile_of(Asked(body.model))
        if wrong := [i for i in body.tokens if i >= model.lm.vocab]:
            raise BadInput(f"token {wrong[0]} is outside the vocabulary of {model.lm.vocab:,}", code="no_such_token")
        return JSONResponse({"prompt": await host.text_of(lambda: decode(model.tokenizer, body.tokens))})

    async def health(_: Request) -> Response:
        status = model.engine.snapshot()
        is_well = (status.step_age or 0.0) < STUCK
        said = {key: getattr(status, key) for key in ("running", "waiting", "step_age")}
        return JSONResponse({"status": "ok" if is_well else "stuck", **said}, 200 if is_well else 503)

    async def metrics(_: Request) -> Response:
        return Response(host.metrics.text(), media_type="text/plain; version=0.0.4")

    return [
        Operation("/v1/models", "List the model under each profile.", models),
        Operation("/v1/models/{model:path}", "Describe the model under one profile.", one_model),
        Operation("/tokenize", "Return the tokens of a text or of a conversation.", tokenize, TokenizeRequest),
        Operation("/detokenize", "Return the text of tokens.", detokenize, DetokenizeRequest),
        Operation("/health", "Tell whether the engine lives.", health),
        Operation("/metrics", "Return metrics for Prometheus.", metrics, gives=("text/plain",)),
    ]
