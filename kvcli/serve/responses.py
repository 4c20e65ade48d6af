"""OpenAI's responses, without a store: each request has its whole conversation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.types import ASGIApp

from kvcli.api import End, Event, Turn
from kvcli.errors import KvcliError
from kvcli.serve import schemas as f
from kvcli.serve.blocks import AnswerBlock, blocks_of, steps_of
from kvcli.serve.completions import asked_of, finish_of, usage
from kvcli.serve.errors import error_body
from kvcli.serve.host import Asked, Host
from kvcli.serve.openapi import Operation
from kvcli.serve.stream import frame, response_of


class ResponseRequest(f.RequestJson):
    """A conversation in `input`. Other fields are those of the Responses API that chat completions have too."""

    model_config = ConfigDict(extra="allow")
    input: str | f.Objects
    text: f.Object | None = None
    reasoning: f.Object | None = None
    tools: list[f.Object] | None = None


_ECHOED = "instructions max_output_tokens metadata reasoning temperature text top_p"
# what a request may ask for without effect: nothing is stored, cut, encrypted or run later, and thoughts are whole
_USUAL = {"background": (False,), "truncation": ("disabled",), "include": ([], ["reasoning.encrypted_content"])}
_WITHOUT_EFFECT = ("metadata", "prompt_cache_key")  # metadata is returned; the KV cache is found by the prompt
_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}  # of chat, and here
_NAMES |= {"reasoning_effort": "reasoning.effort"}
_PARTS = {"input_text": "text", "output_text": "text", "summary_text": "text", "input_file": "file"}


def operations(host: Host) -> list[Operation]:
    """Return the operations of this protocol."""

    async def respond(request: Request) -> ASGIApp:
        given = await f.json_of(request)
        body = f.translated(ResponseRequest, given, as_chat, _NAMES)
        (asked,) = await asked_of(host, body, request)
        same = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True} | dict.fromkeys(_ECHOED.split())
        base = {
            **{key: given.get(key, usual) for key, usual in same.items()},
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or host.name,
            "system_fingerprint": host.fingerprint(host.profile_of(asked)),
            "error": None,
        }
        return await response_of([host.events(asked)], ResponseForm(base, asked), stream=body.stream)

    kinds = ("application/json", "text/event-stream")
    return [Operation("/v1/responses", "Answer a conversation of items.", respond, ResponseRequest, kinds)]


def as_chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request as one for chat completions. Thoughts of earlier answers are no part of it."""
    usual = [key for key, values in _USUAL.items() if given.get(key) in values]
    own = ("input", "instructions", "text", "reasoning", "max_output_tokens")
    asked = f.rest_of(given, *own, *_WITHOUT_EFFECT, *usual)
    messages = [{"role": "system", "content": said}] if (said := given.get("instructions")) else []
    items: Any = given["input"]
    for i, one in enumerate([{"content": items}] if isinstance(items, str) else items):
        with f.at("input", i):
            _add_item(messages, one)
    text, reasoning, choice = given.get("text", {}), given.get("reasoning", {}), asked.get("tool_choice")
    form = dict[str, Any]()
    if "format" in text:
        with f.at("text", "format"):
            schema = f.rest_of(text["format"], "type")
            form = {"type": text["format"]["type"], **({"json_schema": schema} if schema else {})}
    if "tools" in asked:
        with f.at("tools"):
            functions = [(one["type"], f.rest_of(one, "type", "strict")) for one in asked["tools"]]
        asked["tools"] = [{"type": kind, "function": function} for kind, function in functions]
    if isinstance(choice, dict):
        with f.at("tool_choice"):
            asked["tool_choice"] = {**f.rest_of(choice, "name"), "function": {"name": choice["name"]}}
    f.put(asked, "response_format", form or None, "text.format")
    f.put(asked, "max_completion_tokens", given.get("max_output_tokens"), "max_output_tokens")
    for key, value in f.rest_of(reasoning, "summary").items():
        f.put(asked, f"reasoning_{key}", value, f"reasoning.{key}")
    f.put(asked, "messages", messages, "input")
    return {**asked, **f.rest_of(text, "format")}


def _add_item(messages: list[dict[str, Any]], one: Mapping[str, Any]) -> None:
    """Add an item of the input to the messages, checked."""
    kind, item = one.get("type", "message"), f.rest_of(one, "type", "id", "status", "phase")
    if kind == "message":
        messages.append({"role": "user", **item, "content": f.parts_of(item["content"], _chat_part)})
        f.checked(f.ChatMessage, messages[-1])
    elif kind == "function_call":
        call = {"id": item.pop("call_id"), "type": "function", "function": item}
        f.checked(f.CallOf, call)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = f.parts_of(item.pop("output"), _chat_part, "output")
        messages.append({"role": "tool", "tool_call_id": item.pop("call_id"), **item, "content": content})
        f.checked(f.ChatMessage, messages[-1])
    elif kind != "reasoning":
        raise f.WrongField(["type"], f": items of type {kind} are not supported", "unsupported_field")


def _chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind, rest = _PARTS.get(part["type"], part["type"]), f.rest_of(part, "type", "annotations", "logprobs")
    return {"type": kind, **({"file": rest} if kind == "file" else rest)}


def _response(base: Mapping[str, Any], blocks: Sequence[AnswerBlock], turn: Turn | None) -> dict[str, Any]:
    """Return the response so far, or with its turn the whole response."""
    is_short = turn is not None and finish_of(turn)["finish_reason"] == "length"
    output = [_item(one, "incomplete" if is_short and one is blocks[-1] else "completed") for one in blocks]
    counts = usage([turn]) if turn is not None else {}
    return {
        **base,
        "status": "in_progress" if turn is None else "incomplete" if is_short else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_short else None,
        "output": output,
        "usage": turn
        and {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        },
    }


class ResponseForm:
    """A response, or the events of its stream."""

    def __init__(self, base: Mapping[str, Any], asked: Asked) -> None:
        self._base, self._asked, self._blocks, self._n = base, asked, list[AnswerBlock](), 0

    def whole(self, turns: list[Turn]) -> dict[str, Any]:
        return _response(self._base, blocks_of(turns[0]), turns[0]) | self._asked.notes_on(turns[0])

    def of(self, index: int, event: Event) -> Iterable[str]:
        if not self._n:
            for name in ("created", "in_progress"):
                yield self._frame(name, response=_response(self._base, (), None))
        for step, block, said in steps_of(event, self._blocks):
            number, is_call = {"output_index": block.index}, block.kind == "call"
            place = {"item_id": _id(block), **number, **({} if is_call else {"content_index": 0})}
            name = "function_call_arguments" if is_call else _part(block)["type"]
            scores: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            if step == "begin":
                yield self._frame("output_item.added", **number, item=_item(block, "in_progress"))
                if not is_call:
                    yield self._frame("content_part.added", **place, part=_part(block))
            elif step == "add":
                yield self._frame(f"{name}.delta", **place, delta=said, **scores)
            else:
                whole = {"name": block.name, "arguments": block.text} if is_call else {"text": block.text, **scores}
                yield self._frame(f"{name}.done", **place, **whole)
                if not is_call:
                    yield self._frame("content_part.done", **place, part=_part(block))
                yield self._frame("output_item.done", **number, item=_item(block, "completed"))
        if isinstance(event, End):
            last = _response(self._base, self._blocks, event.turn) | self._asked.notes_on(event.turn)
            yield self._frame(last["status"], response=last)

    def error(self, error: KvcliError) -> str:
        said = error_body(error)
        fields = {key: said["error"][key] for key in ("code", "message", "param")}
        return frame({"type": "error", "sequence_number": self._n, **fields, **said}, "error")

    def _frame(self, name: str, /, **fields: Any) -> str:
        self._n += 1
        return frame({"type": f"response.{name}", "sequence_number": self._n - 1, **fields}, f"response.{name}")


def _id(block: AnswerBlock) -> str:
    return f"{ {'thought': 'rs', 'text': 'msg', 'call': 'fc'}[block.kind] }_{block.id}"


def _part(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: AnswerBlock, status: str) -> dict[str, Any]:
    item, content = {"id": _id(block), "status": status}, [_part(block)] if block.text else []
    if block.kind == "call":
        return {**item, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
    if block.kind == "thought":
        return {**item, "type": "reasoning", "summary": [], "content": content}
    return {**item, "type": "message", "role": "assistant", "content": content}
