"""OpenAI's responses and Anthropic's messages: the same answers as chat completions, in other words; and documents."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvcli.demo import sample_path
from kvcli.serve import messages, responses
from kvcli.serve.app import server_app
from kvcli.serve.documents import Documents
from kvcli.serve.errors import Refused
from kvcli.serve.schemas import FileData
from tests.documents.made import Sheet, picture
from tests.serve.test_server import CHAT, HERMES, KEY, Served, error_of, frames, parrot_of

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
SAYS = ["<think>", "Hm. ", "</think>", "So: ", CALL, "<|stop|>"]
HOW: dict[str, Any] = {"special": ("<|stop|>", "<|end|>"), "template": HERMES, "eos": [256]}
UNLED = "{% for m in messages if m.role != 'system' %}<|end|>{{ m.content }}{% endfor %}<|end|>"  # no system role
FUNCTION = {"name": "now", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    """It thinks, speaks and calls a tool."""
    made = parrot_of(tmp_path_factory.mktemp("protocols") / "m", SAYS, **HOW)
    yield made
    made.runner.run(made.host.aclose())
    made.runner.close()


def events_of(served: Served, path: str, asked: Any) -> list[Any]:
    """The events of a stream, whose names are checked."""
    text = served.post(path, asked, stream=True).text
    found = [part.split("\n") for part in text.split("\n\n") if part.startswith("event: ")]
    named = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]
    assert all(data["type"] == name for name, data in named)
    return [data for _, data in named]


def runs(types: list[str]) -> list[str]:
    return [one for i, one in enumerate(types) if not i or one != types[i - 1]]


# --- answers


ITEMS = {"input": "?", "tools": [{"type": "function", **FUNCTION, "strict": False}], "max_output_tokens": 60}
BLOCKS = {"model": "demo", "messages": [{"role": "user", "content": "?"}], "max_tokens": 60}
BLOCKS |= {"tools": [{"name": "now", "input_schema": {"type": "object"}}], "thinking": {"type": "adaptive"}}


def test_a_response_has_thought_text_and_call_and_its_stream_the_same(served):
    whole = served.post(RESPONSES, ITEMS).json()
    thought, text, call = whole["output"]
    assert (whole["status"], [one["type"] for one in whole["output"]]) == ("completed", [*SHAPES])
    assert thought["content"][0] == {"type": "reasoning_text", "text": thought["content"][0]["text"]}
    assert (thought["content"][0]["text"].strip(), text["content"][0]["text"]) == ("Hm.", "So: ")
    assert (call["name"], json.loads(call["arguments"])) == ("now", {"a": 1})
    events = events_of(served, RESPONSES, ITEMS)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    expected = ["created", "in_progress"]
    for shape in SHAPES.values():
        expected += ["output_item.added", *shape, "output_item.done"]
    assert runs([event["type"].removeprefix("response.") for event in events]) == [*expected, "completed"]
    last = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert last["output"] == done
    for one, other in zip(done, whole["output"], strict=True):
        texts = [[part["text"].strip() for part in item.get("content", ())] for item in (one, other)]
        assert texts[0] == texts[1]
        assert {k: v for k, v in one.items() if k not in OWN} == {k: v for k, v in other.items() if k not in OWN}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0


OWN = ("id", "call_id", "content")
PART = ("content_part.added", "{}.delta", "{}.done", "content_part.done")
SHAPES = {
    "reasoning": [one.format("reasoning_text") for one in PART],
    "message": [one.format("output_text") for one in PART],
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
}


def test_a_message_has_thought_text_and_call_and_its_stream_the_same(served):
    whole = served.post(MESSAGES, BLOCKS).json()
    thought, text, call = whole["content"]
    assert (thought["type"], thought["thinking"].strip(), thought["signature"]) == ("thinking", "Hm.", "")
    assert (text, call["type"], call["input"]) == ({"type": "text", "text": "So: "}, "tool_use", {"a": 1})
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    events = events_of(served, MESSAGES, BLOCKS)
    each = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs([event["type"] for event in events]) == ["message_start", *each * 3, "message_delta", "message_stop"]
    said = ["", "", ""]
    for event in events:
        if event["type"] == "content_block_delta":
            said[event["index"]] += next(v for k, v in event["delta"].items() if k != "type")
    assert (said[0].strip(), said[1], json.loads(said[2])) == (thought["thinking"], text["text"], call["input"])
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": whole["usage"],
        "notes": whole["notes"],
    }
    begun = events[0]["message"]
    assert (begun["content"], begun["usage"]["input_tokens"]) == ([], whole["usage"]["input_tokens"])
    counted = served.post(f"{MESSAGES}/count_tokens", {k: v for k, v in BLOCKS.items() if k != "max_tokens"}).json()
    assert counted["input_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]


def test_an_answer_that_is_cut_says_by_what(served):
    cut = served.post(RESPONSES, ITEMS, max_output_tokens=1, thinking_tokens=1).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    ends = {"max_tokens": ({"max_tokens": 1, "thinking_tokens": 1}), "stop_sequence": {"stop_sequences": ["x", "o:"]}}
    for reason, how in ends.items():
        message = served.post(MESSAGES, BLOCKS, **how).json()
        assert message["stop_reason"] == reason
        assert message["stop_sequence"] == ("o:" if reason == "stop_sequence" else None)


def test_timings_come_with_each_piece_if_asked(served):
    asked = {"messages": [{"role": "user", "content": "?"}], "stream": True}
    lines = served.post(CHAT, asked, timings_per_token=True).text.split("\n\n")[:-2]
    assert all("timings" in json.loads(line.removeprefix("data: ")) for line in lines)
    assert served.post(CHAT, asked).text.count('"timings"') == 1


# --- requests

TEXT = [{"type": "text", "text": "?"}]
CALLED = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]}
FILE = {"type": "file", "file": {"filename": "a.txt", "file_data": "b2ls"}}
TRANSLATED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "text, instructions and limits": (
        responses,
        {"input": "?", "instructions": "Be brief.", "max_output_tokens": 5, "truncation": "disabled"},
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}],
            "max_completion_tokens": 5,
        },
    ),
    "a history with a thought, a call and its result": (
        responses,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "now", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c1", "output": "noon"},
            ],
            "reasoning": {"effort": "low", "summary": "auto"},
            "tool_choice": {"type": "function", "name": "now"},
            "tools": ITEMS["tools"],
        },
        {
            "messages": [{"role": "user", "content": TEXT}, {"role": "assistant", "tool_calls": [CALLED]}, RESULT],
            "reasoning_effort": "low",
            "tool_choice": {"type": "function", "function": {"name": "now"}},
            "tools": [TOOL],
        },
    ),
    "a file and a schema": (
        responses,
        {
            "input": [{"role": "user", "content": [{"type": "input_file", **FILE["file"]}, *TEXT]}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        },
        {
            "messages": [{"role": "user", "content": [FILE, *TEXT]}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        },
    ),
    "blocks of a history": (
        messages,
        {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "tool_use", "id": "c1", "name": "now", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "noon", "is_error": False}],
                },
            ],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
        },
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": TEXT, "tool_calls": []},
                {"role": "assistant", "content": [], "tool_calls": [{k: CALLED[k] for k in ("id", "function")}]},
                RESULT,
            ],
            "reasoning_effort": "on",
            "thinking_tokens": 1024,
            "stop": ["x"],
        },
    ),
    "a document, a failed tool and a choice": (
        messages,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "noon", "is_error": True},
                        {"type": "document", "title": "a.txt", "source": {"type": "text", "data": "oil"}},
                        *TEXT,
                    ],
                }
            ],
            "tools": BLOCKS["tools"],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "metadata": {"user_id": "u"},
        },
        {
            "messages": [
                {**RESULT, "content": [{"type": "text", "text": "error:"}, *RESULT["content"]]},
                {"role": "user", "content": [FILE, *TEXT], "tool_calls": []},
            ],
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "user": "u",
        },
    ),
}


@pytest.mark.parametrize("case", TRANSLATED)
def test_a_request_is_translated_to_chat_completions(case):
    protocol, given, expected = TRANSLATED[case]
    assert protocol.as_chat(given) == expected


def asks(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*parts]}]}


MORE, WHERE, UNKNOWN = "previous_response_id", "messages.0.content.0", "unsupported_field"
PART_TYPE, EFFORT = "input.0.content.0.type", ("bad_field", "reasoning.effort")
THINKS = {"type": "adaptive"}
ASKED = [{"role": "user", "content": "?"}]
CONTENT_OF = [("bad_field", f"messages.{i}.content") for i in range(2)]
REFUSED: dict[str, tuple[str, Any, str, str | None]] = {
    "a conversation that is stored": (RESPONSES, {MORE: "r"}, "unsupported_field", MORE),
    "storing": (RESPONSES, {"store": True}, "bad_field", "store"),
    "an item": (RESPONSES, {"input": [{"type": "web_search_call"}]}, "unsupported_field", "input.0.type"),
    "a picture": (RESPONSES, {"input": [{"content": [{"type": "input_image"}]}]}, "bad_field", PART_TYPE),
    "a tool of others": (RESPONSES, {"tools": [{"type": "web_search"}]}, "bad_tools", None),
    "no list": (RESPONSES, {"input": 3}, "bad_field", "input"),
    "items that are none": (RESPONSES, {"input": [3]}, "bad_field", "input.0"),
    "no limit": (MESSAGES, {"max_tokens": None}, "bad_field", "max_tokens"),
    "a role": (MESSAGES, asks(*TEXT, role="boss"), "bad_field", "messages.0.role"),
    "no content": (MESSAGES, {"messages": [{"role": "user"}]}, "bad_field", "messages.0.content"),
    "no content of the second": (MESSAGES, {"system": "a", "messages": [*ASKED, {"role": "user"}]}, *CONTENT_OF[1]),
    "null content": (MESSAGES, {"messages": [*ASKED, {"role": "user", "content": None}]}, *CONTENT_OF[1]),
    "an empty list of content": (MESSAGES, {"messages": [*ASKED, {"role": "user", "content": []}]}, *CONTENT_OF[1]),
    "no messages": (MESSAGES, {"system": "a", "messages": []}, "bad_field", "messages"),
    "no content of an item": (RESPONSES, {"input": [*ASKED, {"role": "user"}]}, "bad_field", "input.1.content"),
    "no item": (RESPONSES, {"instructions": "a", "input": []}, "bad_field", "input"),
    "a part of an item": (RESPONSES, {"input": [asks({"text": "a"})["messages"][0]]}, "bad_field", PART_TYPE),
    "a result without its call": (
        RESPONSES,
        {"input": [*ASKED, {"type": "function_call_output", "output": "a"}]},
        "bad_field",
        "input.1.call_id",
    ),
    "a form without a type": (RESPONSES, {"text": {"format": {}}}, "bad_field", "text.format.type"),
    "thinking without a type": (MESSAGES, {"thinking": {}}, "bad_field", "thinking.type"),
    "two inputs": (RESPONSES, {"messages": ASKED}, "bad_field", "input"),
    "two limits": (RESPONSES, {"max_output_tokens": 2, "max_tokens": 3}, "bad_field", "max_output_tokens"),
    "two limits of a message": (MESSAGES, {"max_completion_tokens": 3}, "bad_field", "max_completion_tokens"),
    "two efforts": (RESPONSES, {"reasoning": {"effort": "low"}, "reasoning_effort": "on"}, *EFFORT),
    "effort without thinking": (
        MESSAGES,
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        "bad_field",
        "output_config.effort",
    ),
    "two forms": (
        RESPONSES,
        {"text": {"format": {"type": "text"}}, "response_format": {"type": "json_object"}},
        "bad_field",
        "text.format",
    ),
    "two lists of stops": (MESSAGES, {"stop": ["a"], "stop_sequences": ["b"]}, "bad_field", "stop_sequences"),
    "two users": (MESSAGES, {"user": "a", "metadata": {"user_id": "b"}}, "bad_field", "metadata.user_id"),
    "two documents": (CHAT, asks({**FILE, "file": {**FILE["file"], "file_id": "0"}}), "bad_field", f"{WHERE}.file"),
    "an answer to go on with": (MESSAGES, asks(*TEXT, role="assistant"), "not_supported", None),
    "an unknown field": (MESSAGES, {"container": "c"}, "unsupported_field", "container"),
    "a tool of Anthropic's": (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bad_tools", None),
    "a way of thinking": (MESSAGES, {"thinking": {"type": "hard"}}, "bad_field", "thinking.type"),
    "a way to show thoughts": (MESSAGES, {"thinking": {**THINKS, "display": "omitted"}}, UNKNOWN, "display"),
    "a file elsewhere": (MESSAGES, asks({"type": "document", "source": {"type": "url"}}), "not_supported", None),
    "a field of a block": (MESSAGES, asks({**TEXT[0], "citations": [1]}), UNKNOWN, f"{WHERE}.citations"),
    "several answers": (RESPONSES, {"n": 2}, "unsupported_field", "n"),
    "scores": (RESPONSES, {"logprobs": True}, "unsupported_field", "logprobs"),
    "scores of likely tokens": (RESPONSES, {"top_logprobs": 2}, "unsupported_field", "top_logprobs"),
    "timings": (MESSAGES, {"timings_per_token": True}, "unsupported_field", "timings_per_token"),
    "another name of a user": (MESSAGES, {"metadata": {"user": "a"}}, "unsupported_field", "metadata.user"),
    "no base64": (CHAT, asks({"type": "file", "file": {"file_data": "?"}}), "bad_file", "file_data"),
    "a document that is gone": (CHAT, asks({"type": "file", "file": {"file_id": "0"}}), "no_such_document", None),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_is_refused_by_name(served, case):
    path, changes, code, param = REFUSED[case]
    usual: dict[str, Any] = {RESPONSES: {"input": "?"}, MESSAGES: BLOCKS, CHAT: {}}[path]
    found = served.post(path, usual | changes)
    assert error_of(found) == (404 if code == "no_such_document" else 400, code)
    assert found.json()["error"]["param"] == param
    assert found.json()["type"] == "error"


def test_an_error_in_a_stream_ends_it(served, monkeypatch):
    from kvcli.api import Text
    from kvcli.errors import BadModel

    async def fails(_: Any) -> Any:
        yield Text("a", ())
        raise BadModel("it broke", code="broken")

    monkeypatch.setattr(served.host, "events", fails)
    for path, asked in ((RESPONSES, ITEMS), (MESSAGES, BLOCKS)):
        last = events_of(served, path, asked)[-1]
        assert (last["type"], last["error"]["message"], last["error"]["code"]) == ("error", "it broke", "broken")


# --- documents


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_document_stands_before_the_question_in_every_protocol(served):
    text, path = "The depot holds oil.", "/tokenize"
    data = base64.encodebytes(text.encode() * 9).decode()  # in lines, as the command `base64` writes it
    text *= 9
    file = {"type": "file", "file": {"filename": "a.txt", "file_data": data}}
    question = {"type": "text", "text": "What?"}
    plain, read = asks({"type": "text", "text": f"{text}\n\nWhat?"}), asks(file, question)
    counts = [served.post(path, one).json()["count"] for one in (plain, read)]
    source = {"type": "text", "media_type": "text/plain", "data": text}
    asked = {"model": "demo", **asks({"type": "document", "source": source}, question)}
    counts.append(served.post(f"{MESSAGES}/count_tokens", asked).json()["input_tokens"])
    assert len({*counts}) == 1


def test_a_pdf_is_read_once_and_found_again_by_its_id(served):
    data = f"data:application/pdf;base64,{b64(sample_path().read_bytes())}"
    found = served.post("/kvcli/pages", {"type": "input_file", "filename": "a.pdf", "file_data": data}).json()
    assert (found["name"], found["unit"]) == ("a.pdf", "page")
    pages = served.send("GET", f"/kvcli/pages/{found['id']}").json()
    assert pages["sections"][2]["label"] == "3"
    asked = served.post("/tokenize", asks({"type": "file", "file": {"file_id": found["id"]}}, *TEXT)).json()
    assert asked["count"] > found["tokens"]
    with pytest.MonkeyPatch.context() as patch:  # sent again, it is not read again
        patch.setattr("kvcli.serve.documents.document_of", lambda *_: 1 / 0)
        assert served.post("/kvcli/pages", {"filename": "a.pdf", "file_data": data}).json() == found
    for wrong, code in ((b"%PDF-1.4 nothing", "damaged_file"), (b"a " * 2_000_000, "context_length_exceeded")):
        said = served.post("/kvcli/pages", {"filename": "b.pdf", "file_data": b64(wrong)})
        assert error_of(said) == (400, code)


def test_what_the_model_was_not_given_is_said_in_every_protocol(tmp_path):
    """Scanned pages, and a system text that the template puts elsewhere: once each, however many answers."""
    served = parrot_of(tmp_path / "m", ["So.", "<|stop|>"], special=("<|stop|>",), template=UNLED, eos=[256])
    sheet = Sheet()
    sheet.lines(["The depot holds oil."])
    sheet.page()
    sheet.canvas.drawInlineImage(picture(), 60, 400, 400, 300)
    sheet.page()
    file = {"filename": "a.pdf", "file_data": b64(sheet.save())}
    part, source = {"type": "file", "file": file}, {"type": "base64", "data": file["file_data"]}
    block = {"type": "document", "title": "a.pdf", "source": source}
    items = [{"role": "user", "content": [{"type": "input_file", **file}]}]
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "system", "content": "Be kind."}, *asks(part, *TEXT)["messages"]], "n": 2},
        RESPONSES: {"instructions": "Be kind.", "input": items},
        MESSAGES: {"model": "demo", "max_tokens": 9, "system": "Be kind.", **asks(block)},
    }
    for path, one in asked.items():
        whole = served.post(path, one, temperature=0).json()["notes"]
        assert ["page" in note for note in whole] == [True, False], path
        assert "text on page 2" in whole[0]  # with or without OCR
        assert "system" in whole[1]
        if path == CHAT:
            said = [part for part in frames(served.post(path, one, stream=True)) if "notes" in part]
            assert [part["choices"][0]["finish_reason"] for part in said] == ["stop", "stop"]
            assert [part["notes"] for part in said] == [whole, whole]
        else:
            said = events_of(served, path, one)
            assert [part for part in said if whole in (part.get("notes"), part.get("response", {}).get("notes"))]
    found = served.post("/kvcli/pages", file).json()
    assert "text on page 2" in found["notes"][0]
    served.runner.run(served.host.aclose())
    served.runner.close()


def test_documents_that_no_request_names_are_forgotten(served):
    async def run() -> list[str]:
        kept = Documents(max_characters=25)
        one, two = [await kept.read(FileData(file_data=b64(b"%d" % i * 10))) for i in (1, 2)]
        kept.get(one.sha256)
        three = await kept.read(FileData(file_data=b64(b"3" * 10)))
        found = []
        for document in (one, two, three):
            with suppress(Refused):
                found.append(kept.get(document.sha256).text[0])
        kept.close()
        return found

    assert served.runner.run(run()) == ["1", "3"]


# --- the page


def test_the_page_runs_no_code_but_its_own(served):
    app = server_app(served.host, key=KEY.encode())
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        found = served.send("GET", path, app)
        assert (found.status_code, found.headers["content-type"].partition(";")[0]) == (200, kind)
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    page, script = (served.send("GET", path, app).text for path in ("/", "/page.js"))
    assert " on" not in page.replace(" on a", "").partition("<body>")[0]
    assert not [
        word for word in ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "document.write") if word in script
    ]
    assert served.send("GET", "/kvcli/pages/0", app).status_code == 401
