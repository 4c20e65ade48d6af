"""Requests of the server. A field that is not in these classes is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError, from_json

from kvcli.api import ToolCall
from kvcli.chat.transcript import openai_form
from kvcli.schemas.base import Json
from kvcli.serve.errors import Refused
from kvcli.settings.problems import any_of, did_you_mean
from kvcli.settings.schema import Sample
from kvcli.settings.values import comments_of, keys_of

if TYPE_CHECKING:
    from starlette.requests import Request

R = TypeVar("R", bound="RequestJson")


class RequestJson(Json):
    """A request, or a part of one. A field that is null counts as absent, as in OpenAI's clients."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


class WrongField(Refused):
    """A refusal of a part of a request. `said`: the sentence about it, behind its place."""

    def __init__(self, place: Sequence[str | int], said: str, code: str = "bad_field", *ways: str) -> None:
        where = ".".join(map(str, place))
        super().__init__(400, f"{where or 'the request'}{said}", code=code, param=where or None, try_=ways)
        self.place, self.said = tuple(place), said

    def at(self, *place: str | int) -> WrongField:
        """Return the refusal with another place."""
        return WrongField(place, self.said, self.code, *self.try_)


@contextmanager
def at(*place: str | int) -> Iterator[None]:
    """Name the place of a part of a request in an error about it."""
    try:
        yield
    except WrongField as error:
        raise error.at(*place, *error.place) from None
    except KeyError as error:
        raise WrongField((*place, str(error.args[0])), " is missing") from None
    except (AttributeError, TypeError, ValueError):  # a list or a text where an object belongs
        raise WrongField(place, " does not have the form of this protocol") from None


async def parsed(kind: type[R], request: Request) -> R:
    """Return the body of a request as `kind`. Raises WrongField."""
    return checked(kind, await json_of(request))


async def json_of(request: Request) -> Any:
    try:
        given = from_json(await request.body(), allow_inf_nan=False)
        json.dumps(given, allow_nan=False)  # from_json reads 1e999 as infinity
        return given
    except ValueError as error:
        raise Refused(400, f"the request is not JSON: {error}", code="bad_json") from None


def translated(
    kind: type[RequestJson], given: Any, as_chat: Callable[[Any], dict[str, Any]], names: Mapping[str, str]
) -> ChatRequest:
    """Return a request of another protocol, a `kind`, as one for chat completions, whose schema checks it too. `names`:
    fields of chat completions -> those of the protocol. Raises WrongField."""
    checked(kind, given)
    try:
        with at():
            made = checked(ChatRequest, as_chat({key: value for key, value in given.items() if value is not None}))
    except WrongField as error:
        first, rest = error.place[:1], error.place[1:]
        raise error.at(*(names.get(str(one), one) if one not in given else one for one in first), *rest) from None
    for name in ("n", "logprobs", "top_logprobs", "timings_per_token", "stream_options"):
        if getattr(made, name) != ChatRequest.model_fields[name].default:
            way = "several requests" if name == "n" else "/v1/chat/completions"
            raise WrongField([name], " is not supported", "unsupported_field", way)
    return made


def rest_of(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the other fields of an object, without those that are null."""
    return {key: value for key, value in given.items() if key not in names and value is not None}


def put(asked: dict[str, Any], name: str, value: Any, own: str) -> None:
    """Set a field, unless to None, from `own`, which means the same. Raises WrongField if both are given and differ."""
    if value is not None and asked.setdefault(name, value) != value:
        said = f" is {_shown(value)} and {name}, which means the same, is {_shown(asked[name])}"
        raise WrongField([own], said, "bad_field", "only one of them")


def checked(kind: type[R], given: Any) -> R:
    """Return an object as `kind`. Raises WrongField."""
    try:
        return kind.model_validate(given)
    except ValidationError as errors:
        found = [(*_place(wrong, given), wrong) for wrong in errors.errors(include_url=False, include_input=False)]
    (first, *_), said = found[0], ""
    place, value, wrong = max((one for one in found if one[0][: len(first)] == first), key=lambda one: len(one[0]))
    match wrong["type"]:
        case "missing":
            said = " is missing"
        case "value_error":
            said = f": {wrong['ctx']['error']}"
        case "extra_forbidden":
            fields = [field.alias or name for name, field in kind.model_fields.items()] if len(place) == 1 else []
            way = did_you_mean(str(place[-1]), fields) or f"leave {place[-1]} out"
            raise WrongField(place, " is not supported", "unsupported_field", way)
        case _:  # of a union: all that it takes
            wants = [_wanted(one) for at, _, one in found if at == place]
            said = f" is {_shown(value)}; it takes {any_of(list(dict.fromkeys(wants)))}"
    raise WrongField(place, said)


def _place(wrong: Any, given: Any) -> tuple[tuple[str | int, ...], Any]:
    """Return where the request has what is wrong, and what it has there. pydantic's place has names of types, too."""
    place, last = list[str | int](), len(wrong["loc"]) - 1
    for i, part in enumerate(wrong["loc"]):
        is_in = part in (given if isinstance(given, dict) else range(len(given)) if isinstance(given, list) else ())
        if is_in or (wrong["type"] == "missing" and i == last):
            place.append(part)
            given = given[part] if is_in else None
    return tuple(place), given


def _shown(value: Any) -> str:
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= 60 else f"{said[:50]} ... ({len(said):,} characters)"


def _wanted(wrong: Any) -> str:
    """Return what a field takes, by the kind of the error about it."""
    limits = {name: f"{one:g}" if isinstance(one, float) else one for name, one in wrong.get("ctx", {}).items()}
    said = str(_WANTED.get(wrong["type"], wrong["msg"])).format(**limits)
    return said.replace("'", '"').replace("False", "false")


_WANTED = dict.fromkeys(("int_type", "int_from_float"), "a whole number") | {"float_type": "a number"}
_WANTED |= dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object") | {"list_type": "a list"}
_WANTED |= {"string_type": "a text", "bool_type": "true or false", "literal_error": "{expected}"}
_WANTED |= {"greater_than_equal": "a number from {ge}", "greater_than": "a number above {gt}"}
_WANTED |= {"less_than_equal": "a number up to {le}", "less_than": "a number below {lt}"}
_WANTED |= {"string_too_short": "a text that is not empty", "too_short": "a list that is not empty"}
_WANTED |= {"too_long": "a list of at most {max_length} entries"}


def _sampling() -> dict[str, Any]:
    """Return the fields of the samplers of [sample]; other keys that are texts have a form of OpenAI's."""
    fields, said = dict[str, Any](), comments_of(Sample)
    for name, key in keys_of(Sample).items():
        for hint in (key.hint, *get_args(key.hint)):
            kind, *also = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            for allowed in also if kind in (int, float) and name != "max_new_tokens" else ():
                limits = {"ge": allowed.least, "le": allowed.most, "gt": allowed.above, "lt": allowed.below}
                fields[name] = (kind | None, Field(default=None, description=said[name], **limits))
    breakers = Field(default=None, description=said["dry_sequence_breakers"])
    return fields | {"dry_sequence_breakers": (list[str] | None, breakers)}


Object = dict[str, Any]
Objects = Annotated[list[Object], Field(min_length=1)]
Sampling: Any = create_model("Sampling", __base__=RequestJson, **_sampling())


Filled = Annotated[str, Field(min_length=1)]


class StreamOptions(RequestJson):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Common(Sampling):  # type: ignore[misc]  # its fields are those of a dataclass
    """Fields of all requests for text."""

    model: str = Field(default="", description="a name of /v1/models; absent: the model under its usual profile")
    profile: str = Field(default="", description="the profile, if the name of the model has none")
    set: dict[str, Any] = Field(default={}, description="profile keys of [sample] and [spec], such as spec.method")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    timings_per_token: bool = Field(default=False, description="send timings with each piece of a stream")
    n: Annotated[int, Field(ge=1, le=16)] = Field(default=1, description="answers, with seeds that follow each other")
    stop: Filled | Annotated[list[Filled], Field(max_length=16)] = Field(default=[], description="ends of the answer")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-1000, le=1000)]] = Field(default={}, description="by token id")
    ignore_eos: bool = Field(default=False, description="go on after the end of the answer, up to max_tokens")
    grammar: str | None = Field(default=None, description="constrain the answer to this grammar, GBNF or Lark")
    user: str = Field(default="", description="requests of one user wait for each other, not for other users")
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @model_validator(mode="after")
    def _once(self) -> Self:
        """Refuse two values of one setting."""
        if self.max_tokens is not None and (other := getattr(self, "max_completion_tokens", None)) is not None:
            put({"max_tokens": self.max_tokens}, "max_tokens", other, "max_completion_tokens")
        for key, value in self.sample.items():
            name = "max_tokens" if key == "max_new_tokens" else key
            put({name: value}, name, self.set.get(f"sample.{key}", value), f"set.sample.{key}")
        return self

    @property
    def sample(self) -> dict[str, object]:
        """Return the keys of [sample] that the request sets."""
        found: dict[str, object] = {k: v for k in Sampling.model_fields if (v := getattr(self, k)) is not None}
        given = {"max_tokens", "max_completion_tokens"} & self.model_fields_set
        is_given = given or "sample.max_new_tokens" not in self.set  # else the usual limit would go before it
        if is_given and (most := getattr(self, "max_completion_tokens", None) or self.max_tokens) is not None:
            found["max_new_tokens"] = most
        if self.stop:
            found["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.logit_bias:
            found["logit_bias"] = [f"{token}{bias:+f}" for token, bias in self.logit_bias.items()]
        return found


class FileData(RequestJson):
    filename: str = "document"
    file_data: str = Field(default="", description="the file in base64, or a data: address of it")
    file_id: str = Field(default="", description="of a document at /kvcli/pages, in place of file_data")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.file_data) == bool(self.file_id):
            raise ValueError("it takes file_data, which is not empty, or file_id")
        return self


class ContentPart(RequestJson):
    """A part of a message: a text or a file."""

    type: Literal["text", "file"]
    text: str | None = None
    file: FileData | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.model_fields_set != {"type", self.type}:
            raise ValueError(f"a part of type {self.type} has the field {self.type}, and no other")
        return self


def as_parts(given: Any) -> Any:
    """Return the content of a message as a list of parts."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list) or not given:
        raise PydanticCustomError("content", "a text, or a list of parts that is not empty")
    return given


def parts_of(given: Any, translate: Callable[[Any], Any], name: str = "content") -> Any:
    """Return content with its parts translated. What is neither text nor list is left for the schema to refuse."""
    if not isinstance(given, str | list):
        return given
    found = []
    for i, one in enumerate(as_parts(given) if given != [] else []):
        with at(name, i):
            found.append(translate(one))
    return found


Content = Annotated[list[ContentPart], BeforeValidator(as_parts, json_schema_input_type=str | list[ContentPart])]


def _as_object(given: Any) -> Any:
    return from_json(given or "{}", allow_inf_nan=False) if isinstance(given, str) else given


class CalledFunction(RequestJson):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_as_object, json_schema_input_type=str)] = Field(default={})


class CallOf(RequestJson):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int = 0


class ChatMessage(RequestJson):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str = ""
    tool_calls: list[CallOf] = Field(default=[])
    tool_call_id: str = ""
    reasoning_content: str = Field(default="", description="accepted and not shown: a thought ends with its answer")
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default=[])

    @model_validator(mode="before")
    @classmethod
    def _of_calls(cls, given: Any) -> Any:
        """An answer with calls needs no content of its own."""
        is_call = isinstance(given, dict) and given.get("tool_calls") and given.get("role") == "assistant"
        return {**given, "content": given.get("content") or ""} if is_call else given

    @model_validator(mode="after")
    def _of_role(self) -> Self:
        owners = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
        for name, role in owners.items():
            if getattr(self, name) and self.role != role:
                raise ValueError(f"{name} is for messages of role {role}, and this one's is {self.role}")
        return self

    def plain(self, content: str, *, as_text: bool) -> dict[str, Any]:
        """Return the message as chat templates take it, with the text of its content. `as_text`: arguments of calls as
        JSON text."""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        calls = [
            openai_form(ToolCall(c.id, c.function.name, c.function.arguments), as_text=as_text) for c in self.tool_calls
        ]
        given = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        return found | {key: value for key, value in given.items() if value}


class JsonSchema(RequestJson):
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(default={"type": "object"}, alias="schema")
    strict: bool = True


class ResponseFormat(RequestJson):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema = JsonSchema()

    @model_validator(mode="after")
    def _of_type(self) -> Self:
        has_schema = "json_schema" in self.model_fields_set
        if {"text": has_schema, "json_schema": not has_schema}.get(self.type):
            raise ValueError(f"type {self.type} {'takes no' if has_schema else 'needs a'} json_schema")
        return self

    @property
    def grammar(self) -> Mapping[str, Any] | None:
        """Return the JSON schema of the answer; None = any text."""
        return None if self.type == "text" else self.json_schema.schema_


class FunctionName(RequestJson):
    name: str


class ToolChoice(RequestJson):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(Common):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="tokens of the answer; those of a thought do not count"
    )
    response_format: ResponseFormat = ResponseFormat(type="text")
    tools: list[dict[str, Any]] = Field(default=[], description="functions: type, function: name, parameters")
    tool_choice: Literal["auto", "none", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "on"] | None = None
    thinking_tokens: Annotated[int, Field(ge=0)] = Field(default=0, description="most tokens of a thought")
    chat_template_kwargs: dict[str, Any] = Field(default={}, description="variables of the chat template")
    modalities: list[Literal["text"]] = Field(default=["text"])
    verbosity: Literal["medium"] = "medium"


class TextRequest(Common):
    prompt: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=64)]
        | (Annotated[list[list[int]], Field(min_length=1, max_length=64)])
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = Field(default=False, description="return the prompt before the answer, with its scores")
    best_of: Literal[1] = 1


class TokenizeRequest(RequestJson):
    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] = Field(default=[])
    tools: list[dict[str, Any]] = Field(default=[])
    chat_template_kwargs: dict[str, Any] = Field(default={})
    add_special_tokens: bool = Field(default=True, description="with prompt; messages have those of the chat template")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _either(self) -> Self:
        others = {"add_special_tokens"} if self.messages else {"messages", "tools", "chat_template_kwargs"}
        if (self.prompt is None) == (not self.messages) or others & self.model_fields_set:
            raise ValueError("it takes prompt, perhaps with add_special_tokens, or messages with the fields of chat")
        return self


class DetokenizeRequest(RequestJson):
    model: str = ""
    tokens: list[Annotated[int, Field(ge=0)]]
