"""Text sessions whose answers other programs make, and one of an OpenAI-compatible server."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import tomli

from kvcli.api import Cancel, End, Event, Finish, Live, Read, Text, Thought, Turn
from kvcli.chat.side_by_side import Threads
from kvcli.engine.model_info import ModelInfo
from kvcli.engine.stats import Stats
from kvcli.engines.http import Refused, Server, never
from kvcli.errors import BadModel, ContextOverflow, EngineUnreachable, KvcliError, UsageError
from kvcli.models.thinking import ThinkingFormat
from kvcli.schemas.turn import EngineFacts
from kvcli.settings.schema import NO_PENALTY

if TYPE_CHECKING:
    from kvcli.models.text import Messages
    from kvcli.prefix_cache.prefix_cache import SaveResult
    from kvcli.settings.profile import Profile

Answering = Generator[Event, Any, Turn]
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # of JSON in another form
BYTES = 3  # of a token, in estimates of a prompt; ordinary text has about 4
UNKNOWN = 1 << 31  # context window of a server that does not tell it, in tokens
OWN = {"thinking.mode", "context.limit", "context.reserve", "context.on_overflow"}  # keys that are followed here
ENDS: Mapping[str, Finish] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}
TABLE = tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ENGINES: Mapping[str, dict[str, Any]] = TABLE["engines"]


class EstimatedTokens:
    """Stand-in for the tokenizer of a model that is elsewhere: three bytes are a token, and a plain template."""

    chat_template, all_special_ids, unk_token_id = "messages", (), None

    def encode(self, text: str, **_: object) -> list[int]:
        data = text.encode(errors="replace")
        return [int.from_bytes(data[i : i + BYTES]) for i in range(0, len(data), BYTES)]

    def decode(self, ids: object, **_: object) -> str:
        return ""

    def apply_chat_template(self, messages: Messages, **_: object) -> str:
        return "".join(f"{m['role']}\n{m['content']}\n" for m in messages)

    def get_vocab(self) -> dict[str, int]:
        return {"x" * 16: 0}  # a text is refused unasked only if it exceeds the window at 16 characters a token

    get_added_vocab = dict[str, int]

    def convert_tokens_to_ids(self, tokens: object) -> list[int]:
        return []


@dataclass(frozen=True)
class Endpoint:
    """Model of a server, as its list of models describes it."""

    server: Server
    model: str
    kind: str = "all"  # entry of openai.toml
    limit: int = 0  # tokens of the context window; 0 = the server does not tell
    exactness: str = ""
    others: Sequence[str] = ()  # the server's models

    @classmethod
    def of(cls, server: Server, wanted: str | None, profile: str = "") -> Endpoint:
        """Ask the server for its models. `wanted`: None = the only one. `profile`: chosen if the model is listed with
        it, as by `kvcli serve`. Raises EngineUnreachable, BadModel."""
        try:
            listed = json.loads("\n".join(replace(server, tries=4).lines("/models")))["data"]
            entries: dict[str, dict[str, Any]] = {str(one["id"]): one | (one.get("meta") or {}) for one in listed}
        except Refused as error:
            raise refusal(server, error) from None
        except UNREADABLE:
            raise _garbage(server, "its list of models cannot be read") from None
        plain = [name for name in entries if name.rpartition(":")[0] not in entries]
        name = wanted or (plain[0] if len(plain) == 1 else None)
        if name is None or name not in entries:
            what = f"has no model {wanted}" if wanted else f"has {len(plain)} models"
            raise BadModel(f"{server.url} {what}", code="model_not_found", try_=[f"-m {one}" for one in plain[:8]])
        name = one if (one := f"{name}:{profile}") in entries else name
        facts = entries[name]
        sizes = [n for key in ("max_model_len", "n_ctx", "context") if isinstance(n := facts.get(key), int) and n > 0]
        kind, promise = str(facts.get("owned_by")), str(facts.get("exactness", ""))
        return cls(server, name, kind if kind in ENGINES else "all", min(sizes, default=0), promise, plain)


class StandIn(ExitStack):  # for `with` and `close`
    """The members of TextSession that chats and summaries use, without a KV cache in this process."""

    pack = foretell = None
    drafts_by, n_workers = "", 1
    engine: EngineFacts | None = None
    template_variables: Mapping[str, Any] = {}
    new_engine: ClassVar[type[Threads]] = Threads
    idle = why_again = kv_table = is_compressed_prefix = staticmethod(lambda *_: [])

    def keep(self, cancel: Cancel) -> SaveResult:
        from kvcli.prefix_cache.prefix_cache import SaveResult  # late: it needs torch

        return SaveResult()

    def take_cache(self, other: object) -> bool:
        return True


@dataclass
class RemoteSession(StandIn):
    """Text session of an endpoint."""

    endpoint: Endpoint
    profile: Profile
    data: Path | None = None  # folder of saved chats

    call_syntax = staticmethod(lambda: SimpleNamespace(as_text=True))

    def __post_init__(self) -> None:
        super().__init__()
        end, limit = self.endpoint, self.profile.context.limit
        self.fields, self.engine = translated(end, self.profile)
        self.model, self.tokenizer, self.promise = self, EstimatedTokens(), end.exactness
        self.on_overflow = self.profile.context.on_overflow
        self.limit = end.limit or UNKNOWN if limit == "auto" else min(int(limit), end.limit or UNKNOWN)
        name, url, sizes = self.engine.server, end.server.url, (0,) * 6  # the sizes are unknown here
        lost = f"; without effect there: {', '.join(self.engine.without_effect)}" * bool(self.engine.without_effect)
        self.cautions = (f"{name} at {url} answers; settings sent: {', '.join(self.fields)}{lost}",)
        self.info = ModelInfo(end.model, url, "", *sizes, "", "none", name, url, self.limit % UNKNOWN, 0, 0.0)

    def thinking_format(self) -> ThinkingFormat:
        return ThinkingFormat({mode: {} for mode in ("on", "off", "low", "medium", "high")})

    def with_profile(self, profile: Profile) -> RemoteSession:
        return RemoteSession(self.endpoint, profile, self.data)

    def stream(self, prompt: Sequence[int], *, messages: Messages, cancel: Cancel = never, **options: Any) -> Answering:
        """Yield one answer to the messages as events; `prompt` has their estimated length. `options`: of [sample].

        Raises ContextOverflow, BadModel and EngineUnreachable, which has the text so far in its detail.
        """
        changed = {f"sample.{key}": value for key, value in options.items() if value is not None}
        fields, _ = translated(self.endpoint, self.profile.changed(changed, "answer") if changed else self.profile)
        body = {"model": self.endpoint.model, "messages": list(messages), "stream": True, **fields}
        stats = Stats(limit=self.limit % UNKNOWN, sampling={k: v for k, v in fields.items() if isinstance(v, float)})
        yield Live(stats)
        yield Read(0, len(prompt), 0, 0.0)
        answer = _Answer(self.endpoint, stats, len(prompt), cancel)
        try:
            return (yield from answer.events(body | {"stream_options": {"include_usage": True}}))
        except Refused as error:
            raise refusal(self.endpoint.server, error, self.endpoint, len(prompt)) from None
        except EngineUnreachable as error:
            error.detail["text"] = answer.text
            raise

    answer = stream


@dataclass
class _Answer:
    """One answer while it arrives."""

    endpoint: Endpoint
    stats: Stats
    prompt: int  # estimated tokens
    cancel: Cancel
    text: str = ""
    thinking: str = ""
    half: str = ""  # surrogate at the end of a piece, whose other half begins the next one
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    def events(self, body: Mapping[str, Any]) -> Answering:
        stats, server, began = self.stats, self.endpoint.server, time.perf_counter()
        for line in server.lines("/chat/completions", body, self.cancel):
            for event in self._pieces(line[5:].strip()) if line.startswith("data:") else ():
                stats.first_token = stats.read = stats.first_token or time.perf_counter() - began
                stats.new, stats.decode = stats.new + 1, time.perf_counter() - began - stats.read
                yield event
        if not self.finish and not self.cancel():
            said = f"after {len(self.text):,} characters" if self.text else "before it began"
            raise EngineUnreachable(
                f"{server.url} ended its answer {said}, without saying that it is complete",
                code="engine_lost",
                try_=["the same command again", "look at the server's log"],
            )
        if self.finish and self.finish not in ENDS:
            stats.shortages.append(f"the server ended its answer: {self.finish}")
        self._count()
        finish = ENDS.get(self.finish, "stop") if self.finish else "interrupted"
        turn = Turn(self.text, (), finish, stats, thinking=self.thinking)
        yield End(turn)
        return turn

    def _pieces(self, data: str) -> Iterator[Event]:
        """Yield the thought and the text of one chunk."""
        try:
            chunk: dict[str, Any] = {} if data == "[DONE]" else json.loads(data)
            self.usage |= (chunk.get("usage") or {}) | {"timings": chunk.get("timings", self.usage.get("timings"))}
            choice = (chunk.get("choices") or [{}])[0]
            delta = choice.get("delta") or {}
            text, thought = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
            (text, self.half), (thought, _) = _whole(self.half + text), _whole(thought)
            self.text, self.thinking = self.text + text, self.thinking + thought
            self.finish = str(choice.get("finish_reason") or self.finish)
        except UNREADABLE:
            raise _garbage(self.endpoint.server, f"a line cannot be read: {data[:60]!r}") from None
        if chunk.get("error"):
            said = _said(self.endpoint.server, json.dumps(chunk))
            raise EngineUnreachable(f"{self.endpoint.server.url} failed", code="engine_failed", lines=[said])
        if thought:
            self.stats.thinking += 1
            yield Thought(thought, ())
        if text:
            yield Text(text, ())

    def _count(self) -> None:
        """Replace the number of pieces by the server's token counts."""
        stats, parts = self.stats, (self.usage, *(value for value in self.usage.values() if isinstance(value, dict)))
        n = {key: value for part in parts for key, value in part.items() if isinstance(value, int) and value >= 0}
        stats.prompt, stats.new = n.get("prompt_tokens", self.prompt), n.get("completion_tokens", stats.new)
        stats.context, stats.cached = stats.prompt + stats.new, n.get("cached_tokens", 0)
        stats.kv = {"server": n["kv_bytes"]} if "kv_bytes" in n else {}
        stats.thinking = n.get("reasoning_tokens", stats.thinking)
        stats.accepted_tokens = n.get("accepted_prediction_tokens", 0)
        stats.draft_tokens = stats.accepted_tokens + n.get("rejected_prediction_tokens", 0)


def _whole(text: str) -> tuple[str, str]:
    """Return the text with pairs of surrogates joined, and apart the first half of a pair at its end."""
    n = len(text) - ("\ud800" <= text[-1:] < "\udc00")
    return text[:n].encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), text[n:]


def translated(endpoint: Endpoint, profile: Profile) -> tuple[dict[str, Any], EngineFacts]:
    """Return the fields of a request, and the facts about the engine. Raises UsageError for a key that was set on the
    command line and that no field stands for."""
    about, url, mode, values = ENGINES[endpoint.kind], endpoint.server.url, profile.thinking.mode, profile.values
    known, thinks = ENGINES["all"]["fields"] | about["fields"], about.get("thinks", {})
    sent = {*profile.written, "sample.seed", "sample.max_new_tokens"} & known.keys()
    fields = {known[key]: value for key, value in values.items() if key in sent}
    if mode in ("low", "medium", "high"):
        fields["reasoning_effort"] = mode
    elif mode != "auto" and thinks:
        fields |= thinks[mode]
    followed = {*known, *OWN} - (set() if thinks or mode not in ("on", "off") else {"thinking.mode"})
    off = {f"sample.{key}": value for key, value in NO_PENALTY.items()}
    served = "built-in " if endpoint.model.endswith(f":{profile.name}") else "\n"  # that profile runs there
    open_ = {key: value for key, value in profile.written.items() if not profile.origins[key].startswith(served)}
    lost = [key for key, value in open_.items() if key not in followed and value != off.get(key)]
    if profile.context.on_overflow == "compress":
        lost.append("context.on_overflow")
    if refused := [f"{key} ({profile.origins[key]})" for key in lost if profile.origins[key].startswith("--")]:
        ways = ["leave it out", "set it where the server is started; kvcli profiles export has the flags"]
        what = f"{about['name']} at {url} has no field for {', '.join(refused)}"
        raise UsageError(what, code="not_followed", try_=ways)
    return fields, EngineFacts(server=about["name"], url=url, fields=fields, without_effect=lost)


def refusal(server: Server, error: Refused, endpoint: Endpoint | None = None, prompt: int = 0) -> KvcliError:
    """Return the error for an answer other than 200, with the server's words."""
    said, status = _said(server, error.body), f"({error.status})"
    if error.status in (400, 413, 422) and "context" in said and any(w in said for w in ("length", "size", "window")):
        ways = ["attach a shorter document", "kvcli summarize FILE, which reads it in parts"]
        detail = {"prompt": prompt, "reserve": 0, "limit": endpoint.limit if endpoint else 0}
        return ContextOverflow(f"too long for {server.url} {status}", lines=[said], detail=detail, try_=ways)
    if error.status == 404 and endpoint is not None:
        ways = [f"-m {name}" for name in endpoint.others if name != endpoint.model]
        return BadModel(f"{server.url} has no model {endpoint.model}", code="model_not_found", lines=[said], try_=ways)
    code, what, way = TABLE["errors"].get(str(error.status), TABLE["errors"]["other"])
    return EngineUnreachable(f"{server.url} {what} {status}", code=code, lines=[said] if said else [], try_=[way])


def _said(server: Server, body: str) -> str:
    """Return the beginning of the server's words, on one line and without the key."""
    with suppress(*UNREADABLE):
        body = str(error := json.loads(body)["error"])  # vLLM refuses a key in one word
        body = str(error["message"])  # as the OpenAI API writes errors
    words = " ".join(body.split())[:300]
    return words.replace(server.key, "KEY") if server.key else words


def _garbage(server: Server, what: str) -> EngineUnreachable:
    said, ways = "does not answer as an OpenAI-compatible server does", ["--base-url with the address that it prints"]
    return EngineUnreachable(f"{server.url} {said}: {what}", code="engine_garbage", try_=ways)
