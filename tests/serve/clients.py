"""The official clients against a running server on the demo model: `python clients.py http://127.0.0.1:8642/v1`.

Prints a line for each check, and exits with the number of failures. It runs in any Python that has the clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Literal

import openai

BASE = sys.argv[1]
HELLO: Any = [{"role": "user", "content": "Hello"}]
FAILED = []


def check(name: str, holds: object, more: object = "") -> None:
    print("pass" if holds else "FAIL", name, str(more)[:120], flush=True)
    FAILED.extend([] if holds else [name])


def metrics() -> dict[str, float]:
    text = urllib.request.urlopen(BASE.replace("/v1", "/metrics")).read().decode()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def of_openai() -> None:
    c = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
    create: Any = c.chat.completions.create
    r = create(model="demo", messages=HELLO, temperature=0, logprobs=True, top_logprobs=3)
    check("chat", r.choices[0].message.content.startswith("Hello!"), r.usage.total_tokens)
    scores = r.choices[0].logprobs.content
    check("logprobs", len(scores) == r.usage.completion_tokens and len(scores[0].top_logprobs) == 3)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(create(model="demo:exact", messages=HELLO, temperature=0, **usage))
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    check("a stream is the whole", text == r.choices[0].message.content)
    check("usage at the end", parts[-1].usage.completion_tokens == r.usage.completion_tokens)
    with c.chat.completions.stream(model="demo", messages=HELLO, temperature=0) as stream:
        final = stream.get_final_completion()
    check("the stream helper", final.choices[0].message.content == text)
    fields = {"name": {"enum": ["oil", "salt"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}}
    schema = {"type": "object", "properties": fields, "required": ["name", "n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    s = create(model="demo", messages=HELLO, temperature=1, seed=3, max_tokens=64, response_format=form)
    check("schema", {*json.loads(s.choices[0].message.content)} == {"name", "n"}, s.choices[0].message.content)
    wrong: dict[str, Any] = {
        "bad schema": {"response_format": {**form, "json_schema": {"name": "x", "schema": {"type": "strange"}}}},
        "temperature": {"temperature": -1},
        "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        "model": {"model": "other"},
        "field": {"extra_body": {"frobnicate": 1}},
    }
    for name, how in wrong.items():
        try:
            create(**{"model": "demo", "messages": HELLO, **how})
            check(f"{name} refused", False)
        except (openai.BadRequestError, openai.NotFoundError) as error:
            check(f"{name} refused", error.code and error.body["try"] is not None, error.message)  # type: ignore[index,call-overload]
    try:
        c.completions.create(model="demo", prompt=[5] * 9000, max_tokens=4)
        check("overflow", False)
    except openai.BadRequestError as error:
        check("overflow", error.code == "context_length_exceeded")
    more = {"model": "demo", "temperature": 1, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    a = [create(messages=HELLO, seed=7, **more).choices[0].message.content for _ in range(2)]
    check("seed", a[0] == a[1])
    three = create(messages=HELLO, seed=7, n=3, **more)
    check("n", three.choices[0].message.content == a[0] and len({ch.message.content for ch in three.choices}) == 3)
    check("models", {"demo", "demo:exact"} <= {m.id for m in c.models.list()})
    long = "The depot Gimness holds oil. " * 60
    first = create(model="demo", messages=[{"role": "user", "content": long}], max_tokens=4, temperature=0)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    history = [{"role": "user", "content": long}, said, {"role": "user", "content": "And?"}]
    again = create(model="demo", messages=history, max_tokens=4, temperature=0)
    cached = again.usage.prompt_tokens_details.cached_tokens
    check(
        "the beginning is reused", cached > 0.9 * first.usage.prompt_tokens, f"{cached} of {again.usage.prompt_tokens}"
    )


async def cancels() -> None:
    for stream in (True, False):
        client = openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)

        async def ask(client: Any = client, stream: bool = stream) -> None:
            long: Any = {"max_tokens": 4000, "temperature": 1, "extra_body": {"ignore_eos": True, "stop_loops": 0}}
            got = await client.chat.completions.create(model="demo", messages=HELLO, stream=stream, **long)
            if stream:
                async for _ in got:
                    pass

        task = asyncio.create_task(ask())
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        began = time.monotonic()
        while (running := metrics()["vllm:num_requests_running"]) and time.monotonic() - began < 10:
            await asyncio.sleep(0.02)
        check(f"cancelled, stream={stream}", not running, f"gone after {time.monotonic() - began:.2f} s")


async def many(n: int) -> None:
    client = openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)

    async def ask(k: int) -> tuple[int, Any]:
        try:
            how: Any = {"max_tokens": 12, "temperature": 1, "extra_body": {"ignore_eos": True}}
            name = ("demo:exact", "demo:ngram")[k % 2]
            r = await client.chat.completions.create(model=name, messages=HELLO, seed=k % 5, **how)
            return k % 5, r.choices[0].message.content
        except openai.RateLimitError as error:
            return -1, error.response.headers["retry-after"]

    found = await asyncio.gather(*(ask(k) for k in range(n)))
    by = {seed: {text for k, text in found if k == seed} for seed in range(5)}
    busy = sum(k == -1 for k, _ in found)
    check(f"{n} at once: one text a seed", all(len(texts) == 1 for texts in by.values()), f"{busy} were told to retry")


def of_llm() -> None:
    with tempfile.TemporaryDirectory() as home:
        lines = f"- model_id: kvcli\n  model_name: demo:ngram\n  api_base: {BASE}\n"
        Path(home, "extra-openai-models.yaml").write_text(lines)
        run = [sys.executable, "-m", "llm", "-m", "kvcli", "Hello"]
        environ = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}
        p = subprocess.run(run, capture_output=True, text=True, env=environ, timeout=120, check=False)
        check("llm", p.stdout.startswith("Hello!"), (p.stdout + p.stderr).strip()[-200:])


def of_langchain() -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Depot(BaseModel):
        name: Literal["Gimness", "Bethden"]
        holds: int = Field(ge=0, le=9)

    class Endless(BaseModel):
        name: str

    model: Any = ChatOpenAI(base_url=BASE, api_key="none", model="demo", temperature=0, max_retries=0)
    said = model.invoke("Hello").content
    check("LangChain invoke", said.startswith("Hello!"))
    check("LangChain stream", "".join(part.content for part in model.stream("Hello")) == said)
    check("LangChain batch", [one.content for one in model.batch(["Hello", "Hello"])] == [said, said])
    asked: Any = model.with_structured_output(Depot, method="json_schema").invoke("Hello")
    check("LangChain structured output", asked.name in ("Gimness", "Bethden"), asked)
    try:  # a small model fills a text without an end, which is told apart from a whole answer
        model.with_structured_output(Endless, method="json_schema").invoke("Hello")
    except openai.LengthFinishReasonError as error:
        check("LangChain is told that JSON is cut", True, error)


if __name__ == "__main__":
    of_openai()
    asyncio.run(cancels())
    asyncio.run(many(60))
    of_llm()
    of_langchain()
    print(len(FAILED), "failed", FAILED)
    sys.exit(len(FAILED))
