"""OpenAI's chat completions and completions, as a whole or as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from kvcli.api import End, Event, Text, Thought, ToolCall, Turn, Waiting
from kvcli.errors import BadInput, KvcliError
from kvcli.models.tool_calls import check_tools
from kvcli.serve.host import Asked, Host
from kvcli.serve.openapi import Operation
from kvcli.serve.schemas import ChatRequest, Common, TextRequest, parsed
from kvcli.serve.stream import EventStream, error_frame, frame, several, turns_of

FINISH = {"loop": "stop", "interrupted": "length"}  # reasons that OpenAI does not have; others are alike
MODES = {"none": "off", "minimal": "low"}  # efforts that are no mode of thinking
DONE = "data: [DONE]\n\n"


def operations(host: Host) -> list[Operation]:
    """Return the operations of this protocol."""

    async def chat(request: Request) -> ASGIApp:
        body = await parsed(ChatRequest, request)
        return await _answer(host, body, _of_chat(body, client_of(request, body.user)), ChatForm())

    async def complete(request: Request) -> ASGIApp:
        body = await parsed(TextRequest, request)
        return await _answer(host, body, _of_text(body, client_of(request, body.user)), TextForm())

    kinds = ("application/json", "text/event-stream")
    return [
        Operation("/v1/chat/completions", "Answer a conversation.", chat, ChatRequest, kinds),
        Operation("/v1/completions", "Continue texts.", complete, TextRequest, kinds),
    ]


def client_of(request: Request, user: str = "") -> str:
    """Return the name under which requests wait in turn: the address, and the user that the request names."""
    return f"{request.client.host if request.client else ''} {user}".strip()


def _common(body: Common, client: str, **also: Any) -> Asked:
    sample = body.sample
    if body.max_tokens is not None:
        sample["max_new_tokens"] = body.max_tokens
    return Asked(
        model=body.model,
        profile=body.profile,
        set=body.set,
        sample=sample,
        ignore_eos=body.ignore_eos,
        grammar=body.grammar,
        client=client,
        **also,
    )


def _copies(asked: Asked, n: int) -> list[Asked]:
    """Return the request n times, with seeds that follow each other."""
    seed = asked.sample.get("seed")
    seeds = [{} if seed is None else {"seed": (int(str(seed)) + i) % (1 << 63)} for i in range(n)]
    return [replace(asked, sample={**asked.sample, **each}) for each in seeds]


def _of_chat(body: ChatRequest, client: str) -> list[Asked]:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadInput("top_logprobs needs logprobs", code="bad_field", try_=["logprobs: true"])
    tools = check_tools(body.tools, "tools") if body.tools and body.tool_choice != "none" else []
    names, forced = [tool["function"]["name"] for tool in tools], list[str]()
    if not isinstance(body.tool_choice, str):
        forced = [body.tool_choice.function.name]
    elif body.tool_choice == "required":
        forced = names
    if not set(forced) <= {*names} or (body.tool_choice == "required" and not forced):
        raise BadInput("tool_choice names no function of tools", code="bad_tools", try_=[f"one of {names}"])
    schema = body.response_format.grammar
    if [schema is not None, body.grammar is not None, bool(tools)].count(True) > 1:
        said = "response_format, grammar and tools exclude each other"
        raise BadInput(said, code="constrained_tools", try_=["only one of them", 'tool_choice: "none"'])
    asked = _common(
        body,
        client,
        messages=[message.plain for message in body.messages],
        variables=body.chat_template_kwargs,
        thinking=MODES.get(effort, effort) if (effort := body.reasoning_effort) else "auto",
        thinking_tokens=body.thinking_tokens,
        schema=schema,
        tools=tools,
        forced=forced,
        most_calls=None if body.parallel_tool_calls else 1,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    if body.max_completion_tokens is not None:
        asked = replace(asked, sample={**asked.sample, "max_new_tokens": body.max_completion_tokens})
    return _copies(asked, body.n)


def _of_text(body: TextRequest, client: str) -> list[Asked]:
    if body.echo:
        raise BadInput("echo is not supported", code="unsupported_field", try_=["leave echo out"])
    several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    prompts: Any = body.prompt if several else [body.prompt]
    if not all(prompts):
        raise BadInput("the prompt is empty", code="empty_prompt")
    return [
        one
        for prompt in prompts
        for one in _copies(_common(body, client, prompt=prompt, top_logprobs=body.logprobs), body.n)
    ]


async def _answer(host: Host, body: Common, asked: Sequence[Asked], form: Form) -> ASGIApp:
    profile = host.profile_of(asked[0])
    form = replace(
        form,
        base={
            "id": f"{form.prefix}-{uuid4().hex}",
            "object": form.kind,
            "created": int(time.time()),
            "model": body.model or host.name,
            "system_fingerprint": host.fingerprint(profile),
        },
        n=body.n,
        wants_usage=body.stream_options.include_usage,
    )
    events = several(host.events(one) for one in asked)
    if body.stream:
        return await EventStream.started(events, replace(form, base={**form.base, "object": form.chunk_kind}))
    turns = await turns_of(events)
    choices = [{"index": i, **form.whole(turn), **finish_of(turn)} for i, turn in enumerate(turns)]
    return JSONResponse({**form.base, "choices": choices, "usage": usage(turns, body.n), "timings": timings(turns[-1])})


def finish_of(turn: Turn) -> dict[str, Any]:
    """Return why an answer ended. `stop_reason` has what OpenAI's words do not say."""
    return {
        "finish_reason": FINISH.get(turn.finish, turn.finish),
        "stop_reason": turn.finish if turn.finish in FINISH else None,
    }


def usage(turns: Sequence[Turn], n: int = 1) -> dict[str, Any]:
    """Return the tokens of answers, n to each prompt."""
    stats = [turn.stats for turn in turns]
    prompt, new = sum(one.prompt for one in stats[::n]), sum(one.new for one in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached for one in stats[::n])},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.thinking for one in stats),
            "accepted_prediction_tokens": sum(one.accepted_tokens for one in stats),
            "rejected_prediction_tokens": sum(one.draft_tokens - one.accepted_tokens for one in stats),
        },
    }


def timings(turn: Turn) -> dict[str, Any]:
    """Return the times of an answer in llama-server's words."""
    s = turn.stats
    read, new = s.prompt - s.cached, s.new
    return {
        "cache_n": s.cached,
        "prompt_n": read,
        "prompt_ms": 1e3 * s.read,
        "prompt_per_token_ms": 1e3 * s.read / max(1, read),
        "prompt_per_second": s.read_tok_s,
        "predicted_n": new,
        "predicted_ms": 1e3 * s.decode,
        "predicted_per_token_ms": 1e3 * s.decode / max(1, new),
        "predicted_per_second": s.decode_tok_s,
        "draft_n": s.draft_tokens,
        "draft_n_accepted": s.accepted_tokens,
        "kv_bytes": s.kv_bytes,
    }


def call_of(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


@dataclass
class Form:
    """Frames of a stream, and choices of a whole response, in one of OpenAI's two forms."""

    base: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    wants_usage: bool = False
    turns: dict[int, Turn] = field(default_factory=dict)  # by index, as they end
    calls: dict[int, int] = field(default_factory=dict)  # tool calls so far, by index
    begun: set[int] = field(default_factory=set)

    prefix = kind = chunk_kind = ""

    def delta(self, index: int, event: Event | Waiting) -> dict[str, Any] | None:
        """Return the part of a choice for an event; None = it has none."""
        raise NotImplementedError

    def whole(self, turn: Turn) -> dict[str, Any]:
        """Return the choice of a finished answer."""
        raise NotImplementedError

    def of(self, index: int, event: Event | Waiting) -> Iterable[str]:
        said = self.delta(index, event)
        if isinstance(event, End):
            self.turns[index] = event.turn
            choice = {"index": index, **(said or {}), **finish_of(event.turn)}
            yield frame({**self.base, "choices": [choice], "timings": timings(event.turn)})
        elif said is not None:
            yield frame({**self.base, "choices": [{"index": index, **said, "finish_reason": None}]})

    def end(self) -> Iterable[str]:
        if self.wants_usage:
            turns = [self.turns[index] for index in sorted(self.turns)]
            yield frame({**self.base, "choices": [], "usage": usage(turns, self.n)})
        yield DONE

    def error(self, error: KvcliError) -> Iterable[str]:
        yield error_frame(error)


class ChatForm(Form):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def delta(self, index: int, event: Event | Waiting) -> dict[str, Any] | None:
        said: dict[str, Any] = {}
        if index not in self.begun:
            self.begun.add(index)
            said = {"role": "assistant", "content": ""}
        if isinstance(event, Text):
            said["content"] = event.text
        elif isinstance(event, Thought):
            said["reasoning_content"] = event.text
        elif isinstance(event, ToolCall):
            number = self.calls[index] = self.calls.get(index, -1) + 1
            said["tool_calls"] = [{"index": number, **call_of(event)}]
        return {"delta": said} if said or isinstance(event, End) else None

    def whole(self, turn: Turn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text or None, "refusal": None}
        if not turn.tool_calls:
            message["content"] = turn.text
        if turn.thinking:
            message["reasoning_content"] = turn.thinking
        if turn.tool_calls:
            message["tool_calls"] = [call_of(call) for call in turn.tool_calls]
        return {"message": message, "logprobs": None}


class TextForm(Form):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def delta(self, index: int, event: Event | Waiting) -> dict[str, Any] | None:
        if isinstance(event, Text | Thought):
            return {"text": event.text, "logprobs": None}
        return {"text": "", "logprobs": None} if isinstance(event, End) else None

    def whole(self, turn: Turn) -> dict[str, Any]:
        return {"text": turn.thinking + turn.text, "logprobs": None}
