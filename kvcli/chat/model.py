"""A model loaded in this process, its text sessions, and chats: the Python API that the commands are built on.

    import kvcli
    with kvcli.load("demo", profile="ngram", set={"sample.temperature": 0.0}) as model:
        print(model.generate("Hello", max_new_tokens=32).text)
        chat = model.chat(system="Answer briefly.")
        chat.attach(kvcli.read_document("report.md"))
        print(chat.send("What is the depth of well Bethden?").text)

The library never prints and never exits; the commands do.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache, cached_property, partial
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from kvcli import assemble
from kvcli.api import Cancel, End, Event, Events, Finish, Prompt, Read, Text, Thought, Turn, turn_of
from kvcli.chat.engine_thread import EngineThread
from kvcli.chat.overflow import ASKED, KEPT, NOTES, ContextWindow, VisibleMessages, fitting, refuse_longer, shorter
from kvcli.chat.saved_chats import SavedChat, SavedChats
from kvcli.chat.transcript import (
    Message,
    PromptTokens,
    chat_spans,
    documents_of,
    export_chat,
    figures_of,
    first_words,
    kinds_by_id,
    messages_of,
    tokens_of_turn,
)
from kvcli.chat.turn import Terms, TurnRequest, TurnRun
from kvcli.documents import Document
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import iterate_events, release, run_to_end
from kvcli.engine.forward_request import Coroutine, run_until_cancelled
from kvcli.engine.model_info import ModelInfo
from kvcli.engine.sequence.state import QUESTION, KindSpan
from kvcli.errors import BadConfig, BadInput, BadModel, ContextOverflow, DoesNotFit, KvcliError, writing
from kvcli.kv.out_of_memory import CacheFull, as_cache_full, catch_cache_full, free_caches
from kvcli.models.text import Messages, StopStrings, encode, render_text, resume_ids
from kvcli.prefix_cache.prefix_cache import SaveResult
from kvcli.schemas.turn import SCHEMA, ChatDocument, Figures, LeftOut, SavedDocument, SavedMessage
from kvcli.settings.conflicts import cautions
from kvcli.settings.schema import ORDER

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvcli.chat.document_pack import Pack
    from kvcli.engine.drafting.drafter import Costs
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.constraint import Constraint, Vocabulary
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.methods.steps.step_writer import Writer
    from kvcli.models.grammar import Grammar
    from kvcli.prefix_cache.prefix_cache import PrefixCache
    from kvcli.schemas.pack import PackDocument
    from kvcli.settings.profile import Profile
    from kvcli.settings.schema import DraftModelRef

log = logging.getLogger("kvcli.chat")


class Model:
    """Weights, tokenizer and facts of a model, shared by all its text sessions, with their default profile.

    A context manager; closing frees the KV cache of its own text session. The last reference frees the weights.
    """

    def __init__(
        self,
        lm: LM,
        tokenizer: PreTrainedTokenizerBase,
        profile: Profile,
        *,
        load_seconds: float = 0.0,
        second: Callable[[LM, DraftModelRef], ModelPair] | None = None,
    ) -> None:
        """`second`: loads a draft model for this one; None = draft models are not available."""
        self.lm, self.tokenizer = lm, tokenizer
        self.profile = assemble.adapted_profile(lm, profile)
        self.info: ModelInfo = replace(lm.info, load_seconds=load_seconds or lm.info.load_seconds)
        self.engine = EngineThread()  # for text sessions used by event loops
        self.data: Path | None = None  # the user's folder of saved chats; None = not set
        self.costs: Costs | None = None  # pass times on this machine; None = not measured
        self.time_passes: Callable[[Model], Costs | None] | None = None  # measures pass times; set by the caller
        self.map_heads: Callable[[Model], Path] | None = None  # makes the model's head map; set by the caller
        # profile, tokens in memory -> estimated peak and available memory; set by the caller that made an estimate
        self.foretell: Callable[[Profile, int], tuple[int, int]] | None = None
        # profile -> tokens that fit in memory by that estimate; None = not estimated
        self.fits: Callable[[Profile], int] | None = None
        # prefix cache, where sessions save KV and look for prompt prefixes before prefill; set by the caller
        self.prefix_cache: PrefixCache | None = None
        self.texts: WeakSet[TextSession] = WeakSet()  # open over these weights, under any profile
        self._second = partial(second, lm) if second is not None else None
        # a draft model is loaded once, and freed when no text session drafts with it
        self._pairs: WeakValueDictionary[DraftModelRef, ModelPair] = WeakValueDictionary()
        self._pair: ModelPair | None = None
        self._draft()
        self._kinds = cache(partial(kinds_by_id, tokenizer, lm.vocab))
        self._vocabulary = cache(partial(_vocabulary, tokenizer, lm))  # for constraints

    def __repr__(self) -> str:
        info = self.info
        return f"<kvcli.Model {info.id}: {info.dtype} on {info.device}, {self.limit:,} tokens, {self.profile.name}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the KV cache of the model's own text session. Callers of `open` close their sessions themselves."""
        if "text_session" in vars(self):
            self.text_session.close()

    @cached_property
    def text_session(self) -> TextSession:
        """The model's own text session, used by `generate`, `stream` and `chat`."""
        return TextSession(self)

    def open(self, profile: str | Profile | None = None, set: Mapping[str, object] | None = None) -> TextSession:
        """Open another text session over the same weights, with an empty KV cache; a context manager.

        `profile` and `set` are as in `kvcli.load`; default: the model's profile. Refuses a change of `load`, and raises
        DoesNotFit if there is no room for its KV cache.
        """
        chosen = self.profile if profile is None else profile
        if isinstance(chosen, str):  # load settings that the profile does not set keep their values
            chosen = type(self.profile).load(chosen)
            loaded, origins = asdict(self.profile.load), chosen.origins
            chosen = chosen.replace(load={key: loaded[key] for key in loaded if origins[f"load.{key}"] == "default"})
        if set:
            chosen = chosen.replace(**set)
        return TextSession(self if chosen is self.profile else self.with_profile(chosen))

    def new_session(self, *, by_steps: bool = False) -> GenerationSession:
        """Return a generation session with an empty KV cache, for callers that need ids and no text.

        `by_steps`: the caller generates with `new_writer`. Raises BadConfig if the profile needs that and it is False.
        """
        if self.profile.reasoning_steps.takes and not by_steps:
            raise BadConfig(
                "reasoning_steps works only for answers, not for measuring a text token by token",
                code="only_answers",
                try_=["--set reasoning_steps.method=none"],
            )
        tells = bool({"evicts", "prunes"} & self.profile.effects.keys())
        kinds = self._kinds() if tells else None
        return assemble.session(self.lm, self.mapped(), self.costs, kinds, self._draft())

    def mapped(self) -> Profile:
        """Return the profile with `policy.headmap = "auto"` replaced by the model's head map file."""
        if self.profile.values.get("policy.headmap") != "auto":
            return self.profile
        if self.map_heads is None:
            raise BadConfig(
                'policy.headmap = "auto" has no folder for the head map of this model',
                code="no_headmap",
                try_=["set Model.map_heads", "policy.headmap=FILE, of kvcli profile-heads"],
            )
        return self.profile.replace(policy={"headmap": str(self.map_heads(self))})

    def new_writer(self) -> Writer | None:
        """Return the writer that generates by reasoning steps, if the profile asks for it."""
        return assemble.step_writer(self.lm, self.profile, self._draft(), self.tokenizer)

    def _draft(self) -> ModelPair | None:
        """Return this model paired with the draft model of its profile, loaded at the first call.

        If loading fails or memory runs out, the profile stops drafting, and `cautions` reports it.
        """
        wanted = self.profile.spec.second or self.profile.reasoning_steps.second
        self._pair = self._pairs.get(wanted) if wanted is not None else None
        if self._pair is not None or wanted is None or self._second is None:
            return self._pair
        try:
            self._pair = self._pairs[wanted] = self._second(wanted)
            self.lm.free_bytes = None  # the draft model uses some of that memory
            return self._pair
        except Exception as error:
            if isinstance(error, KvcliError) and as_cache_full(error) is None:
                raise
            said = "out of memory" if as_cache_full(error) else f"{type(error).__name__}: {error}"
            log.warning("%s cannot be loaded", wanted.model, exc_info=error)
        free_caches()
        why = f"no drafting: draft model {wanted.model} cannot be loaded: {said}"
        none = {"spec.method": "off", "reasoning_steps.method": "none"}
        self.profile = self.profile.changed(none, "the model", why)
        return None

    @property
    def drafts_by(self) -> str:
        """Name of the draft model, with its device and re-encoding if these are unusual; "" = no draft model."""
        if (pair := self._draft()) is None:
            return ""
        name = "itself" if pair.draft is self.lm else pair.draft.info.id
        how = [*(["by re-encoding"] if pair.spelling is not None else []), *_elsewhere(pair)]
        return f"{name} ({', '.join(how)})" if how else name

    def prepare(self) -> None:
        """Measure pass times if the profile drafts and they are unknown. Call it before text sessions are opened."""
        if self.costs is None and self.profile.spec.method != "off" and self.time_passes is not None:
            self.costs = self.time_passes(self)

    @property
    def limit(self) -> int:
        """Tokens of the context window in use: the profile's, at most the model's."""
        asked = self.profile.context.limit
        return self.lm.limit if asked == "auto" else min(int(asked), self.lm.limit)

    @property
    def on_overflow(self) -> str:
        """Treatment of a chat that is longer than the context window."""
        return self.profile.context.on_overflow

    @property
    def cautions(self) -> list[str]:
        """Warnings for the user about the profile on this device, one line each."""
        spends = assemble.plan(self.lm, self.profile).spending.describe if self.profile.memory.spends else ""
        said = filter(None, (self.profile.prune.describe(self.lm), spends))
        return [*self.profile.adaptations, *said, *cautions(self.profile, self.lm.device.type)]

    @property
    def exactness_label(self) -> str:
        """Exactness of the text: "bit-exact", "exact", "exact up to 16-bit rounding", "certified", "approx"."""
        return assemble.exactness_label(self.lm, self.profile)

    def with_profile(self, profile: Profile) -> Model:
        """Return this model under another profile. Refuses a change of `load`."""
        if profile.load != self.profile.load:
            raise BadConfig(
                "this setting changes how weights are loaded, and they are loaded already",
                code="needs_reload",
                lines=_changes(asdict(self.profile.load), asdict(profile.load)),
                try_=["restart kvcli with --profile or --set"],
            )
        changed = self.under(profile)
        changed._draft()
        changed.prepare()
        return changed

    def under(self, profile: Profile) -> Model:
        """Return this model under another profile without refusals or measurements, for answers that must continue."""
        changed = copy(self)
        changed.profile = assemble.adapted_profile(self.lm, profile)
        vars(changed).pop("text_session", None)
        return changed

    def chat(self, system: str | None = None) -> Chat:
        """Start a chat in the model's own text session."""
        return self.text_session.chat(system)

    def constraint(self, grammar: Grammar) -> Constraint:
        """Return a constraint of answers to a grammar. The first call is slower, because it prepares the vocabulary."""
        return self._vocabulary().constraint(grammar)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt: text becomes one user message of the chat template, ids are unchanged."""
        if not isinstance(prompt, str):
            return list(prompt)
        from kvcli.models.text import render_prompt

        refuse_longer(prompt, self.tokenizer, self.limit)
        return render_prompt(self.tokenizer, [{"role": "user", "content": prompt}])

    def generate(self, prompt: Prompt, max_new_tokens: int | None = None, **options: Any) -> Turn:
        """Return one answer of the model's own text session. Options are those of `TextSession.answer`."""
        return self.text_session.generate(prompt, max_new_tokens, **options)

    def stream(self, prompt: Prompt, **options: Any) -> Events:
        """Yield one answer as events: Live and Read first, then Text pieces, End last."""
        return self.text_session.stream(prompt, **options)


class TextSession:
    """A generation session with tokenizer, profile and KV cache. A context manager, also `async`; closing frees it.

    Prompt tokens in the cache are not prefilled again. One answer runs at a time: a new answer ends the one before it.
    """

    def __init__(self, model: Model) -> None:
        self.switch_profile(model)
        self.session = model.new_session(by_steps=True)
        self._answer: Coroutine[Event, Turn | None] | None = None  # the answer that began last
        self.pack: Pack | None = None  # the pack of the documents that questions are about
        self._has_save_failed = False  # the last save to the prefix cache failed
        self.has_begun = False  # an answer has begun: the session owns a share of memory.budget = "fit"
        model.texts.add(self)

    def __enter__(self) -> TextSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> TextSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close without blocking the event loop while a forward pass ends."""
        await self.model.engine.apart(self.close)

    def close(self) -> None:
        """End the running answer, and free the KV cache."""
        self._end()
        self.has_begun = False
        self.session = self.model.new_session(by_steps=True)
        release(self.session.lm)

    def switch_profile(self, model: Model) -> None:
        """Take another profile over the same weights. The caller changes the generation session to match."""
        self.model, self.profile, self.limit = model, model.profile, model.limit
        self.info, self.tokenizer = model.info, model.tokenizer
        self.cautions, self.promise, self.foretell = model.cautions, model.exactness_label, model.foretell
        self.writer = model.new_writer()
        self.drafts_by = model.drafts_by
        self.on_overflow = model.profile.context.on_overflow

    def _degrade(self, profile: Profile) -> Terms:
        self.switch_profile(self.model.under(profile))
        return Terms(self.profile, self.limit, self.writer)

    def fetch(self, ids: Sequence[int]) -> int:
        """Load KV of the prompt from the pack and the prefix cache; returns how many tokens need no prefill."""
        if self.pack is not None:
            self.pack.fetch(self.session, ids)
        if (prefixes := self.model.prefix_cache) is not None and not self.session.condensed:
            with catch_cache_full():  # without room, the prompt is prefilled
                for conditions in (ways := assemble.loadable_conditions(self.profile)):
                    prefixes.load_prefix(self.session, ids, conditions)
                if (reuse := assemble.span_reuse(self.session, self.profile)) is not None and ways[-1].is_intact:
                    reuse.add(prefixes.find_spans(self.session, ids, ways[-1], reuse.min_span))
        return self.session.committed

    def has_read(self, ids: Sequence[int]) -> bool:
        """True if the KV cache begins with these ids."""
        n, session = len(ids), self.session
        return n <= session.committed and session.ids[:n] == list(ids)

    def is_compressed_prefix(self, ids: Sequence[int]) -> bool:
        """True if these ids are the condensed beginning in this KV cache, which stands for more tokens."""
        return self.session.condensed == len(ids) and self.has_read(ids)

    def can_condense(self, ids: Sequence[int]) -> bool:
        """True if the KV cache begins with these ids and memory has room to score their slots."""
        return self.has_read(ids) and assemble.can_condense(self.session, len(ids))

    def condense(self, end: int, most: int, cancel: Cancel) -> list[int] | None:
        """Condense the first `end` tokens to `most` slots per head; returns the ids that then stand for them. None = it
        is impossible, or `cancel()` returned True."""
        self._end()
        with catch_cache_full():
            if run_to_end(run_until_cancelled(assemble.condense(self.session, end, most), cancel)):
                return self.session.ids[:most]
        return None

    def keep(self, cancel: Cancel = lambda: False) -> SaveResult:
        """Save the KV cache to the prefix cache, if there is one, for later runs. Call it between answers.

        The reason of a failure is returned once, until a save succeeds.
        """
        if self.model.prefix_cache is None or self.session.condensed:  # condensed ids are the prefix of no prompt
            return SaveResult()
        ways = assemble.loadable_conditions(self.profile)
        conditions = ways[0 if "reused" in self.session.approximations else -1]
        result = self.model.prefix_cache.save(self.session, cancel, conditions)
        was, self._has_save_failed = self._has_save_failed, bool(result.why_not)
        return replace(result, why_not="") if was else result

    def idle(self, cancel: Cancel) -> None:
        """Revive deferred tokens between answers, if the profile asks for it, until `cancel()` returns True."""
        with catch_cache_full():  # without room, the next prompt has fewer revived tokens
            run_to_end(run_until_cancelled(self.session.complete(), cancel))

    def why_again(self) -> list[str]:
        """Explain why saved KV of this model cannot be used, if it was computed under other settings; [] otherwise."""
        if (prefixes := self.model.prefix_cache) is None:
            return []
        fields = prefixes.mismatch(self.session, assemble.cache_conditions(self.profile))
        return [f"the saved KV cache cannot be used, because settings differ: {', '.join(fields)}"] if fields else []

    def with_profile(self, profile: Profile) -> TextSession:
        """Open a session with an empty KV cache under another profile. Refuses a change of `load`."""
        return self.model.open(profile)

    def take_cache(self, other: TextSession) -> bool:
        """Take over the KV cache of `other`, if both profiles fill and store it alike; `other` is then empty."""
        leaves = ("spec", "reasoning_steps", "sample", "context")  # tables that do not change the KV cache
        tables = [table for table in ORDER if table not in leaves]
        mine, its = self.profile, other.profile
        if other.model.lm is not self.model.lm or any(getattr(mine, table) != getattr(its, table) for table in tables):
            return False
        if other.session.condensed and (mine.exactness != "approx" or mine.context.on_overflow != "compress"):
            return False
        for text in (self, other):
            text._end()
        self.session.take_over(other.session)
        self.has_begun, other.has_begun = self.has_begun or other.has_begun, False
        return True

    def chat(self, system: str | None = None) -> Chat:
        """Start a chat in this session."""
        return Chat(self, system, saved_chats=SavedChats(self.model.data) if self.model.data else None)

    def generate(self, prompt: Prompt, max_new_tokens: int | None = None, **options: Any) -> Turn:
        """Return one answer. Options are those of `answer`."""
        return turn_of(self.stream(prompt, max_new_tokens=max_new_tokens, **options))

    def stream(self, prompt: Prompt, **options: Any) -> Events:
        """Yield one answer as events: Live and Read first, then Text pieces, End last."""
        return iterate_events(self.answer(prompt, **options))

    def astream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[Event]:
        """Yield one answer as events in a coroutine, batched with other sessions of the model used by event loops.

        Passes run in a thread of the model. Leaving the loop by `aclose()`, or cancelling its task, ends the answer.
        """
        return self.model.engine.events(self.answer(prompt, **options))

    def answer(
        self,
        prompt: Prompt,
        *,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
        cancel: Cancel | None = None,
        messages: Messages = (),
        constraint: Constraint | None = None,
        **sample: object,
    ) -> Coroutine[Event, Turn]:
        """Return one answer as a coroutine for an engine, alone or with other sequences (`kvcli.generate_together`).

        `sample`: settings of the `[sample]` table for this answer alone, such as `temperature=0.2, seed=7`; None keeps
        the profile's value. Raises BadConfig for an unknown setting or an invalid value. `messages`: the messages that
        the ids of `prompt` were rendered from, so that a policy can tell system text from the rest.
        `constraint`: structured output, as from `model.constraint`; it decides where the answer may end.
        Raises ContextOverflow before the prefill.
        """
        if constraint is not None and ignore_eos:
            raise BadInput(
                "a constrained answer needs its end, and ignore_eos ignores it",
                code="needs_end",
                try_=["ignore_eos=False"],
            )
        model, ids = self.model, self.model.encode(prompt)
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        if outside := [i for i in ids if not 0 <= i < model.lm.vocab]:
            kind = BadModel if messages else BadInput  # ids of messages come from the tokenizer
            raise kind(f"token {outside[0]} is outside the vocabulary of {model.lm.vocab:,}", code="no_such_token")
        profile = self.profile
        if profile.memory.budget == "fit" and not self.has_begun:
            self._refuse_crowd(profile.memory.sequences)
        if changes := {key: value for key, value in sample.items() if value is not None}:
            profile = profile.changed({"sample": changes}, "options of the answer")
        fits = partial(model.fits, self.profile) if model.fits is not None else None
        window = ContextWindow(self.limit, model.lm.limit, profile.context.reserve, fits)
        asks, kind_spans = bool(self.profile.prune.describe_read) or bool(model.lm.recurrent_layers), list[KindSpan]()
        marks = self.session.marks | ({QUESTION} if asks else set())
        if messages and (asks or self.session.policy is not None or self.on_overflow == "compress"):
            kind_spans = chat_spans(model.tokenizer, messages, ids, marks)
        asked = TurnRequest(
            ids,
            kind_spans,
            window.room(len(ids), profile.sample.max_new_tokens),
            () if ignore_eos else model.lm.stop_ids,
            StopStrings([*([stop] if isinstance(stop, str) else stop), *(() if ignore_eos else model.lm.stop_strings)]),
            cancel or (lambda: False),
            assemble.sampler(model.lm, profile),
            0 if ignore_eos else profile.sample.stop_loops,
            constraint,
        )
        self.has_begun = True  # before the prefill, as other sessions check it meanwhile
        run = TurnRun(
            self.session,
            asked,
            Terms(self.profile, self.limit, self.writer),
            tokenizer=self.tokenizer,
            load_seconds=self.info.load_seconds,
            fetch=self.fetch,
            switch=self._degrade,
        )
        return self._only(run.events())

    def _refuse_crowd(self, most: int) -> None:
        """Raise CacheFull if as many sessions as `memory.sequences` allows already share the free memory."""
        n = sum(one.has_begun and one.profile.memory.budget == "fit" for one in self.model.texts)
        if n + 1 > most:
            raise CacheFull(
                f'memory.budget = "fit" divides memory among {most} sequences (memory.sequences), and {n} are open',
                try_=[f"--set memory.sequences={n + 1}", "--set memory.budget=1GiB, each", "close a session"],
            )

    def kv_table(self) -> list[dict[str, object]]:
        """Return slots and bytes by layer and tier. The cache view of lookahead rows is one more tier."""
        table = [asdict(use) for use in self.session.stored_kv.usage()]
        return [{key: value for key, value in row.items() if key != "lost"} for row in table]

    def _only(self, answer: Coroutine[Event, Turn | None]) -> Coroutine[Event, Turn]:
        """Run the session's only answer. If another answer begins, this one ends with an error.

        The session stays usable however the answer ends.
        """
        self._end()
        self._answer = answer
        try:
            turn = yield from answer
        except (GeneratorExit, CacheFull):
            raise
        except BaseException:
            self.session.rewind(0)  # the next question starts with an empty KV cache
            raise
        if turn is None:  # it was closed
            raise BadInput("the session was closed or another answer began before this one ended", code="interleaved")
        if self.foretell is not None:
            turn.stats.estimate, turn.stats.available = self.foretell(self.profile, turn.stats.context)
        yield End(turn)
        return turn

    def _end(self) -> None:
        """End the running answer. Its committed KV is kept."""
        if self._answer is not None:
            self.model.engine.between_rounds(partial(_close, self._answer))


PROBES = ("a", "7", "(", "\n")  # questions whose first letter merges, or does not, with the token before it


@dataclass(frozen=True, slots=True)
class Rendered:
    """Messages rendered by the chat template, as text and as token ids."""

    contents: Messages
    text: str
    ids: list[int]
    has_template: bool


class Chat:
    """A chat: questions and answers in turn. The last message is always an answer."""

    def __init__(
        self,
        text_session: TextSession,
        system: str | None = None,
        *,
        title: str | None = None,
        saved_chats: SavedChats | None = None,
        is_locked: bool = False,
        called: str = "",
    ) -> None:
        """`saved_chats`: the saved chats that `save` adds to; None = saving is refused.
        `is_locked`: lock the saved chat against other processes until `close`. `called`: the name of the model that is
        saved with the chat, if not its id.
        """
        self.text_session = text_session
        self.system = system
        self.title = title
        self._saved_chats = saved_chats
        self.is_locked = is_locked
        self.called = called
        self.saved_chat: SavedChat | None = None  # the saved chat that it was saved as or loaded from
        self.messages: list[Message] = []
        self.pending: list[Document] = []  # attached to the next question
        self.visible_messages = VisibleMessages()  # the messages that the model is shown
        self.notes: list[str] = []  # notes for the user on how the prompt was made, each once
        self.tell: Callable[[str], None] = lambda _: None  # called with each of these notes, during a question
        self._retries = 0
        self.prompt_tokens = PromptTokens()

    @property
    def saved_chats(self) -> SavedChats:
        """Saved chats of the user. Raises BadInput if the chat was made without them."""
        if self._saved_chats is None:
            ways = ["Chat(..., saved_chats=...)"]
            raise BadInput("this chat has no folder for saved chats", code="no_place", try_=ways)
        return self._saved_chats

    # --- asking

    def send(self, text: str, **options: Any) -> Turn:
        """Ask, and return the whole answer. Options are those of `stream`."""
        return turn_of(self.stream(text, **options))

    def stream(self, text: str, **options: Any) -> Generator[Event]:
        """Ask, and yield the answer as events, `End` last. Options are those of `TextSession.answer` but `messages`.

        A chat longer than the context window is refused or shown in part, see `context.on_overflow` (overflow.py). An
        answer that fails leaves the chat unchanged. An answer that is cut short (by `cancel`, Ctrl-C, lack of memory or
        closing the iterator) is added as "interrupted"; if it has no text yet, the chat is unchanged.
        """
        if not text.strip():
            raise BadInput("the question is empty", code="empty_prompt")
        question = Message("user", text, tuple(self.pending))
        if self.text_session.on_overflow != "compress":
            refuse_longer(question.content, self.text_session.tokenizer, self.text_session.limit)
        asked = self.rendered([*self.messages, question])
        said: list[str] = []
        has_begun = ended = False
        try:
            events = self.text_session.stream(asked.ids, messages=asked.contents, **options)
            for event in events:
                has_begun = True
                if isinstance(event, Text):
                    said.append(event.text)
                elif isinstance(event, End):
                    ended = True
                    turn = event.turn
                    self._keep(question, turn.text, turn.finish, figures_of(turn.stats), turn.thinking)
                    text_, ids = tokens_of_turn(self.text_session.tokenizer, asked.text, asked.ids, turn)
                    now = PromptTokens(text_, ids) if text_ else PromptTokens(asked.text, asked.ids)
                    self.prompt_tokens = now.after(self.prompt_tokens, asked.text, len(asked.ids))
                yield event
        except ContextOverflow as error:
            shown, n = self.visible_messages, len(self.messages)
            if has_begun or not (yield from self._leave_out(question, error.detail, options)):
                name, tokenizer = self.called or self.text_session.info.id, self.text_session.tokenizer
                error.try_ = (*fitting(question.documents, error.detail, tokenizer, name), *error.try_)
                raise
            try:
                yield from self.stream(text, **options)
            finally:
                if len(self.messages) == n:  # no answer was added
                    self.visible_messages = shown
        except (KeyboardInterrupt, GeneratorExit, DoesNotFit):
            if not ended:
                self._keep(question, "".join(said), "interrupted")
            raise

    def retry(self, **options: Any) -> Generator[Event]:
        """Replace the last answer by a new one. The seed changes, so that a sampled answer differs."""
        self._retries += 1
        seed = self.text_session.profile.sample.seed + self._retries
        return self.edit(self.last_question, **{"seed": seed, **options})

    def edit(self, text: str, **options: Any) -> Generator[Event]:
        """Ask `text` in place of the last question, with the same documents. A failure leaves the chat unchanged."""
        before, waiting = list(self.messages), self.pending
        self.visible_messages = VisibleMessages()
        *_, question, _ = self.messages[-2:] or self._nothing("edit")
        del self.messages[-2:]
        self.pending = list(question.documents)
        kept = len(self.messages)
        try:
            yield from self.stream(text, **options)
        finally:
            self.pending = waiting
            if len(self.messages) == kept:
                self.messages = before

    @property
    def last_question(self) -> str:
        return (self.messages[-2:] or self._nothing("retry"))[0].text

    # --- changing

    def attach(self, document: Document) -> None:
        """Attach a document to the next question."""
        self.pending.append(document)

    @property
    def documents(self) -> list[Document]:
        """All documents in the order of the prompt, those of the next question last."""
        return [d for m in self.messages for d in m.documents] + self.pending

    def place(self, document: Document) -> int | None:
        """Return the index in `documents` of a document with the same text; None if there is none."""
        same = [i for i, d in enumerate(self.documents) if (d.sha256, d.text) == (document.sha256, document.text)]
        return same[0] if same else None

    def drop(self, i: int) -> Document:
        """Remove document `i`, an index of `documents`, from the chat. Tokens after it are prefilled again."""
        if not 0 <= i < len(self.documents):
            have = f"{len(self.documents)} attached" if self.documents else "none is attached"
            raise BadInput(f"document {i + 1} does not exist: {have}", code="no_such_document")
        self.visible_messages = VisibleMessages()
        dropped = self.documents[i]
        for at, message in enumerate(self.messages):
            if i < len(message.documents):
                rest = message.documents[:i] + message.documents[i + 1 :]
                self.messages[at] = replace(message, documents=rest)
                return dropped
            i -= len(message.documents)
        del self.pending[i]
        return dropped

    def undo(self, n: int = 1) -> int:
        """Remove the last `n` questions with their answers and documents; returns how many were removed."""
        n = max(0, min(n, len(self.messages) // 2))
        if n:
            del self.messages[-2 * n :]
            self.visible_messages = VisibleMessages()
        return n

    def clear(self) -> None:
        """Remove all messages and documents, but keep the system text."""
        self.messages.clear()
        self.pending.clear()
        self.visible_messages, self.title = VisibleMessages(), None
        self.close()

    # --- inspecting

    def begins(self) -> tuple[list[int], Messages]:
        """Return the ids that all prompts with the attached documents begin with, and messages of one prompt."""
        asked = [self.rendered([*self.messages, Message("user", text, tuple(self.pending))]) for text in PROBES]
        prompts = zip(*(one.ids for one in asked), strict=False)
        return [ids[0] for ids in takewhile(lambda each: len(set(each)) == 1, prompts)], asked[0].contents

    def tokens(self) -> list[tuple[str, int]]:
        """Return token counts by message and document, then of the chat template and of a condensed beginning."""
        tokenizer = self.text_session.tokenizer
        rows: list[tuple[str, int]] = []
        if self.system:
            rows.append(("system", len(encode(tokenizer, self.system))))
        if self.visible_messages.left:
            rows.append((f"questions 1 to {self.visible_messages.left // 2}, not sent", 0))
        for i, message in enumerate(self.visible_messages.of(self.messages), self.visible_messages.left):
            rows += [(f"file {d.name}", d.tokens(tokenizer)) for d in message.documents]
            label = f"{'question' if message.role == 'user' else 'answer'} {i // 2 + 1}"
            rows.append((label, len(encode(tokenizer, message.text))))
        rows += [(f"file {d.name}, next question", d.tokens(tokenizer)) for d in self.pending]
        if self.messages:
            pending = sum(d.tokens(tokenizer) for d in self.pending)
            asked = self.rendered(self.messages)
            whole = len(resume_ids(tokenizer, asked.text, ("", ()), special=not asked.has_template))
            rows.append(("template", whole - (sum(n for _, n in rows) - pending)))
            if self.prompt_tokens.begins.ids:
                rows.append(("compressed start of the chat", len(asked.ids) - whole))
        return rows

    # --- saving

    @property
    def is_saved(self) -> bool:
        """True if the chat is saved. A chat opened from a file is not, until it is saved."""
        return self.saved_chat is not None and self.saved_chat.version > 0

    @property
    def goes_on(self) -> str:
        """Return the option of `kvcli chat` that continues the chat once it is saved."""
        name = self.saved_chat.name if self.saved_chat is not None else ""
        return "-c" if self.saved_chats.find(None) == name else f"-r {name}"

    def save(self, title: str | None = None) -> str:
        """Save the chat, the first time as a new saved chat, and return its name. An unchanged chat is not written."""
        self.title = title or self.title or first_words(self.messages)
        made, saved_chat = self.document(), self.saved_chat
        if self.is_saved and saved_chat and made == saved_chat.saved.model_copy(update={"saved": made.saved}):
            return saved_chat.name
        saved_chat = saved_chat or self.saved_chats.begin(is_locked=self.is_locked)
        try:
            self.saved_chats.write(saved_chat, made)
            self.saved_chat = saved_chat
        finally:
            if self.saved_chat is None:
                saved_chat.close()
        return saved_chat.name

    def document(self) -> ChatDocument:
        """Return the chat as a document that can be continued later, with its attached documents."""
        left, notes = self.visible_messages.left, self.visible_messages.notes
        return ChatDocument(
            schema=SCHEMA,
            title=self.title,
            model=self.called or self.text_session.info.id,
            saved=datetime.now().astimezone().isoformat(timespec="seconds"),
            system=self.system,
            messages=[
                SavedMessage.from_attributes(m, documents=[SavedDocument.from_attributes(d) for d in m.documents])
                for m in self.messages
            ],
            pending=[SavedDocument.from_attributes(d) for d in self.pending],
            left_out=LeftOut(messages=left, notes=notes) if left else None,
        )

    def load(self, name: str | Path) -> Chat:
        """Become a saved chat, found by its name or words of its title, or the chat in a JSON file. The next question
        prefills the tokens that are not in the prefix cache."""
        return self.take(self.saved_chats.open(str(name), is_locked=self.is_locked))

    def take(self, opened: SavedChat) -> Chat:
        """Become the opened chat."""
        self.close()
        self.saved_chat, saved = opened, opened.saved
        self.system, self.title = saved.system, saved.title
        self.messages, self.pending = messages_of(saved), list(documents_of(saved.pending))
        self.visible_messages = self._shown_of(saved.left_out)
        return self

    def go_to(self, text_session: TextSession, called: str) -> None:
        """Continue in another text session, perhaps of another model, and close the present one."""
        before, self.text_session, self.called = self.text_session, text_session, called
        # the other model may have another tokenizer and another context window
        self.prompt_tokens, self.visible_messages = PromptTokens(), VisibleMessages()
        before.close()

    def close(self) -> None:
        """Release the saved chat for other processes. The next `save` makes a new saved chat."""
        if self.saved_chat is not None:
            self.saved_chat.close()
        self.saved_chat = None

    def export(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the chat to a .md, .json or .jsonl file."""
        return export_chat(self.document(), Path(path), overwrite=overwrite)

    def pack(self, folder: Path, on_read: Callable[[Read], None] = lambda _: None) -> PackDocument:
        """Prefill the attached documents, and save them with their KV cache in `folder`.

        `on_read` receives the progress of the prefill. The folder gets its name once it is complete. Raises BadInput
        for documents so short that a pack saves no time.
        """
        from kvcli.chat.document_pack import write_pack
        from kvcli.prefix_cache.prefix_cache import FEW, cache_key

        session = self.text_session
        (ids, contents), made_by = self.begins(), cache_key(session.model.lm)
        if len(ids) < FEW:
            raise BadInput(
                "these documents are too short for a pack",
                code="too_short",
                lines=[f"they have {len(ids):,} tokens"],
                try_=["kvcli chat -f FILE"],
            )
        on_read(Read(0, len(ids), 0, 0.0))
        # one token is generated, because that pass commits the last prompt token
        for event in session.stream(ids, messages=contents, max_new_tokens=1, ignore_eos=True):
            if isinstance(event, Read):
                on_read(event)
        assert session.session.ids[: session.session.committed] == ids, "something else was read"
        with writing(folder.name, try_=["-o NAME.kvs in another folder"]):
            return write_pack(folder, self.document(), session.session, session.profile, session.promise, made_by)

    # --- internals

    def _keep(
        self, question: Message, answer: str, finish: Finish, took: Figures | None = None, thinking: str = ""
    ) -> None:
        if finish == "interrupted" and not answer:
            return
        self.messages += [question, Message("assistant", answer, finish=finish, figures=took, thinking=thinking)]
        self.pending = [d for d in self.pending if not any(d is used for used in question.documents)]

    def _shown_of(self, saved: LeftOut | None) -> VisibleMessages:
        """Return the part of the chat that the model was shown; the whole chat if it now fits the context window."""
        if saved is None:
            return VisibleMessages()
        if self.messages and len(self.rendered(self.messages, VisibleMessages()).ids) <= KEPT * self.text_session.limit:
            return VisibleMessages()
        kept = "it has its notes on them" if saved.notes else "it does not know them"
        self.note(f"the chat exceeds the context window; questions 1–{saved.messages // 2} are not sent; {kept}")
        return VisibleMessages(saved.messages, saved.notes)

    def _leave_out(
        self, question: Message, detail: dict[str, Any], options: dict[str, Any]
    ) -> Generator[Event, None, bool]:
        """Show the model less of the chat from here on; False if that cannot make the prompt fit.

        `detail`: of the ContextOverflow error, with the lengths. `options`: the options of the question.
        """
        session = self.text_session
        if (how := session.on_overflow) == "error":
            return False
        asked = [*self.messages, question]
        cancel: Cancel = options.get("cancel") or (lambda: False)
        if how == "compress":
            before, condense = self.prompt_tokens, partial(session.condense, cancel=cancel)
            now = before.condensed(self.rendered(asked).text, detail, session.can_condense, condense)
            if now is not None:
                n, fewer = now.begins.ids, len(before.ids) - len(now.ids)
                self.prompt_tokens = now
                self.note(
                    f"the chat exceeds the context window; {n + fewer:,} tokens shrink to {n:,}; facts may be lost"
                )
                return True
        of_notes = int(detail["limit"] * NOTES) if how == "summarize" else 0
        room = detail["limit"] - detail["reserve"] - of_notes
        shown = shorter(
            self.visible_messages, len(self.messages), lambda shown: len(self.rendered(asked, shown).ids), room
        )
        if shown is None:
            return False
        notes = (yield from self._write_notes(shown.left, of_notes, options)) if of_notes else ""
        self.visible_messages = replace(shown, notes=notes)
        kept = "it wrote notes on them" if notes else "it does not know them any more"
        if how == "compress":
            kept += ", because their KV cache could not be compressed"
        if not cancel():  # after a cancel nothing is answered or changed
            self.note(f"the chat exceeds the context window; questions 1–{shown.left // 2} are not sent; {kept}")
        return True

    def _write_notes(self, left: int, n: int, options: dict[str, Any]) -> Generator[Event, None, str]:
        """Generate notes of at most n tokens on the first `left` messages. Their KV in the cache is reused."""
        asked = self.rendered([*self.messages[:left], Message("user", ASKED)])
        own = {"max_new_tokens": n, "cancel": options.get("cancel")}
        with suppress(ContextOverflow):  # the messages left out fill the window alone
            for event in self.text_session.stream(asked.ids, messages=asked.contents, **own):
                if isinstance(event, End):
                    return "" if event.turn.finish == "interrupted" else event.turn.text.strip()
                if not isinstance(event, Text | Thought):
                    yield event
        return ""

    def rendered(self, messages: Sequence[Message], shown: VisibleMessages | None = None) -> Rendered:
        """Render messages that end with a question. `shown`: the part to show, if not the present one."""
        contents: list[dict[str, str]] = [{"role": "system", "content": self.system}] if self.system else []
        contents += [{"role": m.role, "content": m.content} for m in (shown or self.visible_messages).of(messages)]
        tokenizer = self.text_session.tokenizer
        text, has_template = render_text(tokenizer, contents, note=self.note)
        known = self.prompt_tokens.of(text, self.text_session.is_compressed_prefix)
        ids = resume_ids(tokenizer, text, known, special=not has_template)
        return Rendered(contents, text, ids, has_template)

    def note(self, note: str) -> None:
        """Add a note for the user, once."""
        if note not in self.notes:
            self.notes.append(note)
            self.tell(note)

    def _nothing(self, what: str) -> list[Message]:
        raise BadInput(f"there is no question to {what}", code="no_question")


def _elsewhere(pair: ModelPair) -> list[str]:
    """Return the device of the draft model, if it is not the target's."""
    return [f"on {pair.draft.device}"] if pair.draft.device.type != pair.target.device.type else []


def _vocabulary(tokenizer: PreTrainedTokenizerBase, lm: LM) -> Vocabulary:
    from kvcli.engine.sequence.constraint import Vocabulary  # late: its library is an optional extra

    return Vocabulary(tokenizer, lm.vocab, lm.stop_ids)


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    return [f"load.{key}: {old[key]} -> {new[key]}" for key in old if old[key] != new[key]]


def _close(answer: Coroutine[Event, Turn | None]) -> None:
    if getgeneratorstate(answer) == GEN_RUNNING:  # called by the answer's own `cancel`
        raise BadInput(
            "this session is still generating an answer; close it from outside the event loop of the answer",
            code="interleaved",
            try_=["return True from cancel"],
        )
    answer.close()
