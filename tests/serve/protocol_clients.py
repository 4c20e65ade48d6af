"""The official clients of Responses and of Messages against a running server, on a model that thinks, speaks and calls
`now`: `python protocol_clients.py http://127.0.0.1:8642`.

Prints a line for each check, and exits with the number of failures. It runs in any Python that has the clients.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import anthropic
import openai

BASE = sys.argv[1]
FAILED = []
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
FILE = base64.b64encode(b"The depot holds oil.").decode()


def check(name: str, holds: object, more: object = "") -> None:
    print("pass" if holds else "FAIL", name, str(more)[:200], flush=True)
    FAILED.extend([] if holds else [name])


def of_openai() -> None:
    client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
    name = client.models.list().data[0].id
    tools: Any = [{"type": "function", "name": "now", "parameters": SCHEMA, "strict": False}]
    asked: Any = {"model": name, "tools": tools, "max_output_tokens": 60}
    r = client.responses.create(input="?", **asked)
    types = [item.type for item in r.output]
    check("a response", types == ["reasoning", "message", "function_call"], types)
    check("its text", r.output_text == "So: " and r.status == "completed", r.output_text)
    check("its call", json.loads(r.output[2].arguments) == {"a": 1} and r.usage.input_tokens > 0)
    with client.responses.stream(input="?", **asked) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_response()
    check("the stream helper", final.output_text == r.output_text and events[-1] == "response.completed", events[-1])
    check("its items", [item.type for item in final.output] == types)
    raw = list(client.responses.create(input="?", stream=True, **asked))
    check("raw events", [type(one).__name__ for one in raw if type(one).__name__ == "BaseModel"] == [], len(raw))
    result = {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "noon"}
    more: Any = [{"role": "user", "content": "?"}, *final.output, result]
    second = client.responses.create(input=more, **asked)
    check("its output and a result go back", second.usage.input_tokens > r.usage.input_tokens)
    parts: Any = [{"type": "input_file", "filename": "a.txt", "file_data": FILE}, {"type": "input_text", "text": "?"}]
    third = client.responses.create(input=[{"role": "user", "content": parts}], **asked)
    check("a file", third.usage.input_tokens > r.usage.input_tokens, third.usage.input_tokens)
    chat = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": [{"type": "file", "file": {"file_data": FILE}}]}],
        max_tokens=4,
    )
    check("a file in a chat", chat.usage and chat.usage.prompt_tokens > 20)
    for field, value in {"previous_response_id": "resp_1", "store": True, "conversation": "c"}.items():
        try:
            client.responses.create(input="?", **asked, **{field: value})
            check(f"{field} is refused", False)
        except openai.BadRequestError as error:
            check(f"{field} is refused", error.param == field, error)


def of_anthropic() -> None:
    client = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0)
    name = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none").models.list().data[0].id
    asks: Any = [{"role": "user", "content": "?"}]
    asked: Any = {"model": name, "max_tokens": 60, "tools": [{"name": "now", "input_schema": SCHEMA}], "system": "S"}
    m = client.messages.create(messages=asks, **asked)
    types = [block.type for block in m.content]
    check("a message", types == ["thinking", "text", "tool_use"] and m.stop_reason == "tool_use", types)
    with client.messages.stream(messages=asks, **asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    check("the stream helper", text == "So: " and final.stop_reason == "tool_use", text)
    check("its blocks", [block.type for block in final.content] == types and final.content[2].input == {"a": 1})
    check("its usage", final.usage.output_tokens == m.usage.output_tokens > 0)
    result: Any = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "noon"}
    more: Any = [*asks, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    count = client.messages.count_tokens(messages=more, **{k: v for k, v in asked.items() if k != "max_tokens"})
    second = client.messages.create(messages=more, **asked)
    used = second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)
    check("its blocks and a result go back", count.input_tokens == used, count.input_tokens)
    source: Any = {"type": "base64", "media_type": "text/plain", "data": FILE}
    blocks: Any = [{"type": "document", "source": source}, {"type": "text", "text": "?"}]
    check("a document", client.messages.create(messages=[{"role": "user", "content": blocks}], **asked).content)
    stopped = client.messages.create(messages=asks, **{**asked, "tools": [], "stop_sequences": ["o:"]})
    check(
        "a stop sequence", (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "o:"), stopped.stop_reason
    )
    wrong: Any = {
        "a picture": ({"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}, 400),
        "another model": ({"messages": asks, "model": "other"}, 404),
        "a server's tool": ({"messages": asks, "tools": [{"type": "bash_20250124", "name": "bash"}]}, 400),
    }
    for what, (how, status) in wrong.items():
        try:
            client.messages.create(**{**asked, **how})
            check(f"{what} is refused", False)
        except anthropic.APIStatusError as error:
            check(f"{what} is refused", error.status_code == status, error)


if __name__ == "__main__":
    of_openai()
    of_anthropic()
    print(len(FAILED), "failed", FAILED)
    sys.exit(len(FAILED))
