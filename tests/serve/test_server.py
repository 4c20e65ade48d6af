"""The server's application in this process: every route, every refusal, streams, tools, thoughts, and clients that
leave."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvcli
from kvcli.api import Text
from kvcli.chat.model import Model
from kvcli.chat.text_session import TextSession
from kvcli.commands.serve import listen
from kvcli.errors import BadInput, Busy, DoesNotFit, KvcliError
from kvcli.models.text import encode
from kvcli.serve import gate, stream
from kvcli.serve.app import server_app
from kvcli.serve.errors import error_body
from kvcli.serve.gate import BODY
from kvcli.serve.host import LONGEST, Host, served_profiles
from kvcli.settings.profile import Profile
from tests import make, small_tokenizers
from tests.parrot import parrot

KEY = "a-key-of-enough-letters"
PAGE = "http://localhost:3000"
LOCAL = {"host": "localhost:8642"}
NAMES = ("exact", "ngram", "snap", "draft")
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


def bug(error: Exception) -> KvcliError:
    return KvcliError(f"a bug: {type(error).__name__}")


def host_of(model: Any, *names: str) -> Host:
    return Host(model, "demo", served_profiles(model.profile, [Profile.load(name) for name in names]), bug)


class Served:
    """A host and clients of it, in one event loop."""

    def __init__(self, model: Any, *names: str) -> None:
        self.host = host_of(model, *names)
        self.runner = asyncio.Runner()
        self.app = server_app(self.host, origins=[PAGE], hosts=["box.lan"])

    def send(self, method: str, path: str, app: Any | None = None, **how: Any) -> httpx2.Response:
        async def ask() -> httpx2.Response:
            transport = httpx2.ASGITransport(app or self.app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8642") as client:
                return await client.request(method, path, **how)

        return self.runner.run(ask())

    def post(self, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        return self.send("POST", path, json={**(body or {}), **more})


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    lm = make.model("llama", vocab_size=2048, max_position_embeddings=2048)
    lm.stop_ids = frozenset({5})
    made = Served(Model(lm, small_tokenizers.demo(), Profile.load("exact")), *NAMES)
    yield made
    made.runner.run(made.host.aclose())
    made.runner.close()


def error_of(response: httpx2.Response) -> tuple[int, str]:
    said = response.json()["error"]
    assert {*said} == {"message", "type", "param", "code", "try", "detail"}
    return response.status_code, said["code"]


def frames(response: httpx2.Response) -> list[Any]:
    """What a stream sent, whose end is checked."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# --- answers


def test_a_stream_has_the_text_of_the_whole_answer(served):
    whole = served.post(CHAT, HELLO, logprobs=True, top_logprobs=2).json()
    streamed = {"logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}}
    parts = frames(served.post(CHAT, HELLO, **streamed))
    choice, usage = whole["choices"][0], parts.pop()
    deltas = [part["choices"][0] for part in parts]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["delta"].get("content", "") for one in deltas) == choice["message"]["content"]
    assert [one["finish_reason"] for one in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 6
    scores = [score for one in deltas for score in (one["logprobs"] or {"content": []})["content"]]
    assert scores == choice["logprobs"]["content"]
    assert len(scores) == 6
    assert all(len(one["top_logprobs"]) == 2 for one in scores)
    assert whole["timings"]["predicted_n"] == 6


def test_every_name_of_a_profile_is_served_and_drafting_changes_no_text(served):
    found = {one["id"]: one["meta"]["profile"] for one in served.send("GET", "/v1/models").json()["data"]}
    assert found == {"demo": "exact", "demo:exact": "exact", "demo:ngram": "ngram", "demo:snap": "snap"}
    assert served.send("GET", "/v1/models/demo:snap").json()["meta"]["profile"] == "snap"
    assert served.send("GET", "/v1/models/gpt-5").json()["error"]["code"] == "model_not_found"
    exact = served.post(CHAT, HELLO).json()
    for how in ({"model": "demo:ngram"}, {"profile": "ngram"}, {"set": {"spec.method": "ngram"}}):
        other = served.post(CHAT, HELLO, **how).json()
        assert other["choices"][0]["message"] == exact["choices"][0]["message"]
        assert other["system_fingerprint"] != exact["system_fingerprint"]


def test_n_answers_have_seeds_in_a_row_and_one_seed_one_text(served):
    asked = {**HELLO, "temperature": 1, "seed": 4}
    three = [one["message"]["content"] for one in served.post(CHAT, asked, n=3).json()["choices"]]
    each = [served.post(CHAT, asked, seed=4 + i).json()["choices"][0]["message"]["content"] for i in range(3)]
    assert three == each
    assert len({*three}) > 1
    parts = frames(served.post(CHAT, asked, n=3, stream=True))
    for i, text in enumerate(three):
        choices = [one for part in parts for one in part["choices"] if one["index"] == i]
        assert "".join(one["delta"].get("content", "") for one in choices) == text
    free = {served.post(CHAT, {**HELLO, "temperature": 1}).json()["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(free) > 1  # without a seed, each answer is another one


def test_completions_of_texts_and_of_ids_and_what_echo_scores(served):
    ids = served.post("/tokenize", prompt="The depot holds oil").json()["tokens"]
    assert served.post("/detokenize", tokens=ids).json()["prompt"].strip() == "The depot holds oil"
    how = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    one = served.post(TEXT, how, prompt="The depot holds oil").json()
    many = served.post(TEXT, how, prompt=[ids, ids[:-1]]).json()
    assert [choice["index"] for choice in many["choices"]] == [0, 1]
    assert many["choices"][0]["text"] == one["choices"][0]["text"]
    assert one["usage"]["prompt_tokens"] == len(ids)
    echoed = served.post(TEXT, how, prompt=ids, echo=True, logprobs=1).json()["choices"][0]
    assert echoed["text"].endswith(one["choices"][0]["text"])
    scores = echoed["logprobs"]
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["text_offset"]) == len(ids) + 3
    said, words = echoed["text"], scores["tokens"]
    assert all(
        said[at:].startswith(word) for at, word in zip(scores["text_offset"], words, strict=True) if "�" not in word
    )
    assert scores["token_logprobs"][0] is None
    assert all(score < 0 for score in scores["token_logprobs"][1:])
    streamed = frames(served.post(TEXT, how, prompt=ids, stream=True, logprobs=1))
    assert "".join(part["choices"][0]["text"] for part in streamed) == one["choices"][0]["text"]
    whole = served.post(TEXT, how, prompt=ids, logprobs=1).json()["choices"][0]["logprobs"]["text_offset"]
    parts = [part["choices"][0]["logprobs"] for part in streamed]
    assert [at for part in parts if part for at in part["text_offset"]] == whole


def test_text_offsets_count_characters_not_tokens(served):
    """A character of several tokens begins once, and a control token has no text."""
    ids = served.post("/tokenize", prompt="é 🜁 oil").json()["tokens"]
    choice = served.post(TEXT, prompt=[5, *ids], echo=True, logprobs=0, max_tokens=1, temperature=0).json()["choices"][
        0
    ]
    offsets = choice["logprobs"]["text_offset"]
    assert len(offsets) > 8  # this tokenizer has bytes alone for both
    assert offsets[-1] == len("é 🜁 oil") == choice["text"].index("oil") + 3


def test_an_answer_follows_a_schema_or_a_grammar(served):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    asked = {**HELLO, "ignore_eos": False, "max_tokens": 200}
    found = served.post(CHAT, asked, response_format=form).json()["choices"][0]
    assert json.loads(found["message"]["content"]) == {"a": "x"}
    said = served.post(CHAT, asked, grammar='root ::= "oil"').json()["choices"][0]
    assert (said["message"]["content"], said["finish_reason"]) == ("oil", "stop")


def test_the_tokens_of_a_prompt_do_not_depend_on_earlier_answers(served):
    first = HELLO | {"temperature": 1.2, "seed": 3, "max_tokens": 40}
    said = served.post(CHAT, first).json()
    text = said["choices"][0]["message"]["content"]
    spelt = encode(served.host.model.tokenizer, text)
    assert len(spelt) != said["usage"]["completion_tokens"], "the model spelt its answer in other tokens"
    turns = [*HELLO["messages"], {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    other = Served(served.host.model, *NAMES)  # has answered nobody
    here, there = (one.post(CHAT, HELLO, messages=turns).json() for one in (served, other))
    other.runner.run(other.host.aclose())
    other.runner.close()
    assert here["usage"]["prompt_tokens"] == there["usage"]["prompt_tokens"]
    assert here["choices"] == there["choices"]


def test_samplers_and_stops_reach_the_answer(served):
    said = served.post(CHAT, HELLO, max_tokens=12).json()["choices"][0]["message"]["content"]
    stop = said[5:8]
    cut = served.post(CHAT, HELLO, max_tokens=12, stop=[stop]).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (said[: said.index(stop)], "stop")
    biased = served.post(CHAT, HELLO, max_tokens=1, logprobs=True, logit_bias={"300": 100}).json()["choices"][0]
    assert biased["logprobs"]["content"][0]["token"] == served.host.word(300)


def test_a_variable_of_a_template_may_have_any_name(served):
    assert served.post(CHAT, HELLO, chat_template_kwargs={"tokenizer": 1, "note": 1}).status_code == 200


# --- refusals

ACALL = {"id": "c", "function": {"name": "f"}}
MANY = [{"role": "user", "content": "Hello " * 3000}]
DEEP = json.loads('{"not":' * 150 + "{}" + "}" * 150)
REFUSED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "an unknown field": (400, "unsupported_field", {"frobnicate": 1}),
    "a known field that is not served": (400, "unsupported_field", {"audio": {}}),
    "a text for a number": (400, "bad_field", {"temperature": "1"}),
    "a number out of range": (400, "bad_field", {"top_p": 2}),
    "no messages": (400, "bad_field", {"messages": []}),
    "no content": (400, "bad_field", {"messages": [*HELLO["messages"], {"role": "user"}]}),
    "null content": (400, "bad_field", {"messages": [{"role": "user", "content": None}]}),
    "an empty list of content": (400, "bad_field", {"messages": [{"role": "user", "content": []}]}),
    "an answer without content or calls": (400, "bad_field", {"messages": [{"role": "assistant"}]}),
    "a result without content": (400, "bad_field", {"messages": [{"role": "tool", "tool_call_id": "c"}]}),
    "calls of a user": (400, "bad_field", {"messages": [{"role": "user", "content": "?", "tool_calls": [ACALL]}]}),
    "two limits": (400, "bad_field", {"max_completion_tokens": 7}),
    "two temperatures": (400, "bad_field", {"set": {"sample.temperature": 1}}),
    "an empty stop": (400, "bad_field", {"stop": ""}),
    "a schema that is missing": (400, "bad_field", {"response_format": {"type": "json_schema"}}),
    "a schema of a text": (400, "bad_field", {"response_format": {"type": "text", "json_schema": {"schema": {}}}}),
    "a picture": (400, "bad_field", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    "a role": (400, "bad_field", {"messages": [{"role": "robot", "content": "?"}]}),
    "another model": (404, "model_not_found", {"model": "gpt-5"}),
    "another profile": (404, "model_not_found", {"model": "demo:nosuch"}),
    "a profile that loads otherwise": (404, "model_not_found", {"profile": "draft"}),
    "a setting of memory": (400, "not_allowed", {"set": {"memory.disk": "900GiB"}}),
    "a file": (400, "not_allowed", {"set": {"policy.headmap": "/etc/passwd"}}),
    "a draft model": (400, "not_allowed", {"set": {"spec.method": "model", "spec.model": "/etc"}}),
    "a key that does not exist": (400, "bad_config", {"set": {"sample.nosuch": 1}}),
    "a long prompt": (400, "context_length_exceeded", {"messages": MANY}),
    "a bad schema": (
        400,
        "bad_schema",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}},
    ),
    "a deep schema": (400, "bad_schema", {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}),
    "a bad grammar": (400, "bad_grammar", {"grammar": "root ::= ("}),
    "a large grammar": (400, "grammar_too_large", {"grammar": "#" * (LONGEST + 1)}),
    "a schema and a grammar": (
        400,
        "constrained_tools",
        {"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}},
    ),
    "tools that the template lacks": (400, "no_tool_calls", {"tools": TOOLS}),
    "tools without a name": (400, "bad_tools", {"tools": [{"type": "function"}]}),
    "a choice of no tool": (400, "bad_tools", {"tool_choice": "required"}),
    "thinking that the template lacks": (400, "no_thinking", {"reasoning_effort": "high"}),
    "top_logprobs alone": (400, "bad_field", {"top_logprobs": 1}),
    "a variable that changes the prompt's end": (
        400,
        "not_allowed",
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ),
    "a variable that is no template's": (400, "not_allowed", {"chat_template_kwargs": {"conversation": []}}),
    "arguments that are no object": (
        400,
        "bad_field",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}
            ]
        },
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_is_refused_by_name(served, case):
    status, code, more = REFUSED[case]
    assert error_of(served.post(CHAT, {**HELLO, **more})) == (status, code)
    assert error_of(served.post(CHAT, {**HELLO, **more}, stream=True)) == (status, code)


WORDS: dict[str, tuple[str, Any, str]] = {
    "max_tokens": (CHAT, {**HELLO, "max_tokens": "7"}, 'max_tokens is "7"; it takes a whole number'),
    "n": (CHAT, {**HELLO, "n": 17}, "n is 17; it takes a number up to 16"),
    "temperature": (CHAT, {**HELLO, "temperature": -1}, "temperature is -1; it takes a number from 0"),
    "stream": (CHAT, {**HELLO, "stream": "yes"}, 'stream is "yes"; it takes true or false'),
    "stop": (CHAT, {**HELLO, "stop": 3}, "stop is 3; it takes a text or a list"),
    "store": (CHAT, {**HELLO, "store": True}, "store is true; it takes false"),
    "set": (CHAT, {**HELLO, "set": []}, "set is []; it takes an object"),
    "tool_choice": (
        CHAT,
        {**HELLO, "tool_choice": 3},
        'tool_choice is 3; it takes "auto", "none" or "required" or an object',
    ),
    "messages": (CHAT, {"messages": []}, "messages is []; it takes a list that is not empty"),
    "messages.1": (CHAT, {"messages": [*HELLO["messages"], 3]}, "messages.1 is 3; it takes an object"),
    "messages.0.content": (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content is missing"),
    "messages.0.role": (
        CHAT,
        {"messages": [{"role": "boss", "content": "?"}]},
        'messages.0.role is "boss"; it takes "system", "developer", "user", "assistant" or "tool"',
    ),
    "messages.0.content.0.file.file_data": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": 3}}]}]},
        "messages.0.content.0.file.file_data is 3; it takes a text",
    ),
    "prompt.1": (TEXT, {"prompt": [1, "a"]}, 'prompt.1 is "a"; it takes a whole number or a list'),
    "max_completion_tokens": (
        CHAT,
        {**HELLO, "max_completion_tokens": 7},
        "max_completion_tokens is 7 and max_tokens, which means the same, is 6",
    ),
}


@pytest.mark.parametrize("field", WORDS)
def test_a_refusal_says_the_value_and_what_the_field_takes(served, field):
    path, asked, said = WORDS[field]
    error = served.post(path, asked).json()["error"]
    assert (error["message"], error["param"]) == (said, field)


IDLE: dict[str, dict[str, Any]] = {
    "thinking_tokens": {"thinking_tokens": 9},
    "chat_template_kwargs.enable_thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    "sample.top_p": {"top_p": 0.5},
    "sample.xtc_threshold": {"xtc_threshold": 0.2, "temperature": 1},
    "sample.dry_base": {"dry_base": 2, "n": 2},
}


@pytest.mark.parametrize("field", IDLE)
def test_a_field_without_effect_is_noted_and_one_with_it_is_not(served, field):
    (note,) = served.post(CHAT, {**HELLO, **IDLE[field]}).json()["notes"]
    assert note.startswith(f"{field} has no effect")
    acts = {
        "temperature": 1,
        "top_p": 0.5,
        "xtc_threshold": 0.2,
        "xtc_probability": 0.1,
        "stop_loops": 9,
        "max_tokens": 2,
    }
    assert served.post(CHAT, {**HELLO, **acts}).json()["notes"] == []


RAW: dict[str, tuple[int, str, bytes]] = {
    "no JSON": (400, "bad_json", b"{"),
    "not a number": (400, "bad_json", b'{"temperature": NaN}'),
    "deep": (400, "bad_json", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a number without end": (400, "bad_json", b'{"metadata": {"a": 1e999}}'),
    "half a character": (400, "bad_json", b'{"model": "\\ud800"}'),
    "a list": (400, "bad_field", b"[]"),
    "large": (413, "body_too_large", b'{"a": "' + b"a" * BODY + b'"}'),
}


@pytest.mark.parametrize("case", RAW)
def test_a_body_that_is_no_request_is_refused(served, case):
    status, code, body = RAW[case]
    found = served.send("POST", CHAT, content=body, headers={"content-type": "application/json"})
    assert error_of(found) == (status, code)


HEADS: dict[str, tuple[int, str, dict[str, str]]] = {
    "this machine": (200, "", {}),
    "a final dot": (200, "", {"host": "localhost.:8642"}),
    "an IPv6 address": (200, "", {"host": "[::1]:8642"}),
    "a name that was allowed": (200, "", {"host": "box.lan"}),
    "its own page": (200, "", {"origin": "http://localhost:8642", "sec-fetch-site": "same-origin"}),
    "a page that was allowed": (200, "", {"origin": PAGE, "sec-fetch-site": "same-site"}),
    "rebinding": (403, "bad_host", {"host": "evil.example:8642"}),
    "a name in front": (403, "bad_host", {"host": "127.0.0.1:8642@evil.example"}),
    "no host": (403, "bad_host", {"host": ""}),
    "another page": (403, "bad_origin", {"origin": "https://evil.example"}),
    "a page of another port": (403, "bad_origin", {"origin": "http://localhost:3001"}),
    "a page without a name": (403, "bad_origin", {"origin": "null"}),
    "a frame": (403, "bad_origin", {"sec-fetch-site": "cross-site"}),
}


@pytest.mark.parametrize("case", HEADS)
def test_only_this_machine_and_its_pages_are_served(served, case):
    status, code, head = HEADS[case]
    found = served.send("GET", "/v1/models", headers={**LOCAL, **head})
    assert found.status_code == status if status == 200 else error_of(found) == (status, code)
    allowed = {name: value for name, value in found.headers.items() if name.startswith("access-control")}
    assert allowed == ({"access-control-allow-origin": PAGE} if head.get("origin") == PAGE else {})


def test_a_page_can_send_no_simple_request_and_asks_in_vain(served):
    kinds = ("text/plain", "application/x-www-form-urlencoded", "")
    for kind in kinds:
        found = served.send("POST", CHAT, content=json.dumps(HELLO), headers={"content-type": kind})
        assert error_of(found) == (415, "bad_content_type")
    asks = {"access-control-request-method": "POST"}
    for origin, status in (("https://evil.example", 400), (PAGE, 200)):
        found = served.send("OPTIONS", CHAT, headers={**asks, "origin": origin})
        assert (found.status_code, found.headers.get("access-control-allow-origin")) == (
            status,
            origin if status == 200 else None,
        )


def test_a_key_is_needed_where_there_is_one(served):
    app = server_app(served.host, key=KEY.encode())
    given: dict[str, Any] = {
        "none": {},
        "another": {"authorization": f"Bearer {KEY}x"},
        "letters outside of ASCII": {"authorization": "Bearer é".encode("latin-1")},
    }
    for head in given.values():
        found = served.send("GET", "/v1/models", app, headers=head)
        assert error_of(found) == (401, "invalid_api_key")
        assert KEY not in found.text
    for head in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
        assert served.send("GET", "/v1/models", app, headers=head).status_code == 200
    assert served.send("GET", "/health", app).status_code == 200
    assert served.send("GET", "/metrics", app).status_code == 401
    assert KEY not in repr(app)


def test_paths_and_methods_that_do_not_exist(served):
    assert error_of(served.send("GET", "/../../etc/passwd")) == (404, "not_found")
    assert error_of(served.send("GET", CHAT)) == (405, "wrong_method")
    assert error_of(served.post("/v1/embeddings", input="a")) == (404, "not_found")


def test_a_slow_body_is_refused(served):
    async def drips() -> Any:
        yield b"{"
        await asyncio.sleep(10)

    app = server_app(served.host)
    vars(app.app)["patience"] = 0.05
    found = served.send("POST", CHAT, app, content=drips(), headers={"content-type": "application/json"})
    assert error_of(found) == (408, "too_slow")


def test_bodies_in_flight_are_bounded_together_and_freed_with_their_answers(served, monkeypatch):
    monkeypatch.setattr(gate, "BODIES", 4096)
    said = {**HELLO, "max_tokens": 1800, "stop_loops": 0}

    async def three() -> bytes:
        first = Client(served.app, {**said, "user": "a" * 3000})
        while not served.host.model.engine._engine._tasks:
            await asyncio.sleep(0.001)
        second = Client(served.app, {**said, "user": "b" * 3000})
        await second.task
        first.leaves.set()
        await first.task
        return bytes(second.sent)

    assert json.loads(served.runner.run(three()))["error"]["code"] == "queue_full"
    assert served.app.app.held == 0
    assert served.post(CHAT, HELLO, user="c" * 3000).status_code == 200


def test_a_grammar_that_is_not_ready_in_time_is_refused(served, monkeypatch):
    monkeypatch.setattr("kvcli.serve.host.COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(served.host.model, "constraint", lambda _: time.sleep(0.1))
    assert error_of(served.post(CHAT, HELLO, grammar='root ::= "a"')) == (400, "grammar_too_slow")


def test_the_fingerprint_depends_on_the_weights_and_their_processor(served, monkeypatch):
    def of(key: dict[str, str]) -> str:
        monkeypatch.setattr("kvcli.serve.host.cache_key", lambda _: key)
        return host_of(served.host.model, "exact").fingerprint(Profile.load("exact"))

    assert len({of({"weights": "1"}), of({"weights": "2"}), of({"weights": "1", "device": "cpu avx2"})}) == 3


def test_a_port_that_is_taken_is_named():
    with listen("127.0.0.1", 0) as first, pytest.raises(BadInput) as raised:
        listen("127.0.0.1", first.getsockname()[1])
    assert raised.value.code == "no_port"


def test_an_unforeseen_error_is_told_without_its_words(served, monkeypatch):
    def fails(*_: Any) -> Any:
        raise RuntimeError("a secret path")

    monkeypatch.setattr(served.host, "_prompt", fails)
    found = served.post(CHAT, HELLO)
    assert error_of(found) == (500, "internal")
    assert "secret" not in found.text


# --- descriptions


def test_openapi_names_every_route_and_every_status(served):
    described = served.send("GET", "/openapi.json").json()
    for path, method in ((CHAT, "post"), (TEXT, "post"), ("/tokenize", "post"), ("/v1/models", "get")):
        statuses = described["paths"][path][method]["responses"]
        assert {"200", "400", "401", "403", "404", "408", "413", "415", "429", "500", "503"} <= {*statuses}
    fields = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"temperature", "xtc_probability", "dry_multiplier", "tools", "chat_template_kwargs"} <= {*fields}


def test_metrics_are_read_by_prometheus_own_parser(served):
    served.post(CHAT, HELLO)
    found = {one.name: one for one in text_string_to_metric_families(served.send("GET", "/metrics").text)}
    assert {"kvcli_requests", "vllm:generation_tokens", "vllm:num_requests_running", "kvcli_sessions"} <= {*found}
    assert sum(one.value for one in found["vllm:generation_tokens"].samples if one.name.endswith("_total")) > 0


# --- clients that leave


class Client:
    """A client as an ASGI server sees it, which may leave at any time."""

    def __init__(self, app: Any, body: dict[str, Any]) -> None:
        self.sent, self.leaves, self.body = bytearray(), asyncio.Event(), json.dumps(body).encode()
        head = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": head, "scheme": "http", "query_string": b""}
        self.task = asyncio.ensure_future(app(scope, self.receive, self.send))
        self.is_read = False

    async def receive(self) -> Any:
        if self.is_read:
            await self.leaves.wait()
            return {"type": "http.disconnect"}
        self.is_read = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Any) -> None:
        self.sent += message.get("body", b"")


PHASES = ["writing, streamed", "writing, whole", "reading", "compiling"]


@pytest.mark.parametrize("phase", PHASES)
def test_work_ends_when_its_client_leaves(served, phase, monkeypatch):
    """A long answer, a long prompt or a slow grammar of somebody who left keeps nobody waiting."""
    asked = {**HELLO, "max_tokens": 1800, "stop_loops": 0, "stream": "streamed" in phase}
    if phase == "reading":
        asked = {**HELLO, "messages": [{"role": "user", "content": "Hello there " * 450}], "set": {}}
    if phase == "compiling":
        monkeypatch.setattr(served.host.model, "constraint", lambda _: time.sleep(0.2))
        asked["grammar"] = 'root ::= "a"'
    engine = served.host.model.engine._engine

    def running() -> list[Any]:
        return [task for task in engine._tasks if not task.is_over]

    async def leave() -> None:
        client = Client(served.app, asked)
        while phase != "compiling" and not running():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        client.leaves.set()
        await client.task

    before = counted(served, 'code="499"'), counted(served, "kvcli_cancelled_total")
    served.runner.run(leave())
    assert not running()
    assert counted(served, 'code="499"') == before[0] + 1
    assert counted(served, "kvcli_cancelled_total") == before[1] + (phase != "compiling")
    after = served.post(CHAT, HELLO)
    assert after.json()["choices"][0]["message"] == served.post(CHAT, HELLO).json()["choices"][0]["message"]


def test_a_request_that_waits_for_memory_leaves_the_queue_with_its_client(served):
    """It says how many are before it, and a full queue refuses more."""
    engine, usual = served.host.model.engine, served.host.model.engine.limits
    long = {**HELLO, "max_tokens": 1200, "stop_loops": 0, "stream": True}

    async def three() -> tuple[bytes, int, int]:
        clients = [Client(served.app, long) for _ in range(2)]
        while engine.snapshot().waiting < 1 or b"waiting" not in clients[1].sent + clients[0].sent:
            await asyncio.sleep(0.01)
        refused = Client(served.app, long)
        await refused.task
        waits = engine.snapshot().waiting
        for client in clients:
            client.leaves.set()
            await client.task
        return bytes(refused.sent), waits, engine.snapshot().waiting + engine.snapshot().running

    try:
        need = served.host.model.kv_bytes(1300, 0)
        engine.limits = replace(usual, pool_bytes=int(1.5 * need), queue=1)
        said, waits, after = served.runner.run(three())
    finally:
        engine.limits = usual
    assert json.loads(said)["error"]["code"] == "queue_full"
    assert (waits, after) == (1, 0)


def counted(served: Served, part: str) -> float:
    """The sum of the metrics whose lines contain a text."""
    lines = served.host.metrics.text().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if part in line and line[0] != "#" and "_created" not in line
    )


def test_the_prefix_cache_is_read_before_an_answer_waits_for_memory(served, monkeypatch) -> None:
    threads = list[str]()

    class Prefixes:
        def read_ahead(self, *_: Any) -> None:
            threads.append(threading.current_thread().name)
            assert not served.host.model.engine.snapshot().running

        def load_by_layer(self, *_: Any) -> Iterator[None]:
            threads.append(threading.current_thread().name)
            yield

    monkeypatch.setattr(served.host.model, "prefix_cache", Prefixes())
    assert served.post(CHAT, HELLO).status_code == 200
    assert [name.partition("_")[0] for name in threads] == ["asyncio", "kvcli-engine"]


def test_a_hint_names_fields_of_requests() -> None:
    hints = {
        "-P lean, which stores keys and values in 4 bits": 'profile: "lean", which stores keys and values in 4 bits',
        "--spec ngram": 'set: {"spec.method": "ngram"}',
        "--set sample.seed=4": 'set: {"sample.seed": 4}',
        "--set spec.method=off": 'set: {"spec.method": "off"}',
        "-t 0.8": "temperature: 0.8",
        "a shorter prompt": "a shorter prompt",
        "--set memory.sequences=9": None,
        "/new": None,
    }
    said = error_body(BadInput("no", code="no_room", try_=[*hints]))["error"]["try"]
    assert said == [hint for hint in hints.values() if hint]


def test_a_full_queue_says_when_to_come_back(served, monkeypatch):
    def full(*_: Any, **__: Any) -> Any:
        raise Busy("7 requests wait already", retry_after=2.6)

    monkeypatch.setattr(TextSession, "astream", full)
    found = served.post(CHAT, HELLO, stream=True)
    assert (error_of(found), found.headers["retry-after"]) == ((429, "queue_full"), "3")


@pytest.mark.parametrize("error", [DoesNotFit("out of memory"), RuntimeError("a secret path")])
def test_an_error_in_a_stream_is_its_last_frame(served, monkeypatch, error):
    usual = TextSession.astream

    async def breaks(session: TextSession, *prompt: Any, **options: Any) -> AsyncGenerator[Any]:
        events = usual(session, *prompt, **options)
        async for event in events:
            yield event
            if isinstance(event, Text):
                await events.aclose()
                raise error

    monkeypatch.setattr(TextSession, "astream", breaks)
    lines = served.post(CHAT, HELLO, stream=True).text.strip().split("\n\n")
    assert "delta" in lines[-2]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "secret" not in lines[-1]
    assert served.post(CHAT, HELLO).status_code == (503 if isinstance(error, DoesNotFit) else 500)
    monkeypatch.undo()
    assert served.post(CHAT, HELLO).status_code == 200


def test_a_stream_says_each_second_how_far_it_is(served, monkeypatch):
    monkeypatch.setattr(stream, "EVERY", 0.0)
    said = served.post(CHAT, HELLO, messages=[{"role": "user", "content": "Hello there " * 300}], stream=True).text
    assert ": read " in said
    assert frames(served.post(CHAT, HELLO, stream=True))


# --- models that say what they are told to

HEAD = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
EACH = "{{ m.content }}{% for c in m.tool_calls or [] %}"
TAGGED = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
HERMES = f"{HEAD}{EACH}{TAGGED}{{% endfor %}}<|end|>{{% endfor %}}<|assistant|>"


def parrot_of(folder: Path, says: list[str], **how: Any) -> Served:
    parrot(folder, says, **how)
    return Served(kvcli.load(str(folder), "exact", {"load.device": "cpu"}))


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> Served:
    says = ["So: ", '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>', "<|stop|>"]
    how = {"special": ("<|stop|>", "<|end|>"), "template": HERMES, "eos": [256]}
    return parrot_of(tmp_path_factory.mktemp("caller") / "m", says, **how)


ASKED = {"messages": [{"role": "user", "content": "?"}], "temperature": 0, "tools": TOOLS, "max_tokens": 60}


def test_a_call_is_returned_apart_and_its_result_goes_back(caller):
    said = caller.post(CHAT, ASKED).json()["choices"][0]
    (call,) = said["message"]["tool_calls"]
    assert (said["finish_reason"], said["message"]["content"]) == ("tool_calls", "So: ")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("now", {"a": 1})
    streamed = [part["choices"][0] for part in frames(caller.post(CHAT, ASKED, stream=True))]
    (delta,) = [one["delta"]["tool_calls"] for one in streamed if "tool_calls" in one["delta"]]
    assert (delta[0]["index"], delta[0]["function"]) == (0, call["function"])
    history = [*ASKED["messages"], said["message"], {"role": "tool", "tool_call_id": call["id"], "content": "noon"}]
    assert caller.post(CHAT, ASKED, messages=history).status_code == 200
    assert "tool_calls" not in caller.post(CHAT, ASKED, tool_choice="none").json()["choices"][0]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_forced_call_is_held_to_its_parameters(caller, choice):
    parameters = {**SCHEMA, "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": ["b"]}}}
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    for streams in (False, True):
        found = caller.post(CHAT, ASKED, tools=tools, tool_choice=choice, max_tokens=200, stream=streams)
        if streams:
            deltas = [part["choices"][0] for part in frames(found)]
            message = {k: v for one in deltas for k, v in one["delta"].items()}
            assert deltas[-1]["finish_reason"] == "tool_calls"
        else:
            message = found.json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("now", {"a": "b"})
        assert not message["content"]
    cut = caller.post(CHAT, ASKED, tools=tools, tool_choice=choice, stop="arg").json()["choices"][0]
    assert cut["finish_reason"] == "length"
    assert "tool_calls" not in cut["message"]


def test_a_thought_is_returned_apart(tmp_path):
    template = (Path(__file__).parents[1] / "templates" / "qwen3.jinja").read_text()
    says = ["<think>", "Hm. ", "</think>", "Yes.", "<|im_end|>"]
    served = parrot_of(tmp_path / "m", says, special=("<|im_end|>", "<|im_start|>"), template=template, eos=[256])
    asked = {"messages": [{"role": "user", "content": "?"}], "temperature": 0, "max_tokens": 20}
    message = served.post(CHAT, asked).json()["choices"][0]["message"]
    assert (message["content"].strip(), message["reasoning_content"]) == ("Yes.", "Hm.")
    deltas = [part["choices"][0]["delta"] for part in frames(served.post(CHAT, asked, stream=True))]
    assert "".join(one.get("reasoning_content", "") for one in deltas).strip() == "Hm."
    assert "Hm" not in "".join(one.get("content", "") for one in deltas)
    without = served.post("/tokenize", messages=asked["messages"], chat_template_kwargs={"enable_thinking": False})
    assert without.json()["count"] > served.post("/tokenize", messages=asked["messages"]).json()["count"]
    served.runner.run(served.host.aclose())


def test_host_names_are_parsed_strictly():
    good: Callable[[str], str] = gate.host_of
    assert [good(name) for name in ("LOCALHOST:1", "[::1]", "a.b:99999", "[::1", "a/b", "a b", "a:123456")] == [
        "localhost", "::1", "a.b", "", "", "", ""]  # fmt: skip


def test_a_closed_session_frees_its_kv_without_a_garbage_collection(served):
    """A profile that changes KV keeps no session: what it held must not wait for the collector."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert served.post(CHAT, HELLO, model="demo:snap").status_code == 200
        sessions = [one for one in served.host.model.texts if one.profile.name == "snap"]
        assert len(sessions) <= 1
    finally:
        gc.enable()
