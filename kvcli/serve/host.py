"""The answers of a server: one loaded model under several profiles, for requests of any protocol.

A protocol parses a request into `Asked`, and gets the events of `kvcli.api` back.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from kvcli import assemble
from kvcli.api import End, Event, Text, ToolCall, Turn
from kvcli.chat.overflow import refuse_longer
from kvcli.chat.warm_sessions import WarmSessions
from kvcli.errors import BadConfig, BadInput, Busy, KvcliError
from kvcli.models.grammar import Grammar
from kvcli.models.text import decode, encode, lay_out
from kvcli.models.tool_calls import is_json
from kvcli.prefix_cache.prefix_cache import cache_key
from kvcli.serve.documents import Documents
from kvcli.serve.errors import Refused
from kvcli.serve.metrics import Metrics
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.models.text import Messages
    from kvcli.settings.profile import Profile

T = TypeVar("T")

SETTABLE = ("sample", "spec")  # tables whose keys a request may set: they have no paths and no sizes
LONGEST = 64 << 10  # bytes of a schema or a grammar
# no variables of a template, or not for requests
RESERVED = frozenset("self conversation messages tools documents tokenize add_generation_prompt".split())
COMPILE_SECONDS = 10.0  # time for a grammar


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer that a client asks for, in no protocol's own form. Either `messages` or `prompt` is given."""

    model: str = ""  # NAME or NAME:PROFILE; "" = the served model under its first profile
    profile: str = ""  # another way to choose the profile
    set: Mapping[str, object] = field(default_factory=dict)  # dotted keys of SETTABLE -> values
    messages: Messages = ()  # as the chat template takes them, content always a text
    prompt: str | Sequence[int] = ""  # text or ids for the model as they are
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    thinking: str = "auto"  # mode of thinking: auto, on, off, low, medium, high
    thinking_tokens: int = 0  # most tokens of a thought; 0 = what the profile says
    sample: Mapping[str, object] = field(default_factory=dict)  # keys of [sample] -> values, max_new_tokens among them
    ignore_eos: bool = False
    schema: Mapping[str, Any] | None = None  # JSON schema of the answer
    grammar: str | None = None  # GBNF or Lark
    tools: Sequence[Mapping[str, Any]] = ()  # functions in OpenAI's form, checked
    forced: Sequence[str] = ()  # functions of which one is called; () = the model decides
    most_calls: int | None = None  # calls of an answer, at most
    top_logprobs: int | None = None  # likeliest tokens whose log-probabilities are returned; None = no scores
    prompt_logprobs: bool = False
    client: str = ""  # whose turn it is while requests wait
    notes: list[str] = field(default_factory=list)  # for the client: what the prompt lacks of the request

    def notes_on(self, turn: Turn) -> dict[str, Any]:
        """Return the notes on a finished answer, as a field of its response."""
        return {"notes": [*dict.fromkeys(filter(None, [*self.notes, turn.stats.approx]))]}


class Host:
    """A loaded model that answers requests of many clients at a time. Belongs to one event loop."""

    def __init__(
        self,
        model: Model,
        name: str,
        profiles: Mapping[str, Profile],
        bug: Callable[[Exception], KvcliError],
        *,
        idle_bytes: int = 1 << 30,
    ) -> None:
        """`profiles`: those that requests may name, all of which load the weights alike; the first one is the default.

        `bug`: reports an unforeseen error, and returns what the client is told. `idle_bytes`: of KV that is kept
        between requests.
        """
        self.model, self.name, self.profiles, self.bug = model, name, dict(profiles), bug
        self.warm = WarmSessions(model, idle_bytes)
        self.metrics = Metrics(model.engine.snapshot)
        self.documents = Documents()
        self._weights = sha256(json.dumps(cache_key(model.lm)).encode()).hexdigest()[:16]
        self._texts = ThreadPoolExecutor(1, "kvcli-text")  # renders and tokenizes prompts
        self._grammars = ThreadPoolExecutor(2, "kvcli-grammar")

    @property
    def names(self) -> dict[str, Profile]:
        """Names of models that requests may give, with their profiles."""
        first = next(iter(self.profiles.values()))
        return {self.name: first, **{f"{self.name}:{name}": profile for name, profile in self.profiles.items()}}

    def profile_of(self, asked: Asked) -> Profile:
        """Return the profile with the settings of a request. Raises BadInput (404) and BadConfig."""
        name, names = asked.model or self.name, self.names
        if asked.profile and not name.endswith(f":{asked.profile}"):
            name = f"{name}:{asked.profile}"
        if (profile := names.get(name)) is None:
            said = f"{name} is not served here"
            raise Refused(404, said, code="model_not_found", param="model", try_=list(names))
        changes: dict[str, Any] = dict(asked.set)
        if wrong := [key for key in changes if key.partition(".")[0] not in SETTABLE or "." not in key]:
            others = ", ".join(f"{table}.*" for table in SETTABLE)
            raise BadConfig(f"a request cannot set {wrong[0]}", code="not_allowed", try_=[f"set keys of {others}"])
        changes |= {"thinking.mode": asked.thinking} if asked.thinking != "auto" else {}
        changes |= {"thinking.max_tokens": asked.thinking_tokens} if asked.thinking_tokens else {}
        changed = profile.changed(changes, "the request") if changes else profile
        if changed.second != profile.second:
            raise BadConfig("a request cannot choose a draft model", code="not_allowed", try_=["spec.method=ngram"])
        return changed

    def fingerprint(self, profile: Profile) -> str:
        """Return a text that is equal for two answers only if the same request gives the same text."""
        name, promise = self.model.info.id, self.model.under(profile).exactness_label
        return f"kvcli-{__version__}-{name}-{self._weights}-{profile.hash}-{promise}".replace(" ", "_")

    async def prompt_of(self, asked: Asked, profile: Profile) -> list[int]:
        """Return the prompt that the model is given. Raises BadInput and ContextOverflow.

        It depends on the request alone: an answer that a client sends back is encoded anew, as no other request's
        answer may choose the tokens of this one.
        """
        return await self.text_of(partial(self._prompt, asked, profile))

    def word(self, token: int) -> str:
        """Return the text of a token."""
        return decode(self.model.tokenizer, [token])

    async def text_of(self, act: Callable[[], T]) -> T:
        """Run work with the tokenizer beside the event loop.

        A cancelled task waits for its end, so that nothing that it uses is freed meanwhile.
        """
        work = asyncio.get_running_loop().run_in_executor(self._texts, act)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    async def events(self, asked: Asked) -> AsyncGenerator[Event]:
        """Yield the events of one answer. Closing the generator, or cancelling its task, ends the answer.

        Raises KvcliError, before the first event if the request cannot be answered at all.
        """
        profile = self.profile_of(asked)
        ids = await self.prompt_of(asked, profile)
        of_answer = profile.changed({"sample": asked.sample}, "the request") if asked.sample else profile
        asked.notes.extend(assemble.idle_samplers(self.model.lm, of_answer))
        constraint = await self._constraint(asked)
        options = {
            "seed": secrets.randbelow(1 << 31) if profile.origins["sample.seed"] == "default" else None,
            **asked.sample,
            "ignore_eos": asked.ignore_eos,
            "messages": asked.messages,
            "constraint": constraint,
            "tools": asked.tools if constraint is None else (),
            "top_logprobs": asked.top_logprobs,
            "prompt_logprobs": asked.prompt_logprobs,
        }
        try:
            async with self.warm.session(ids, profile) as session:
                await asyncio.to_thread(session.read_ahead, ids)
                stream = await self.text_of(partial(session.astream, ids, client=asked.client, **options))
                async with aclosing(self.metrics.watched(f"{self.name}:{profile.name}", stream)) as events:
                    async for event in _calls_of(events, asked):
                        yield event
        except KvcliError:
            raise
        except Exception as error:
            raise self.bug(error) from error

    async def aclose(self) -> None:
        """Free the KV of all requests."""
        await self.warm.aclose()
        self.documents.close()
        for pool in (self._texts, self._grammars):
            pool.shutdown(wait=False, cancel_futures=True)

    def _prompt(self, asked: Asked, profile: Profile) -> list[int]:
        model, tokenizer = self.model, self.model.tokenizer
        if not asked.messages:
            if isinstance(asked.prompt, str):
                refuse_longer(asked.prompt, tokenizer, model.limit)
                return encode(tokenizer, asked.prompt, special=True)
            return list(asked.prompt)
        if wrong := sorted(RESERVED & {*asked.variables}):
            raise BadInput(f"{wrong[0]} is no variable of a chat template", code="not_allowed")
        format, mode = model.thinking_format(), profile.thinking.mode
        variables = {**format.variables(mode), **asked.variables}
        for name, value in format.variables(mode).items():
            if variables[name] != value:
                ways = ["only one of them"]
                said = f"chat_template_kwargs.{name} is {variables[name]}, and thinking {mode} makes it {value}"
                raise BadInput(said, code="bad_field", try_=ways)
        if asked.tools:
            model.call_syntax()  # refuses a template without tools
            variables["tools"] = list(asked.tools)
        refuse_longer("".join(m["content"] for m in asked.messages), tokenizer, model.limit)
        text, layout = lay_out(tokenizer, asked.messages, asked.notes.append, variables)
        ids, source = encode(tokenizer, text, special=not layout.has_template), str(tokenizer.chat_template)
        if asked.thinking_tokens and format.opener(text) is None:
            asked.notes.append("thinking_tokens has no effect: the model does not think before this answer")
        for name in asked.variables:
            if not re.search(rf"\b{re.escape(name)}\b", source):
                asked.notes.append(f"chat_template_kwargs.{name} has no effect: the chat template does not name it")
        if asked.forced and not format.thinks(mode):  # the model's own beginning of a call
            ids += encode(tokenizer, model.call_syntax().start)
        return ids

    async def _constraint(self, asked: Asked) -> Constraint | None:
        """Compile the grammar of a request, beside the event loop and the engine."""
        schema = _call_schema(asked) if asked.forced else asked.schema
        given = asked.grammar if schema is None else json.dumps(schema)
        if given is None:
            return None
        if len(given.encode()) > LONGEST:
            raise BadInput(f"a schema or a grammar has at most {LONGEST:,} bytes", code="grammar_too_large")

        def compiled() -> Constraint:
            grammar = Grammar.of_text(given) if schema is None else Grammar.of_schema(schema, is_compact=True)
            return self.model.constraint(grammar)

        work = self._grammars.submit(compiled)
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(work)), COMPILE_SECONDS)
        except TimeoutError:
            if work.cancel():
                raise Busy("other grammars are still compiled", retry_after=COMPILE_SECONDS) from None
            said = f"the grammar was not ready after {COMPILE_SECONDS:.0f} s"
            raise BadInput(said, code="grammar_too_slow") from None


def served_profiles(first: Profile, others: Iterable[Profile]) -> dict[str, Profile]:
    """Return the profiles, by name, that need no more than the weights in memory: the first one, and those of `others`
    that load alike, with the same draft model and no head map of their own."""

    def needs(profile: Profile) -> tuple[object, ...] | None:
        has_own_map = profile.values.get("policy.headmap") == "auto"
        with suppress(KvcliError):  # it lacks the name of a draft model
            return profile.load, profile.second, has_own_map
        return None

    found = {profile.name: profile for profile in others if needs(profile) == needs(first)}
    return {first.name: first, **{name: profile for name, profile in found.items() if name != first.name}}


NAME, ARGUMENTS = "name", "arguments"  # keys of a forced call


def _call_schema(asked: Asked) -> Mapping[str, Any]:
    """Return the JSON schema of a call of one of the forced functions."""
    functions = [tool["function"] for tool in asked.tools if tool["function"]["name"] in asked.forced]
    # `$id`: references in the parameters are to their own definitions
    given = [{"$id": f"urn:kvcli:{f['name']}", **f.get("parameters", {"type": "object"})} for f in functions]
    fields = [{NAME: {"const": f["name"]}, ARGUMENTS: one} for f, one in zip(functions, given, strict=True)]
    rest = {"type": "object", "required": [NAME, ARGUMENTS], "additionalProperties": False}
    return {"anyOf": [{**rest, "properties": properties} for properties in fields]}


async def _calls_of(events: AsyncGenerator[Event], asked: Asked) -> AsyncGenerator[Event]:
    """Yield the events with the calls that the request allows: a forced call in place of its JSON text."""
    n_calls = 0
    async for event in events:
        if isinstance(event, ToolCall):
            n_calls += 1
        elif isinstance(event, End):
            turn = event.turn
            calls, finish = turn.tool_calls[: asked.most_calls], turn.finish
            if asked.forced and finish == "stop":
                finish = "length"  # of a call that a stop text cut, or with numbers that JSON lacks
                with suppress(ValueError):
                    if is_json(said := json.loads(turn.text)):
                        calls, finish = (ToolCall(secrets.token_hex(5), said[NAME], said[ARGUMENTS]),), "tool_calls"
                for call in calls:
                    yield call
            text = "" if asked.forced else turn.text
            event = End(replace(turn, text=text, finish=finish, tool_calls=calls))
        is_extra = isinstance(event, ToolCall) and n_calls > (asked.most_calls or n_calls)
        if not is_extra and not (asked.forced and isinstance(event, Text)):
            yield event
