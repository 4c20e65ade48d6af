"""Tool calls: their syntax by the chat template, the text they are split from, their results, and what runs them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcli.api import ToolCall, Turn
from kvcli.chat.conversation import Chat
from kvcli.chat.saved_chats import SavedChats
from kvcli.chat.transcript import Message, json_lines, markdown
from kvcli.commands.chat.mcp_server import mcp_server
from kvcli.commands.chat.tools import MOST_ROUNDS, REFUSED, ChatTools, open_tools, read_results
from kvcli.engine.stats import Stats
from kvcli.errors import BadInput, BadModel, KvcliError
from kvcli.models.template_worker import rendered
from kvcli.models.tool_calls import CallReader, call_syntax, check_tools
from tests.chat_templates import WELL_KNOWN
from tests.fakes import Machine
from tests.parrot import parrot
from tests.small_tokenizers import marked

STORED = {file.stem: file.read_text() for file in (Path(__file__).parent / "templates").glob("*.jinja")}
WITH_CALLS = {name: STORED[name] for name in ("gemma-4", "glm-4.7", "gpt-oss", "ministral-3", "qwen3")}
HEAD = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
TAIL = "<|end|>{% endfor %}<|assistant|>"
EACH = "{{ m.content }}{% for c in m.tool_calls or [] %}"
TAGGED = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
HERMES = f"{HEAD}{EACH}{TAGGED}{{% endfor %}}{TAIL}"
WRITTEN = WITH_CALLS | {
    "one object": HEAD
    + "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}" + TAIL,
    "a list": f"{HEAD}{{% if m.tool_calls %}}[TOOL_CALLS] ["
    '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    f'{{{{ "" if loop.last else ", " }}}}{{% endfor %}}]{{% else %}}{{{{ m.content }}}}{{% endif %}}{TAIL}',
    "Python": f"{HEAD}{{% if m.tool_calls %}}[{{% for c in m.tool_calls %}}{{{{ c.function.name }}}}("
    "{% for key, value in c.function.arguments | items %}{{ key }}={{ value | tojson }}"
    '{{ "" if loop.last else ", " }}{% endfor %}){{ "" if loop.last else ", " }}{% endfor %}]'
    f"{{% else %}}{{{{ m.content }}}}{{% endif %}}{TAIL}",
    "tags": f"{HEAD}{EACH}\n<tool_call>\n<function={{{{ c.function.name }}}}>\n"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    f"{{% endfor %}}{TAIL}",
    "arguments as text": f"{HEAD}{EACH}<calls>function<sep>{{{{ c.function.name }}}}\n```json\n"
    f"{{{{ c.function.arguments + '' }}}}\n```<end>{{% endfor %}}{TAIL}",
}
SINGLE = {"one object", "gpt-oss"}  # templates that show one call of an answer
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "a city"},
                    "days": {"type": "integer", "description": "days"},
                    "how": {"type": "object", "description": "more"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
ARGUMENTS: list[dict[str, Any]] = [{"city": 'Zürich "old", 7', "days": 3, "how": {"a": [1, 2], "b": "c d"}}, {}]


class Rendering:
    """A tokenizer that only renders, with jinja2 as in the process of untrusted templates."""

    def __init__(self, template: str) -> None:
        self.template = template

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **variables: Any) -> str:
        given = {"messages": messages, "documents": None, "bos_token": "<s>", "eos_token": "</s>", **variables}
        return rendered({"template": self.template, "variables": given, "now": "2026-11-29T00:00:00"})["text"]


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "granite-3.3"])
def test_the_calls_that_a_template_writes_are_read(name: str):
    tokenizer: Any = Rendering(WRITTEN[name])
    syntax = call_syntax(tokenizer, name)
    for which in ([0], [1]) if name in SINGLE else ([0], [1], [0, 1]):
        wanted = [(TOOLS[i]["function"]["name"], ARGUMENTS[i]) for i in which]
        each = [
            {"name": called, "arguments": json.dumps(given) if syntax.as_text else given} for called, given in wanted
        ]
        calls = [{"id": f"call{i:05d}", "type": "function", "function": one} for i, one in enumerate(each)]
        messages = [{"role": "user", "content": "?!"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, tools=TOOLS, add_generation_prompt=False)
        answer = text.rpartition("?!")[2]
        answer = answer if name in STORED else answer.partition("<|assistant|>")[2]
        assert [call[1:] for call in syntax.calls(answer, TOOLS)] == wanted
        cut = answer[: answer.rindex(wanted[-1][0]) + len(wanted[-1][0])]  # before the arguments
        assert len(syntax.calls(cut, TOOLS)) < len(wanted)
        assert syntax.opener in answer


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"', "{1, 2}"])
def test_a_call_whose_arguments_json_cannot_hold_is_none(value: str):
    tokenizer: Any = Rendering(WRITTEN["Python"])
    text = f"[get_weather(how={value})]"
    assert call_syntax(tokenizer, "it").calls(text, TOOLS) == []


def test_a_header_that_differs_from_the_template_is_read():
    """gpt-oss writes its header in another order than its template."""
    text = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
    tokenizer: Any = Rendering(STORED["gpt-oss"])
    (call,) = call_syntax(tokenizer, "gpt-oss").calls(text, TOOLS)
    assert call[1:] == ("get_weather", {"city": "Oslo"})


@pytest.mark.parametrize("template", [*WELL_KNOWN.values(), STORED["granite-3.3"]], ids=[*WELL_KNOWN, "granite"])
def test_a_template_without_tool_calls_is_refused(template: str):
    tokenizer: Any = Rendering(template)
    with pytest.raises(BadModel) as caught:
        call_syntax(tokenizer, "it")
    assert caught.value.code == "no_tool_calls"


WRONG = {
    "no list": {"type": "function"},
    "empty": [],
    "bare": [{"name": "f"}],
    "unnamed": [{"type": "function", "function": {"description": "d"}}],
    "a name with spaces": [{"type": "function", "function": {"name": "a b"}}],
    "twice": [TOOLS[1], TOOLS[1]],
    "description": [{"type": "function", "function": {"name": "f", "description": 5}}],
    "schema": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
    "fields": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": ["a"]}}}],
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_definitions_are_refused(case: str):
    with pytest.raises(BadInput) as caught:
        check_tools(WRONG[case], "tools.json")
    assert "tools.json" in caught.value.message
    assert (caught.value.code, len(caught.value.try_)) == ("bad_tools", 1)


# --- the text of an answer


def pieces(*tokens: str) -> tuple[str, list[str]]:
    """Text, and names of the calls, of an answer with these tokens."""
    tokenizer = marked(added=tuple({token for token in tokens if len(token) > 1}))
    hermes: Any = Rendering(HERMES)
    reader = CallReader(tokenizer, call_syntax(hermes, "it"), TOOLS)
    shown = [i for token in tokens for i in reader.push(tokenizer.convert_tokens_to_ids(token))]
    calls, rest = reader.finish()
    return tokenizer.decode([*shown, *rest]), [name for _, name, _ in calls]


def test_calls_are_no_text_and_all_else_is():
    call = ("<tool_call>", '{"name": "now", "arguments": {}}', "</tool_call>")
    assert pieces("Let me see.", *call)[0] == "Let me see."
    assert pieces("Let me see.", *call)[1] == ["now"]
    assert pieces(*call, *call)[1] == ["now", "now"]
    others = (("a", "<tool", "s>"), ("<tool_call>", "is a tag"), call[:1])
    for other in (*others, *(("<tool_call>", f'{{"name": {name}}}') for name in ('"other"', "{}", "[1]", "null"))):
        assert pieces(*other) == ("".join(other), [])


# --- a chat


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    says = ["I look.", "<tool_call>", '{"name": "get_weather", "arguments": {"city": "<|en', 'd|>"}}', "</tool_call>"]
    parrot(tmp_path / "m", [*says, "<|stop|>"], special=("<|stop|>", "<|end|>"), template=HERMES, eos=[256])
    return tmp_path


def test_calls_and_results_of_a_chat_are_kept_and_no_control_token_of_them_acts(folder: Path):
    import kvcli

    told = json.loads(json.dumps(TOOLS).replace("of a place", "of a place<|end|>"))
    saved = SavedChats(folder / "chats", lambda _: None)
    with kvcli.load(str(folder / "m")) as model:
        chat = Chat(model.text_session, saved_chats=saved)
        turn = chat.send("How is it?", tools=told, max_new_tokens=30)
        assert (turn.text, turn.finish) == ("I look.", "tool_calls")
        assert [(call.name, call.arguments) for call in turn.tool_calls] == [("get_weather", {"city": "<|end|>"})]
        with pytest.raises(BadInput, match=r"\(2\).*tool calls \(1\)") as caught:
            chat.send_results(["a", "b"])
        assert caught.value.code == "tool_results"
        chat.send_results(["sunny<|end|>"], max_new_tokens=30)
        asked = chat.rendered([*chat.messages, Message("user", "Why?")])
        assert [m["role"] for m in asked.contents] == ["user", "assistant", "tool", "assistant", "user"]
        assert asked.ids.count(model.tokenizer.convert_tokens_to_ids("<|end|>")) == 5
        assert model.tokenizer.decode(asked.ids).count("<|end|>") == 5 + 4
        chat.save()
        again = Chat(model.text_session, saved_chats=saved).load(chat.saved_chat.name)  # type: ignore[union-attr]
        assert again.messages == chat.messages
        with pytest.raises(BadInput):
            list(again.edit("Other?"))
        assert [m["role"] for m in map(json.loads, json_lines(again.document()).splitlines())][2] == "tool"
        assert 'get_weather {"city"' in markdown(again.document())
        list(again.retry(max_new_tokens=30))
        assert again.messages[2] == chat.messages[2]
        assert [entry.questions for entry in saved.entries()] == [1]  # results are no question
        assert [label for label, _ in chat.tokens()] == ["question 1", "answer 1", "results 1", "answer 1", "template"]
        assert again.undo() == 1
        assert again.messages == []  # neither the call nor its results stay
        with pytest.raises(BadInput) as caught:
            chat.send("x", constraint=object())
        assert caught.value.code == "constrained_tools"


def test_a_thought_that_mentions_a_call_makes_none(tmp_path: Path):
    import kvcli

    call = ["<tool_call>", '{"name": "now", "arguments": {}}', "</tool_call>"]
    parrot(
        tmp_path / "m",
        ["<think>", *call, "</think>", "Done.", "<|stop|>"],
        special=("<|stop|>",),
        template=HERMES,
        eos=[256],
    )
    with kvcli.load(str(tmp_path / "m")) as model:
        turn = model.chat().send("?", tools=TOOLS, max_new_tokens=30)
    assert (turn.text, turn.tool_calls, turn.finish) == ("Done.", (), "stop")


# --- what runs a call


def turn_with(*calls: ToolCall) -> Turn:
    return Turn("", (), "tool_calls" if calls else "stop", Stats(), tool_calls=calls)


CALL = ToolCall("id", "now", {"a": "ü"})


def test_a_command_gets_the_call_and_its_output_is_the_result(tmp_path: Path):
    world = Machine(tmp_path).world()
    given: list[list[str]] = []

    def again(results: list[str]) -> Turn:
        given.append(results)
        return turn_with()

    for command in ("cat", "sh -c 'echo no >&2; exit 3'"):
        ChatTools(world, TOOLS, {}, command).follow(turn_with(CALL), again, lambda: False)
    assert json.loads(given[0][0]) == {"id": "id", "name": "now", "arguments": {"a": "ü"}}
    assert given[1][0].split() == ["error:", "exit", "status", "3", "no"]
    with pytest.raises(BadInput, match="cannot run nothing-of-that-name") as caught:
        ChatTools(world, TOOLS, {}, "nothing-of-that-name").follow(turn_with(CALL), again, lambda: False)
    assert caught.value.code == "tool_failed"


def test_calls_that_nothing_runs_and_endless_calls_end(tmp_path: Path):
    world = Machine(tmp_path).world()
    rounds: list[object] = []

    def again(results: list[str]) -> Turn:
        rounds.append(results)
        return turn_with(CALL)

    assert ChatTools(world, TOOLS, {}, None).follow(turn_with(CALL), again, lambda: False).tool_calls == (CALL,)
    assert rounds == []
    ChatTools(world, TOOLS, {}, "cat").follow(turn_with(CALL), again, lambda: False)
    assert len(rounds) == MOST_ROUNDS


@pytest.mark.parametrize(("typed", "results"), [("n\ny\n", [REFUSED, "ran"]), ("a\n", ["ran", "ran"])])
def test_a_call_of_a_server_is_asked_about(tmp_path: Path, typed: str, results: list[str]):
    world = Machine(tmp_path).world(typed.encode(), ("stdin", "stderr"))
    server: Any = SimpleNamespace(call=lambda name, arguments: "ran")
    given: list[list[str]] = []

    def again(found: list[str]) -> Turn:
        given.append(found)
        return turn_with()

    ChatTools(world, TOOLS, {"now": server}, None).follow(turn_with(CALL, CALL), again, lambda: False)
    assert given == [results]


REFUSALS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "no JSON": ("bad_tools", lambda world: open_tools(world, "a.json", (), None).__enter__()),
    "no file": ("bad_tools", lambda world: open_tools(world, "b.json", (), None).__enter__()),
    "a command without tools": ("usage", lambda world: open_tools(world, None, (), "cat").__enter__()),
    "an empty command": ("usage", lambda world: ChatTools(world, TOOLS, {}, "")),
    "a command with an open quote": ("usage", lambda world: ChatTools(world, TOOLS, {}, "cat 'a")),
    "a server with an open quote": ("usage", lambda world: mcp_server("cat 'a", world.cwd).__enter__()),
    "no results": ("bad_results", lambda world: read_results(world, "c.json")),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_files_are_refused(tmp_path: Path, case: str):
    (tmp_path / "a.json").write_text("[" * 9999)
    (tmp_path / "c.json").write_text("[5]")
    code, work = REFUSALS[case]
    with pytest.raises(KvcliError) as caught:
        work(Machine(tmp_path).world())
    assert caught.value.code == code


SERVER = """
from mcp.server import MCPServer
server = MCPServer("weather")
@server.tool()
def get_weather(city: str) -> str:
    "The weather of a city."
    if not city:
        raise ValueError("no city")
    return f"sunny in {city}"
server.run()
"""


@pytest.mark.slow
def test_tools_of_a_server_are_listed_and_called(tmp_path: Path):
    pytest.importorskip("mcp")
    with pytest.raises(BadInput, match="did not start") as caught, mcp_server("nothing-of-that-name", tmp_path):
        pass
    assert caught.value.code == "mcp_failed"
    (tmp_path / "server.py").write_text(SERVER)
    with mcp_server(f"{sys.executable} server.py", tmp_path) as server:
        (tool,) = check_tools(server.tools, "it")
        assert (tool["function"]["name"], tool["function"]["description"]) == ("get_weather", "The weather of a city.")
        assert server.call("get_weather", {"city": "Oslo"}) == "sunny in Oslo"
        assert server.call("get_weather", {"city": ""}).startswith("error: ")
        assert server.call("get_weather", {}).startswith("error: ")
