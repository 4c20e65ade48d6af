"""Tool calls in an answer, in the syntax that the model's chat template writes them in.

The syntax is read off the template: it renders a call of a known function with known arguments, and the text around
them is what the model was trained to write.
"""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from kvcli.errors import BadInput, BadModel
from kvcli.models.control_words import spelled
from kvcli.models.template import THOUGHT
from kvcli.models.text import Detokenizer, StopStrings, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAME, _KEYS, _SAID, _ASKED = "kvprobe", ("kvfirst", "kvsecond"), "kvsaid", "kvasked"
_TEXTS, _NUMBERS = ("kvone", "kvtwo"), (7123, 8123)
_LONGEST = 4096  # characters of a rendered call: templates are untrusted
BETWEEN = 120  # characters between a name and its arguments, at most
_TORN = "|>])}\"' \n,"  # end of a control word or of a separator
_PIECE = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|.", re.DOTALL)  # a quoted text, or a letter
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
_TOOL = re.compile(r"[\w.-]{1,64}")
_JSON = json.JSONDecoder(strict=False)
Call = tuple[str, str, dict[str, Any]]  # id, name, arguments


def check_tools(found: object, name: str) -> list[dict[str, Any]]:
    """Return function definitions in OpenAI's form. Raises BadInput that names the wrong one. `name`: of the file."""
    tools = found if isinstance(found, list) else []
    wrong = "" if tools else "is not a list of functions"
    seen = set[str]()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        function = function if isinstance(function, dict) else {}
        called, parameters = function.get("name"), function.get("parameters", {"type": "object"})
        is_object = isinstance(parameters, dict) and parameters.get("type") == "object"
        fields = parameters.get("properties", {}) if is_object else None
        if not function:
            wrong = f'entry {i + 1} is not {{"type": "function", "function": ...}}'
        elif not isinstance(called, str) or not _TOOL.fullmatch(called) or called in seen:
            wrong = f"entry {i + 1} has no name of its own of letters, digits, _, - and .: {str(called)[:40]}"
        elif not isinstance(function.get("description", ""), str):
            wrong = f"the description of {called} is not a text"
        elif not isinstance(fields, dict):
            wrong = f"the parameters of {called} are not a JSON schema of type object"
        seen.add(str(called))
    if wrong:
        example = '[{"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}]'
        raise BadInput(f"{name} {wrong}", code="bad_tools", try_=[example])
    return tools


@dataclass(frozen=True, slots=True)
class Parameters:
    """Syntax of arguments that are no JSON object: the text around keys and values."""

    opens: str  # between the name of the tool and the first argument
    lead: str  # before each key
    equals: str  # between a key and a text
    post: str  # after a text
    bare_equals: str  # between a key and a number; the same as `equals` if texts are not quoted
    separator: str
    ends: str  # after the last argument

    def read(self, text: str, at: int, properties: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments from a position on; None if they are not complete."""
        found, at = dict[str, Any](), _after(text, self.opens, at)
        key = re.compile(rf"\s*{_pattern(self.lead)}\s*([\w.-]+)\s*")
        while match := key.match(text, at):
            of_type = properties.get(match[1], {}).get("type") if isinstance(properties.get(match[1]), dict) else None
            at = match.end()
            quote = self.equals.removeprefix(self.bare_equals)
            begins, is_marked = _after(text, self.equals, at), quote not in ("'", '"')  # Python has escapes
            if is_marked and begins > at and (end := text.find(self.post, begins)) >= 0:
                written, at = text[begins:end], end + len(self.post)
                is_text = self.equals != self.bare_equals or of_type == "string"
                found[match[1]] = written if is_text else _value(written)
            else:
                begins = _after(text, self.bare_equals, at)
                at = self._end_of_value(text, begins)
                found[match[1]] = _value(text[begins:at].replace(quote or '"', '"') if is_marked else text[begins:at])
            at = _after(text, self.separator, at)
        return found if _after(text, self.ends, at) > at else None

    def _end_of_value(self, text: str, at: int) -> int:
        """Return the end of a value without quotes: a separator or an end outside of its brackets."""
        depth = 0
        for piece in _PIECE.finditer(text, at):
            at = piece.start()
            if not depth and text.startswith((self.separator or self.ends, self.ends), at):
                break
            depth += (piece[0] in "([{") - (piece[0] in ")]}")
        return at


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of the tool calls of a chat template."""

    opener: str  # text that begins the first call
    start: str  # text before each call
    keys: tuple[str, ...] = ()  # of a call that is one JSON object: key of the name, of the arguments
    parameters: Parameters | None = None  # None: the arguments are a JSON object after the name
    as_text: bool = False  # the template takes arguments as JSON text

    def calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
        """Return the complete calls of these tools in an answer."""
        known = {tool["function"]["name"]: tool["function"] for tool in tools}
        found = self._objects(text) if self.keys else self._named(text, known)
        return [
            (blake2b(f"{i}{text}".encode()).hexdigest()[:9], name, arguments)
            for i, (name, arguments) in enumerate(found)
            if isinstance(name, str) and name in known and isinstance(arguments, dict) and is_json(arguments)
        ]

    def _objects(self, text: str) -> Iterator[tuple[Any, Any]]:
        for start in re.finditer(_pattern(self.start) or r"\A", text):
            value = _json_at(text, start.end())
            for call in value if isinstance(value, list) else [value]:
                call = _function(call)
                arguments = call.get(self.keys[1], {})
                yield call.get(self.keys[0]), _json_at(arguments, 0) if isinstance(arguments, str) else arguments

    def _named(self, text: str, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        names = "|".join(map(re.escape, known))
        for call in re.finditer(rf"{_pattern(self.start)}\s*({names})(?![\w.-])", text):
            if self.parameters is None:
                brace = text.find("{", call.end(), call.end() + BETWEEN)
                yield call[1], _json_at(text, brace) if brace >= 0 else None
            else:
                properties = known[call[1]].get("parameters", {}).get("properties") or {}
                yield call[1], self.parameters.read(text, call.end(), properties)


def is_json(value: Any) -> bool:
    """False if JSON cannot hold a value: infinite numbers, halves of characters, and types of Python alone."""
    with suppress(ValueError, TypeError, RecursionError):
        return bool(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    return False


def _json_at(text: str, at: int) -> Any:
    """Return the JSON value at a position, white space before it aside; None if there is none."""
    with suppress(ValueError, RecursionError):
        return _JSON.raw_decode(text, _after(text, " ", at))[0]
    return None


def _function(call: Any) -> dict[str, Any]:
    """Return the object with name and arguments of a call; {} if it is none."""
    call = call.get("function", call) if isinstance(call, dict) else {}
    return call if isinstance(call, dict) else {}


def _value(text: str) -> Any:
    """Return a value written as JSON, in Python, or as JSON with bare keys; or else the text."""
    for read, written in ((json.loads, text), (literal_eval, text), (json.loads, _BARE_KEY.sub(r'\1"\2":', text))):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return read(written.strip())
    return text


def _pattern(text: str) -> str:
    """Return a pattern for a text, with any white space where it has some."""
    inner = r"\s+".join(map(re.escape, text.split()))
    return rf"\s*{inner}\s*" if inner and text != text.strip() else inner


def _after(text: str, mark: str, at: int) -> int:
    """Return the position after a mark and the white space around it; `at` if it is not there."""
    found = re.compile(rf"\s*{_pattern(mark.strip())}\s*" if mark.isspace() else _pattern(mark)).match(text, at)
    return found.end() if found else at


def call_syntax(tokenizer: PreTrainedTokenizerBase, name: str) -> CallSyntax:
    """Derive the syntax of a model's calls from its chat template. Raises BadModel if the template has none."""
    shown = False
    for as_text in (False, True):
        with suppress(Exception):  # it may refuse calls in one form; a bad one is reported with the question
            plain = _rendered(tokenizer, _SAID)
            shown = _NAME in plain
            texts, numbers = (_rendered(tokenizer, "", [values], as_text) for values in (_TEXTS, _NUMBERS))
            two = ""
            with suppress(Exception):  # the template may allow one call
                two = _rendered(tokenizer, "", [_TEXTS, _TEXTS], as_text)
            if (found := _derived(plain, texts, numbers, two, as_text)) is not None and shown:
                return found
    raise BadModel(
        f"the chat template of {name} has no tool calls",
        code="no_tool_calls",
        lines=["it shows a call and its arguments nowhere" if shown else "it does not show tools to the model"],
        try_=["another model, or leave --tools out"],
    )


def _rendered(
    tokenizer: PreTrainedTokenizerBase, said: str, calls: Sequence[Sequence[Any]] = (), as_text: bool = False
) -> str:
    """Render a question and an answer with these calls; the text after the question, or all of it without calls."""
    arguments = [dict(zip(_KEYS, values, strict=True)) for values in calls]
    functions = [{"name": _NAME, "arguments": json.dumps(one) if as_text else one} for one in arguments]
    each = [{"id": f"kvcall{i:03d}", "type": "function", "function": one} for i, one in enumerate(functions)]
    answer = {"role": "assistant", "content": said, **({"tool_calls": each} if each else {})}
    parameters = {"type": "object", "properties": {key: {"type": "string", "description": key} for key in _KEYS}}
    tool = {"type": "function", "function": {"name": _NAME, "description": _NAME, "parameters": parameters}}
    text = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": _ASKED}, answer], tools=[tool], tokenize=False, add_generation_prompt=False
        )
    )
    return text.rpartition(_ASKED)[2] if calls else text


def _derived(plain: str, texts: str, numbers: str, two: str, as_text: bool) -> CallSyntax | None:
    """Read the syntax off renderings: of an answer, of a call with texts, with numbers, and of two calls."""
    if len(texts) > _LONGEST:
        return None
    before, _, rest = texts.partition(_NAME)
    head, _, tail = plain.rpartition(_ASKED)[2].partition(_SAID)
    wanted = dict(zip(_KEYS, _TEXTS, strict=True))
    for brace in re.finditer(r"[\[{]", before):
        value = _json_at(texts, brace.start())
        call = _function(value[0] if isinstance(value, list) and value else value)
        keys = [k for k, v in call.items() if v == _NAME]
        keys += [k for k, v in call.items() if v == wanted or (isinstance(v, str) and _json_at(v, 0) == wanted)]
        if len(keys) == 2:
            start = _opening(before[: brace.start()], head)
            return CallSyntax(_first(start or before[brace.start() :]), start, tuple(keys), as_text=as_text)
    start = _opening(before, head)
    opener = _first(start)
    if not opener:
        return None
    if (second := two.split(_NAME))[2:]:  # what is before both calls
        start = _shared(before[::-1], second[1][::-1])[::-1].lstrip(_TORN)
    if _json_at(rest, rest.find("{") if 0 <= rest.find("{") < BETWEEN else len(rest)) == wanted:
        return CallSyntax(opener, start, as_text=as_text)
    parts, bare = _split(rest, _TEXTS), _split(numbers.partition(_NAME)[2], _NUMBERS)
    if parts is None or bare is None:
        return None
    opens, equals, between, ending = parts
    post = re.sub(r"[<\[(|/]+\Z", "", _shared(between, ending := ending.removesuffix(tail)))
    lead = _shared(opens[::-1], between[::-1])[::-1].lstrip(_TORN)
    separator = between.removeprefix(post).removesuffix(lead).strip()
    end = ending.removeprefix(post).strip()
    ends = (spelled(end) or [end])[0] if end.startswith("<") else end[:1]
    found = Parameters(opens.removesuffix(lead), lead, equals, post, bare[1], separator, ends)
    return CallSyntax(opener, start, (), found, as_text)


def _split(rest: str, values: Sequence[Any]) -> tuple[str, str, str, str] | None:
    """Split the text after a name: before the first key, from key to value, between two arguments, and after them."""
    marks = (_KEYS[0], str(values[0]), _KEYS[1], str(values[1]))
    found = re.fullmatch(f"(.*?){'(.*?)'.join(marks)}(.*)", rest, re.DOTALL)
    return (found[1], found[2], found[3], found[5]) if found and found[2] == found[4] else None


def _opening(before: str, head: str) -> str:
    """Return the text before a call that is not before every answer (`head`), without a thought."""
    shared = _shared(before, head)
    torn = re.search(r"<[^<>]*\Z|\[[^\[\]]*\Z", shared)  # both go on with a control word
    return THOUGHT.sub("", before[torn.start() if torn else len(shared) :], count=1).strip()


def _shared(a: str, b: str) -> str:
    """Return the beginning that two texts share."""
    return "".join(x for x, y in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _first(opening: str) -> str:
    """Return the control word or the word that begins a text."""
    words = spelled(opening)
    return words[0] if words and opening.startswith(words[0]) else re.split(r"[\s:]", opening)[0]


class CallReader:
    """Splitter of an answer's tokens: those before a tool call, and those of calls, which are held back."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, syntax: CallSyntax, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        self._tokenizer, self._syntax, self._tools = tokenizer, syntax, tools
        self._words, self._opener = Detokenizer(tokenizer), StopStrings([syntax.opener])
        self._words.special = frozenset()  # openers may be control tokens
        self._ids, self._held = list[int](), list[int]()

    def push(self, token: int) -> list[int]:
        """Return the tokens that are certain to be no part of a call."""
        self._ids.append(token)
        self._held.append(token)
        if not self._opener.is_hit:
            self._opener.push(self._words.push([token]))
        if self._opener.is_hit or self._opener.is_waiting:
            return []
        released, self._held = self._held, []
        return released

    def finish(self) -> tuple[list[Call], list[int]]:
        """Return the calls of the answer, and held tokens that are text after all."""
        calls = self._syntax.calls(decode(self._tokenizer, self._ids), self._tools) if self._opener.is_hit else []
        return calls, [] if calls else self._held
