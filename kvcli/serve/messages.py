"""Anthropic's messages, and the count of their tokens."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from kvcli.api import End, Event, Read, Turn
from kvcli.errors import BadInput, KvcliError
from kvcli.models.text import decode
from kvcli.serve import schemas as f
from kvcli.serve.blocks import AnswerBlock, blocks_of, steps_of
from kvcli.serve.completions import asked_of, finish_of
from kvcli.serve.errors import error_body
from kvcli.serve.host import Asked, Host
from kvcli.serve.openapi import Operation
from kvcli.serve.stream import frame, response_of
from kvcli.settings.problems import any_of

_MODES = {"enabled": "on", "disabled": "none", "adaptive": None}  # of thinking; absent: as the model does by itself
_NAMES = {"response_format": "output_config.format", "stop": "stop_sequences"}  # of chat completions, and here
_NAMES |= {"thinking_tokens": "thinking.budget_tokens"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}  # others are the end of a turn
_DELTAS = {"thought": "thinking", "text": "text", "call": "input_json"}


class CountRequest(f.RequestJson):
    """A conversation. Other fields are those of the Messages API that chat completions have too."""

    model_config = ConfigDict(extra="allow")
    model: str = ""
    messages: f.Objects
    tools: list[f.Object] | None = None
    tool_choice: f.Object | None = None
    thinking: f.Object | None = None
    output_config: f.Object | None = None
    metadata: f.Object | None = None


class MessageRequest(CountRequest):
    max_tokens: int


def operations(host: Host) -> list[Operation]:
    """Return the operations of this protocol."""

    async def answer(request: Request) -> ASGIApp:
        body = f.translated(MessageRequest, await f.json_of(request), as_chat, _NAMES)
        (asked,) = await asked_of(host, body, request)
        base = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": body.model}
        form = MessageForm(base, host, asked)
        return await response_of([host.events(asked)], form, stream=body.stream)

    async def count(request: Request) -> ASGIApp:
        body = f.translated(CountRequest, await f.json_of(request), as_chat, _NAMES)
        (asked,) = await asked_of(host, body, request)
        ids = await host.prompt_of(asked, host.profile_of(asked))
        return JSONResponse({"input_tokens": len(ids)})

    kinds = ("application/json", "text/event-stream")
    return [
        Operation("/v1/messages", "Answer a conversation of content blocks.", answer, MessageRequest, kinds),
        Operation("/v1/messages/count_tokens", "Count the tokens of a conversation.", count, CountRequest),
    ]


def as_chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request as one for chat completions. Thoughts of earlier answers are no part of it."""
    asked = f.rest_of(given, "cache_control", "system", "messages", "stop_sequences", *_OBJECTS)
    thinking, config, metadata, choice = (given.get(name, {}) for name in _OBJECTS)
    messages = list[dict[str, Any]]()
    if system := given.get("system"):
        messages.append({"role": "system", "content": f.parts_of(system, _part, "system")})
    for i, message in enumerate(given["messages"]):
        with f.at("messages", i):
            _add_message(messages, message)
    if messages and messages[-1]["role"] == "assistant":
        ways = ["let messages end with one of role user"]
        raise BadInput("an answer at the end is not continued", code="not_supported", try_=ways)
    if tools := asked.get("tools"):
        with f.at("tools"):
            asked["tools"] = [_tool(one) for one in tools]
    if "tool_choice" in given:
        with f.at("tool_choice"):
            function = {"function": {"name": choice["name"]}} if choice["type"] == "tool" else {}
            kind = {"any": "required"}.get(choice["type"], choice["type"])
        asked["tool_choice"] = {"type": "function", **function} if function else kind
        asked["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    if "thinking" in given and (kind := thinking.get("type")) not in _MODES:
        raise f.WrongField(["thinking", "type"], f" is {json.dumps(kind)}; it takes {any_of([*_MODES])}")
    effort, mode, form = config.get("effort"), _MODES[thinking.get("type", "adaptive")], config.get("format")
    form = form and {"type": "json_schema", "json_schema": f.rest_of(form, "type")}
    for own, name, value in (
        ("thinking.type", "reasoning_effort", None if mode == "on" and effort else mode),  # the effort says how much
        ("output_config.effort", "reasoning_effort", effort),
        ("thinking.budget_tokens", "thinking_tokens", thinking.get("budget_tokens")),
        ("output_config.format", "response_format", form),
        ("metadata.user_id", "user", metadata.get("user_id")),
        ("stop_sequences", "stop", given.get("stop_sequences")),
    ):
        f.put(asked, name, value, own)
    if asked.get("service_tier") == "standard_only":
        del asked["service_tier"]
    asked |= f.rest_of(thinking, "type", "budget_tokens")  # refused by their names, as the next ones
    asked |= f.rest_of(config, "effort", "format")
    asked |= {f"metadata.{key}": value for key, value in f.rest_of(metadata, "user_id").items()}
    return {**asked, "messages": messages}


_OBJECTS = ("thinking", "output_config", "metadata", "tool_choice")  # fields that are objects


def _add_message(messages: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Add a message, checked, as one of its text and calls, after those for the results of tools that it has."""
    parts, calls = list[Any](), list[Any]()

    def add(block: Mapping[str, Any]) -> None:
        kind, other = block["type"], f.rest_of(block, "type", "cache_control", *_OF_CALLS)
        if kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            calls.append({**other, "id": block["id"], "function": function})
        elif kind == "tool_result":
            said = f.parts_of(block.get("content") or "", _part)
            said = [*f.as_parts("error:"), *said] if block.get("is_error") else said
            messages.append({**other, "role": "tool", "tool_call_id": block["tool_use_id"], "content": said})
            f.checked(f.ChatMessage, messages[-1])
        elif kind not in ("thinking", "redacted_thinking"):
            parts.append(_part(block))

    blocks = f.parts_of(message["content"], add)
    if parts or calls or not blocks:
        made = {**message, "content": parts if blocks else message["content"], "tool_calls": calls}
        f.checked(f.ChatMessage, made)
        messages.append(made)


_OF_CALLS = ("id", "name", "input", "tool_use_id", "content", "is_error")  # fields of blocks for calls and results


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    rest = f.rest_of(block, "cache_control")
    if rest["type"] != "document":
        return rest
    source, other = rest["source"], f.rest_of(rest, "type", "source", "title", "citations")
    data = b64encode(source["data"].encode()).decode() if source["type"] == "text" else source.get("data")
    if source["type"] not in ("base64", "text") or rest.get("citations", {}).get("enabled"):
        ways = ["a source of type base64 or text", 'citations: {"enabled": false}']
        raise BadInput("this document has citations or another source", code="not_supported", try_=ways)
    return {**other, "type": "file", "file": {"filename": rest.get("title", "document"), "file_data": data}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    function = {**f.rest_of(tool, "type", "input_schema", "cache_control"), "parameters": tool.get("input_schema")}
    return {"type": "function" if kind == "custom" else kind, "function": function}


def _end(host: Host, stops: Any, turn: Turn) -> dict[str, Any]:
    """Return why an answer ended, and the stop sequence that ended it."""
    reason, stop = _REASONS.get(finish_of(turn)["finish_reason"], "end_turn"), None
    if turn.finish == "stop" and turn.ids and turn.ids[-1] not in host.model.lm.stop_ids:
        text = decode(host.model.tokenizer, turn.ids)
        places = [(at, one) for one in stops if (at := text.rfind(one)) >= 0]
        reason, stop = ("stop_sequence", min(places)[1]) if places else (reason, None)
    return {"stop_reason": reason, "stop_sequence": stop}


class MessageForm:
    """A message, or the events of its stream."""

    def __init__(self, base: Mapping[str, Any], host: Host, asked: Asked) -> None:
        self._base, self._asked, self._blocks, self._has_begun = base, asked, list[AnswerBlock](), False
        self._end = partial(_end, host, asked.sample.get("stop", ()))

    def whole(self, turns: list[Turn]) -> dict[str, Any]:
        content = [_block(block, block.text) for block in blocks_of(turns[0])]
        end = {**self._end(turns[0]), "usage": _usage(turns[0]), **self._asked.notes_on(turns[0])}
        return {**self._base, "content": content, **end}

    def of(self, index: int, event: Event) -> Iterable[str]:
        steps = [*steps_of(event, self._blocks)]
        if not self._has_begun and (steps or isinstance(event, Read | End)):
            self._has_begun = True
            n, cached = (event.total, event.cached) if isinstance(event, Read) else (0, 0)
            usage = {"input_tokens": n - cached, "cache_read_input_tokens": cached, "output_tokens": 0}
            message = {**self._base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield _frame("message_start", message=message)
        for step, block, said in steps:
            at, name = {"index": block.index}, _DELTAS[block.kind]
            if step == "begin":
                yield _frame("content_block_start", **at, content_block=_block(block, ""))
            elif step == "add":
                key = "partial_json" if block.kind == "call" else name
                yield _frame("content_block_delta", **at, delta={"type": f"{name}_delta", key: said})
            else:
                yield _frame("content_block_stop", **at)
        if isinstance(event, End):
            also = {"usage": _usage(event.turn), **self._asked.notes_on(event.turn)}
            yield _frame("message_delta", delta=self._end(event.turn), **also)
            yield _frame("message_stop")

    def error(self, error: KvcliError) -> str:
        return _frame("error", **error_body(error))


def _frame(name: str, /, **fields: Any) -> str:
    return frame({"type": name, **fields}, name)


def _block(block: AnswerBlock, text: str) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": json.loads(text or "{}")}


def _usage(turn: Turn) -> dict[str, int]:
    stats = turn.stats
    counts = {"input_tokens": stats.prompt - stats.cached, "cache_read_input_tokens": stats.cached}
    return {**counts, "cache_creation_input_tokens": 0, "output_tokens": stats.new}
