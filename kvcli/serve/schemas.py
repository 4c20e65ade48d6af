"""Requests of the server. A field that is not in these classes is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import from_json

from kvcli.api import ToolCall
from kvcli.chat.transcript import openai_form
from kvcli.schemas.base import Json
from kvcli.serve.errors import Refused
from kvcli.settings.problems import did_you_mean
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


async def parsed(kind: type[R], request: Request) -> R:
    """Return the body of a request as `kind`. Raises Refused (400), which names the field."""
    return checked(kind, await json_of(request))


async def json_of(request: Request) -> Any:
    try:
        given = from_json(await request.body(), allow_inf_nan=False)
        json.dumps(given, allow_nan=False)  # from_json reads 1e999 as infinity
        return given
    except ValueError as error:
        raise Refused(400, f"the request is not JSON: {error}", code="bad_json") from None


def translated(given: Any, as_chat: Callable[[Any], dict[str, Any]]) -> ChatRequest:
    """Return a request of another protocol as one for chat completions, whose schema checks it. Raises Refused (400),
    which names the field by its place in chat completions."""
    try:
        made = checked(ChatRequest, as_chat({key: value for key, value in given.items() if value is not None}))
        for name in ("n", "logprobs", "top_logprobs", "timings_per_token", "stream_options"):
            if getattr(made, name) != ChatRequest.model_fields[name].default:
                ways = ["several requests" if name == "n" else "/v1/chat/completions"]
                raise Refused(400, f"{name} is not supported", code="unsupported_field", param=name, try_=ways)
        return made
    except KeyError as error:
        raise Refused(400, f"{error.args[0]} is missing", code="bad_field", param=str(error.args[0])) from None
    except (AttributeError, TypeError, ValueError):  # a list or a text where an object belongs
        raise Refused(400, "the request does not have the form of this protocol", code="bad_field") from None


def rest_of(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the other fields of an object, without those that are null."""
    return {key: value for key, value in given.items() if key not in names and value is not None}


def checked(kind: type[R], given: Any) -> R:
    try:
        return kind.model_validate(given)
    except ValidationError as errors:
        wrong = errors.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in wrong["loc"])
    if wrong["type"] == "extra_forbidden":
        names = [field.alias or name for name, field in kind.model_fields.items()]
        near = did_you_mean(where, names)
        raise Refused(
            400, f"{where} is not supported", code="unsupported_field", param=where, try_=[near or f"leave {where} out"]
        )
    raise Refused(400, f"{where or 'the request'}: {wrong['msg']}", code="bad_field", param=where or None)


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


Sampling: Any = create_model("Sampling", __base__=RequestJson, **_sampling())


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
    stop: str | Annotated[list[str], Field(max_length=16)] = Field(default=[], description="texts that end the answer")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-1000, le=1000)]] = Field(default={}, description="by token id")
    ignore_eos: bool = Field(default=False, description="go on after the end of the answer, up to max_tokens")
    grammar: str | None = Field(default=None, description="constrain the answer to this grammar, GBNF or Lark")
    user: str = Field(default="", description="requests of one user wait for each other, not for other users")
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @property
    def sample(self) -> dict[str, object]:
        """Return the keys of [sample] that the request sets."""
        found: dict[str, object] = {k: v for k in Sampling.model_fields if (v := getattr(self, k)) is not None}
        if (most := getattr(self, "max_completion_tokens", None) or self.max_tokens) is not None:
            found["max_new_tokens"] = most
        if self.stop:
            found["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.logit_bias:
            found["logit_bias"] = [f"{token}{bias:+f}" for token, bias in self.logit_bias.items()]
        return found


class TextPart(RequestJson):
    type: Literal["text"]
    text: str


class FileData(RequestJson):
    filename: str = "document"
    file_data: str = Field(default="", description="the file in base64, or a data: address of it")
    file_id: str = Field(default="", description="of a document at /kvcli/pages, in place of file_data")


class FilePart(RequestJson):
    type: Literal["file"]
    file: FileData


def as_parts(given: Any) -> Any:
    """Return the content of a message as a list of parts."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


Part = Annotated[TextPart | FilePart, Field(discriminator="type")]
Content = Annotated[list[Part], BeforeValidator(as_parts, json_schema_input_type=str | list[Part])]


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
    content: Content = Field(default=[])
    name: str = ""
    tool_calls: list[CallOf] = Field(default=[])
    tool_call_id: str = ""
    reasoning_content: str = Field(default="", description="accepted and not shown: a thought ends with its answer")
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default=[])

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
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(RequestJson):
    model: str = ""
    tokens: list[Annotated[int, Field(ge=0)]]
