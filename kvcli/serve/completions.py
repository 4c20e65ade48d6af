"""OpenAI's chat completions and completions, as a whole or as a stream."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.requests import Request
from starlette.types import ASGIApp

from kvcli.api import End, Event, Live, Text, Thought, TokenScore, ToolCall, Turn
from kvcli.chat.transcript import openai_form
from kvcli.errors import BadInput, KvcliError
from kvcli.models.text import Detokenizer
from kvcli.models.tool_calls import check_tools
from kvcli.safe_output import BROKEN
from kvcli.serve.errors import error_body
from kvcli.serve.host import Asked, Host
from kvcli.serve.openapi import Operation
from kvcli.serve.schemas import ChatRequest, Common, TextRequest, TokenizeRequest, parsed
from kvcli.serve.stream import frame, response_of

if TYPE_CHECKING:
    from kvcli.engine.stats import Stats

FINISH = {"loop": "length", "interrupted": "length"}  # reasons that OpenAI does not have: the text is incomplete
MODES = {"none": "off", "minimal": "low"}  # efforts that are no mode of thinking
MOST = 64  # answers of a request
LEAST = -9999.0  # log-probability that stands for minus infinity, as in OpenAI's API
DONE = "data: [DONE]\n\n"


def operations(host: Host) -> list[Operation]:
    """Return the operations of this protocol."""

    async def chat(request: Request) -> ASGIApp:
        body = await parsed(ChatRequest, request)
        asked = await asked_of(host, body, request)
        return await _answer(host, body, asked, ChatForm(host, body, asked))

    async def complete(request: Request) -> ASGIApp:
        body = await parsed(TextRequest, request)
        asked = _of_text(body, request)
        return await _answer(host, body, asked, TextForm(host, body, asked, echoes=body.echo))

    kinds = ("application/json", "text/event-stream")
    return [
        Operation("/v1/chat/completions", "Answer a conversation.", chat, ChatRequest, kinds),
        Operation("/v1/completions", "Continue texts.", complete, TextRequest, kinds),
    ]


def _copies(body: Common, request: Request, **also: Any) -> list[Asked]:
    """Return what a request asks for, n times, with seeds that follow each other. Its client waits in turn by its
    address and the user that it names."""
    given = {key: getattr(body, key) for key in ("model", "profile", "set", "ignore_eos", "grammar")}
    client = f"{request.client.host if request.client else ''} {body.user}".strip()
    seeds = [{} if body.seed is None else {"seed": (body.seed + i) % (1 << 63)} for i in range(body.n)]
    return [Asked(**given, sample={**body.sample, **seed}, client=client, **also) for seed in seeds]


async def plain(host: Host, body: ChatRequest | TokenizeRequest, notes: list[str]) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them, with the text of their documents."""
    has_calls = any(one.tool_calls for one in body.messages)
    as_text = has_calls and await host.text_of(lambda: host.model.call_syntax().as_text)
    return [one.plain(await host.documents.text_of(one.content, notes), as_text=as_text) for one in body.messages]


async def asked_of(host: Host, body: ChatRequest, request: Request) -> list[Asked]:
    """Return the answers that a request wants. Raises BadInput."""
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
    schema, notes = body.response_format.grammar, list[str]()
    if [schema is not None, body.grammar is not None, bool(tools)].count(True) > 1:
        said = "response_format, grammar and tools exclude each other"
        raise BadInput(said, code="constrained_tools", try_=["only one of them", 'tool_choice: "none"'])
    return _copies(
        body,
        request,
        messages=await plain(host, body, notes),
        notes=notes,
        variables=body.chat_template_kwargs,
        thinking=MODES.get(effort, effort) if (effort := body.reasoning_effort) else "auto",
        thinking_tokens=body.thinking_tokens,
        schema=schema,
        tools=tools,
        forced=forced,
        most_calls=None if body.parallel_tool_calls else 1,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _of_text(body: TextRequest, request: Request) -> list[Asked]:
    if body.echo and body.stream:
        raise BadInput("echo and stream exclude each other", code="unsupported_field", try_=["only one of them"])
    is_list = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    prompts: Any = body.prompt if is_list else [body.prompt]
    if not all(prompts):
        raise BadInput("the prompt is empty", code="empty_prompt")
    if len(prompts) * body.n > MOST:
        raise BadInput(f"{len(prompts) * body.n} answers are asked for; a request has at most {MOST}", code="bad_field")
    scores = {"top_logprobs": body.logprobs, "prompt_logprobs": body.echo and body.logprobs is not None}
    return [one for text in prompts for one in _copies(body, request, prompt=text, **scores)]


async def _answer(host: Host, body: Common, asked: Sequence[Asked], form: CompletionsForm) -> ASGIApp:
    form.base = {
        "id": f"{form.prefix}-{uuid4().hex}",
        "object": form.chunk_kind if body.stream else form.kind,
        "created": int(time.time()),
        "model": body.model or host.name,
        "system_fingerprint": host.fingerprint(host.profile_of(asked[0])),
    }
    return await response_of(map(host.events, asked), form, stream=body.stream)


def finish_of(turn: Turn) -> dict[str, Any]:
    """Return why an answer ended. `stop_reason` has what OpenAI's words do not say."""
    odd = turn.finish if turn.finish in FINISH else None
    return {"finish_reason": FINISH.get(turn.finish, turn.finish), "stop_reason": odd}


def usage(turns: Sequence[Turn], n: int = 1) -> dict[str, Any]:
    """Return the tokens of answers, n to each prompt."""
    stats = [turn.stats for turn in turns]
    prompt, new = sum(one.prompt for one in stats[::n]), sum(one.new for one in stats)
    drafted, accepted = sum(one.draft_tokens for one in stats), sum(one.accepted_tokens for one in stats)
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    details["reasoning_tokens"] = sum(one.thinking for one in stats)
    found: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    found["prompt_tokens_details"] = {"cached_tokens": sum(one.cached for one in stats[::n])}
    return found | {"completion_tokens_details": details}


def timings(s: Stats) -> dict[str, Any]:
    """Return the times of an answer in llama-server's words."""
    found = dict[str, Any]()
    parts = (("prompt", s.prompt - s.cached, s.read, s.read_tok_s), ("predicted", s.new, s.decode, s.decode_tok_s))
    for name, n, seconds, speed in parts:
        found |= {f"{name}_n": n, f"{name}_ms": 1e3 * seconds, f"{name}_per_second": speed}
        found[f"{name}_per_token_ms"] = 1e3 * seconds / max(1, n)
    drafts = {"draft_n": s.draft_tokens, "draft_n_accepted": s.accepted_tokens}
    return {"cache_n": s.cached, **found, **drafts, "kv_bytes": s.kv_bytes}


@dataclass
class CompletionsForm:
    """Frames of a stream, and choices of a whole response, in one of OpenAI's two forms."""

    host: Host
    body: Common
    asked: Sequence[Asked]  # `body.n` for each prompt
    base: Mapping[str, Any] = field(default_factory=dict)
    echoes: bool = False  # the prompt is returned before the answer
    turns: dict[int, Turn] = field(default_factory=dict)  # by index, as they end
    stats: dict[int, Stats] = field(default_factory=dict)  # of answers so far, by index
    sent: Counter[int] = field(default_factory=Counter)  # tokens whose scores were sent, by index
    calls: Counter[int] = field(default_factory=Counter)  # tool calls so far, by index
    words: dict[int, Detokenizer] = field(default_factory=dict)  # of tokens whose scores were sent, by index
    offset: Counter[int] = field(default_factory=Counter)  # characters of their text

    prefix = kind = chunk_kind = ""

    def delta(self, event: Event, index: int) -> dict[str, Any] | None:
        """Return the part of a choice for an event; None = it has none."""
        raise NotImplementedError

    def choice(self, turn: Turn, index: int) -> dict[str, Any]:
        """Return the choice of a finished answer."""
        raise NotImplementedError

    def scored(self, scores: Sequence[TokenScore], index: int) -> dict[str, Any] | None:
        """Return the log-probabilities of the next tokens of an answer; None = none were asked for."""
        raise NotImplementedError

    def whole(self, turns: list[Turn]) -> dict[str, Any]:
        choices = [{"index": i, **self.choice(turn, i), **finish_of(turn)} for i, turn in enumerate(turns)]
        figures = {"usage": usage(turns, self.body.n), "timings": timings(turns[-1].stats)}
        figures |= self.asked[-1].notes_on(turns[-1])
        return {**self.base, "choices": choices, **figures}

    def of(self, index: int, event: Event) -> Iterable[str]:
        if isinstance(event, Live):
            self.stats[index] = event.stats
        if (said := self.delta(event, index)) is None:
            return
        has_timings, scores = self.body.timings_per_token or isinstance(event, End), getattr(event, "scores", ())
        also: dict[str, Any] = {"finish_reason": None}
        if isinstance(event, End):  # the scores of tokens without a text, such as the last one
            self.turns[index], scores = event.turn, event.turn.scores[self.sent[index] :]
            self.stats[index] = event.turn.stats
            also = finish_of(event.turn)
        self.sent[index] += len(getattr(event, "ids", ()))
        choice = {"index": index, **said, "logprobs": self.scored(scores, index), **also}
        times = {"timings": timings(self.stats[index])} if has_timings else {}
        times |= self.asked[index].notes_on(event.turn) if isinstance(event, End) else {}
        yield frame({**self.base, "choices": [choice], **times})
        if len(self.turns) == len(self.asked):
            if self.body.stream_options.include_usage:
                turns = [self.turns[index] for index in sorted(self.turns)]
                yield frame({**self.base, "choices": [], "usage": usage(turns, self.body.n)})
            yield DONE

    def error(self, error: KvcliError) -> str:
        return frame(error_body(error))


class ChatForm(CompletionsForm):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def delta(self, event: Event, index: int) -> dict[str, Any] | None:
        said: dict[str, Any] = {}
        if isinstance(event, Live):
            said = {"role": "assistant", "content": ""}
        elif isinstance(event, Text):
            said = {"content": event.text}
        elif isinstance(event, Thought):
            said = {"reasoning_content": event.text}
        elif isinstance(event, ToolCall):
            said = {"tool_calls": [{"index": self.calls[index], **openai_form(event, as_text=True)}]}
            self.calls[index] += 1
        return {"delta": said} if said or isinstance(event, End) else None

    def choice(self, turn: Turn, index: int) -> dict[str, Any]:
        calls = [openai_form(call, as_text=True) for call in turn.tool_calls]
        text = turn.text or (None if calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        message |= {"reasoning_content": turn.thinking} if turn.thinking else {}
        message |= {"tool_calls": calls} if calls else {}
        return {"message": message, "logprobs": self.scored(turn.scores[turn.stats.thinking :], index)}

    def scored(self, scores: Sequence[TokenScore], index: int) -> dict[str, Any] | None:
        each = [{**self._token(s.id, s.logprob), "top_logprobs": [self._token(*one) for one in s.top]} for s in scores]
        return {"content": each, "refusal": None} if each else None

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        word = self.host.word(token)
        raw = None if BROKEN in word else list(word.encode("utf-8", "replace"))
        return {"token": word, "logprob": _finite(logprob), "bytes": raw}


class TextForm(CompletionsForm):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def delta(self, event: Event, index: int) -> dict[str, Any] | None:
        if isinstance(event, Text | Thought):
            return {"text": event.text}
        return {"text": ""} if isinstance(event, End) else None

    def choice(self, turn: Turn, index: int) -> dict[str, Any]:
        echo: Any = self.asked[index].prompt if self.echoes else ""
        if not isinstance(echo, str):
            words = Detokenizer(self.host.model.tokenizer)
            echo = words.push(echo) + words.finish()
        scores = self.scored([*turn.prompt_scores, *turn.scores], index)
        return {"text": echo + turn.thinking + turn.text, "logprobs": scores}

    def scored(self, scores: Sequence[TokenScore], index: int) -> dict[str, Any] | None:
        if not scores:
            return None
        word, offsets = self.host.word, list[int]()
        words = self.words.setdefault(index, Detokenizer(self.host.model.tokenizer))
        for score in scores:
            offsets.append(self.offset[index])
            self.offset[index] += len(words.push([score.id]))
        return {
            "tokens": [word(score.id) for score in scores],
            "token_logprobs": [None if s.logprob is None else _finite(s.logprob) for s in scores],
            "top_logprobs": [{word(i): _finite(p) for i, p in s.top} or None for s in scores],
            "text_offset": offsets,
        }


def _finite(logprob: float | None) -> float:
    """Return a number that JSON has. OpenAI's clients want one for a token that was input."""
    return max(LEAST, logprob) if logprob is not None else 0.0
