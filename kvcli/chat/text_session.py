"""A token sequence with its own KV cache and profile, over the weights of a loaded model; one answer at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from typing import TYPE_CHECKING, Any, ClassVar

from kvcli import assemble
from kvcli.api import Cancel, End, Event, Events, Prompt, Read, Turn, Waiting, turn_of
from kvcli.chat.admission import Claim
from kvcli.chat.loaded_model import LoadedModel
from kvcli.chat.overflow import ContextWindow
from kvcli.chat.scores import refuse_scores, score_prompt
from kvcli.chat.side_by_side import SideBySide
from kvcli.chat.transcript import chat_spans
from kvcli.chat.turn import AnswerSettings, ThinkingLimit, TurnRequest, TurnRun
from kvcli.engine.engine import Engine, iterate_events, release, run_to_end
from kvcli.engine.forward_request import Coroutine, run_until_cancelled
from kvcli.engine.sequence.state import QUESTION, KindSpan
from kvcli.errors import BadInput, BadModel
from kvcli.kv.out_of_memory import CacheFull, Preempted, catch_cache_full
from kvcli.kv.slots import nbytes
from kvcli.models.text import Messages, StopStrings, decode, encode
from kvcli.models.tool_calls import CallReader
from kvcli.prefix_cache.live_prefix import common_prefix, copy_by_layer, shared_prefix
from kvcli.prefix_cache.prefix_cache import SaveResult
from kvcli.settings.schema import ORDER, texts_of

if TYPE_CHECKING:
    from kvcli.chat.document_pack import Pack
    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.schemas.turn import EngineFacts
    from kvcli.settings.profile import Profile


class TextSession:
    """A generation session with tokenizer, profile and KV cache. A context manager, also `async`; closing frees it.

    Prompt tokens in the cache are not prefilled again. One answer runs at a time: a new answer ends the one before it.
    """

    engine: EngineFacts | None = None  # of a session like this one whose model another program runs
    new_engine: ClassVar = Engine  # for answers of several sessions
    n_workers: ClassVar = 1  # processes that run the model

    def __init__(self, model: LoadedModel) -> None:
        self.switch_profile(model)
        self.session = model.new_session(by_steps=True)
        self._run: TurnRun | None = None  # of the last call of `answer`
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

    async def aend(self) -> None:
        """End the running answer, if there is one, as `aclose` does. Its committed KV is kept."""
        if self._answer is not None and getgeneratorstate(self._answer) != GEN_CLOSED:
            await self.model.engine.apart(self._end)

    def close(self) -> None:
        """End the running answer, and free the KV cache. In an event loop, which must not wait for a forward pass,
        both happen after the engine's step."""
        waits = not _is_in_loop()
        self._end(waits=waits)
        self.has_begun = False
        self._run = None  # it refers to this session: in a cycle, KV caches would remain until a garbage collection
        self.session = self.model.new_session(by_steps=True)
        self.model.engine.between_rounds(partial(release, self.session.lm), waits=waits)

    def drop(self) -> None:
        """Free the KV cache between answers. An answer that waits to begin then computes it."""
        run = self._run
        self.close()
        if run is not None:
            self._run, run.session = run, self.session

    def switch_profile(self, model: LoadedModel) -> None:
        """Take another profile over the same weights. The caller changes the generation session to match."""
        self.model, self.profile, self.limit = model, model.profile, model.limit
        self.info, self.tokenizer = model.info, model.tokenizer
        self.thinking_format, self.template_variables = model.thinking_format, model.template_variables
        self.cautions, self.promise, self.foretell = model.cautions, model.exactness_label, model.foretell
        self.writer, self.drafts_by = model.new_writer(), model.drafts_by
        self.on_overflow = model.profile.context.on_overflow

    def _degrade(self, profile: Profile) -> AnswerSettings:
        self.switch_profile(self.model.under(profile))
        return AnswerSettings(self.profile, self.limit, self.writer)

    def fetch(self, ids: Sequence[int]) -> Generator[Waiting]:
        """Load KV of the prompt from the pack, another session and the prefix cache."""
        found = [self.session.committed]
        if self.pack is not None:
            self.pack.fetch(self.session, ids)
        if (source := self.source(ids)) is not None:
            with catch_cache_full():
                yield from self.model.engine.in_turns(self, copy_by_layer(self.session, source.session, ids))
        found.append(self.session.committed)
        if (prefixes := self.model.prefix_cache) is not None and not self.session.condensed:
            with catch_cache_full():  # without room, the prompt is prefilled
                for conditions in (ways := assemble.loadable_conditions(self.profile)):
                    yield from self.model.engine.in_turns(self, prefixes.load_by_layer(self.session, ids, conditions))
                if (reuse := assemble.span_reuse(self.session, self.profile)) is not None and ways[-1].is_intact:
                    reuse.add(prefixes.find_spans(self.session, ids, ways[-1], reuse.min_span))
        found.append(self.session.committed)
        for name, n, before in zip(("warm", "copy", "disk"), found, (0, *found), strict=False):
            self.model.engine.reused[name] += n - before

    def _forget(self, ids: Sequence[int]) -> Generator[Waiting]:
        """Drop the KV of the prompt, which is prefilled again."""
        self.session.rewind(0)
        yield from ()

    def read_ahead(self, ids: Sequence[int]) -> None:
        """Read files of the prefix cache for this prompt, so that the engine does not wait for the disk in a step."""
        if (prefixes := self.model.prefix_cache) is not None:
            for conditions in assemble.loadable_conditions(self.profile):
                prefixes.read_ahead(self.session, ids, conditions)

    def source(self, ids: Sequence[int]) -> TextSession | None:
        """Return the session used by event loops that shares the longest prefix with a prompt and stores KV alike."""
        alike = [one for one in self.model.engine.sessions if one is not self and self.shares_with(one)]
        return max(alike, key=lambda one: shared_prefix(one.session, ids), default=None)

    def shares_with(self, other: TextSession) -> bool:
        """True if both sessions keep the same KV of the same tokens, as computed."""
        (mine, *_), (its, *_) = (assemble.loadable_conditions(one.profile) for one in (self, other))
        types = self.session.cache.dtype, other.session.cache.dtype
        return mine.is_intact and mine.settings == its.settings and types[0] == types[1] and other.pack is None

    def copies_from(self, ids: Sequence[int], other: TextSession, its_ids: Sequence[int]) -> int:
        """Return how many tokens of a prompt this session can copy from `other` once that has prefilled its prompt; 0 =
        too few to wait for."""
        if not self.shares_with(other):
            return 0
        found = [self, source] if (source := self.source(ids)) is not None else [self]
        return common_prefix(ids, its_ids, [one.session for one in found])

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
        return TextSession(self.model.chosen(profile))

    def take_cache(self, other: TextSession) -> bool:
        """Take over the KV cache of `other`, if both profiles fill and store it alike; `other` is then empty."""
        leaves = ("spec", "reasoning_steps", "decode", "sample", "thinking", "context")
        tables = [table for table in ORDER if table not in leaves]  # those that change the KV cache
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

    def generate(self, prompt: Prompt, max_new_tokens: int | None = None, **options: Any) -> Turn:
        """Return one answer. Options are those of `answer`."""
        return turn_of(self.stream(prompt, max_new_tokens=max_new_tokens, **options))

    def stream(self, prompt: Prompt, **options: Any) -> Events:
        """Yield one answer as events: Live and Read first, then Text pieces, End last."""
        return iterate_events(self.answer(prompt, **options))

    def samples(self, prompt: Prompt, n: int, *, seed: int | None = None, **options: Any) -> Iterator[Events]:
        """Yield the events of n answers to one prompt, each with the next seed. They run together, and each is the
        answer of `stream` with its seed. The prompt is read once, by this session; the others are copies of it.
        """
        together, copies, answers, own = SideBySide(Engine()), list[TextSession](), list[Events](), self.profile.sample
        seed, heat = own.seed if seed is None else seed, options.get("temperature", own.temperature)
        if n > 1 and not (self.model.lm.generation.get("temperature") if heat is None else heat):
            raise BadInput(
                f"temperature is 0, so all {n} answers would be the same", code="same_samples", try_=["-t 0.8"]
            )

        def hear(event: Event) -> None:
            if isinstance(event, Read) and event.done == event.total:
                for i in range(1, n):
                    copies.append(TextSession(self.model))
                    copies[-1].session = self.session.fork()
                    answers.append(together.add(copies[-1].answer(prompt, seed=seed + i, **options)))

        try:
            yield together.add(self.answer(prompt, seed=seed, **options), hear)
            while len(answers) < n - 1 and together.step():
                pass
            yield from answers
        finally:
            for copy in copies:
                copy.close()

    def astream(self, prompt: Prompt, *, client: str = "", **options: Any) -> AsyncGenerator[Event]:
        """Yield one answer as events in a coroutine, batched with other sessions of the model used by event loops.

        Passes run in a thread of the model. Leaving the loop by `aclose()`, or cancelling its task, ends the answer.
        The answer waits while other answers use the memory that it needs; `client`: whose turn it is in that queue.
        Raises Busy if the queue is full, and DoesNotFit (`no_room`) if the answer could never fit.
        """
        work, run, memory = self.answer(prompt, **options), self._run, self.profile.memory
        assert run is not None, "an answer has a run"
        can_shrink = "offloads" in self.profile.effects or (memory.on_oom == "degrade" and bool(memory.fallbacks))
        need = self.model.kv_bytes(run.most_tokens, run.most_tokens - len(run.ids))
        return self.model.engine.events(Claim(work, self, run, need, client, can_shrink))

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache and of the KV of the drafter."""
        return sum(nbytes(self.session.stored_kv, self.session.drafter).values())

    @property
    def can_drop(self) -> bool:
        """True if the session is idle, and a prompt that is prefilled again gets the same KV."""
        is_idle = self._answer is None or getgeneratorstate(self._answer) == GEN_CLOSED
        return is_idle and assemble.is_lossless(self.profile)

    def answer(
        self,
        prompt: Prompt,
        *,
        ignore_eos: bool = False,
        stop: str | Sequence[str] | None = None,
        cancel: Cancel | None = None,
        messages: Messages = (),
        constraint: Constraint | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        top_logprobs: int | None = None,
        prompt_logprobs: bool = False,
        **sample: object,
    ) -> Coroutine[Event, Turn]:
        """Return one answer as a coroutine for an engine, alone or with other sequences (`kvcli.generate_together`).

        `sample`: settings of the `[sample]` table for this answer alone, such as `temperature=0.2, seed=7`; None keeps
        the profile's value. `stop`: the one of that table, a text or several. Raises BadConfig for an unknown setting
        or an invalid value. `messages`: the messages that the ids of `prompt` were rendered from, so that a policy can
        tell system text from the rest.
        `constraint`: structured output, as from `model.constraint`; it decides where the answer may end.
        `tools`: function definitions in the prompt, whose calls are returned apart from the text.
        `top_logprobs`: return the log-probability of each token of the answer, and so many most likely tokens, 0 to 20,
        in `Turn.scores` and in the events. `prompt_logprobs`: also those of the prompt, in `Turn.prompt_scores`; the
        whole prompt is then read, without saved KV.
        Raises ContextOverflow before the prefill.
        """
        if constraint is not None and ignore_eos:
            raise BadInput(
                "a constrained answer needs its end, and ignore_eos ignores it",
                code="needs_end",
                try_=["ignore_eos=False"],
            )
        if constraint is not None and tools:
            raise BadInput(
                "a constrained answer cannot call tools", code="constrained_tools", try_=["tools or a constraint"]
            )
        refuse_scores(self.session, self.profile, top_logprobs, prompt_logprobs)
        variables = {"tools": tools} if tools else {}
        model, ids = self.model, self.model.encode(prompt, **variables)
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        if outside := [i for i in ids if not 0 <= i < model.lm.vocab]:
            kind = BadModel if messages else BadInput  # ids of messages come from the tokenizer
            raise kind(f"token {outside[0]} is outside the vocabulary of {model.lm.vocab:,}", code="no_such_token")
        profile = self.profile
        if profile.memory.budget == "fit" and not self.has_begun:
            self._refuse_crowd(profile.memory.sequences)
        sample["stop"] = stop
        if changes := {key: value for key, value in sample.items() if value is not None}:
            profile = profile.changed({"sample": changes}, "options of the answer")
        thinking = self._thinking(ids) if not ignore_eos else None
        if thinking is not None and constraint is not None:
            thinks = self.writer is None and self.thinking_format().thinks(profile.thinking.mode)
            ids += encode(model.tokenizer, thinking.begin) if thinks else []
            thinking = replace(thinking, begin="", is_due=True) if thinks else None
        fits = partial(model.fits, self.profile) if model.fits is not None else None
        window = ContextWindow(self.limit, model.lm.limit, profile.context.reserve, fits)
        asks, kind_spans = bool(self.profile.prune.describe_read) or bool(model.lm.recurrent_layers), list[KindSpan]()
        marks = self.session.marks | ({QUESTION} if asks else set())
        if messages and (asks or self.session.policy is not None or self.on_overflow == "compress"):
            kind_spans = chat_spans(model.tokenizer, messages, ids, marks, **self.template_variables, **variables)
        new = window.room(len(ids), profile.sample.max_new_tokens)
        if thinking is not None:
            room = self.limit - len(ids)  # a long answer is given up for a thought: up to half of the room
            left = max(0, max(room - new, room // 2) - len(thinking.end_ids))
            thinking = replace(thinking, tokens=min(thinking.tokens or left, left))
        asked = TurnRequest(
            ids,
            kind_spans,
            new,
            () if ignore_eos else model.lm.stop_ids,
            StopStrings([*texts_of(profile.sample.stop), *(() if ignore_eos else model.lm.stop_strings)]),
            cancel or (lambda: False),
            assemble.sampler(model.lm, profile),
            top_logprobs,
            0 if ignore_eos else profile.sample.stop_loops,
            constraint,
            thinking,
            CallReader(model.tokenizer, model.call_syntax(), tools) if tools else None,
        )
        self.has_begun = True  # before the prefill, as other sessions check it meanwhile
        run = self._run = TurnRun(
            self.session,
            asked,
            AnswerSettings(self.profile, self.limit, self.writer),
            tokenizer=self.tokenizer,
            load_seconds=self.info.load_seconds,
            fetch=self._forget if prompt_logprobs else self.fetch,
            switch=self._degrade,
            free_memory=partial(model.engine.free_memory, self),
        )
        answer = run.events()
        if prompt_logprobs:
            answer = score_prompt(answer, ids, top_logprobs or 0, lambda: (run.session, run.terms.profile))
        return self._only(answer)

    def _refuse_crowd(self, most: int) -> None:
        """Raise CacheFull if as many sessions as `memory.sequences` allows already share the free memory."""
        n = sum(one.has_begun and one.profile.memory.budget == "fit" for one in self.model.texts)
        if n + 1 > most:
            raise CacheFull(
                f'memory.budget = "fit" divides memory among {most} sequences (memory.sequences), and {n} are open',
                try_=[f"--set memory.sequences={n + 1}", "--set memory.budget=1GiB, each", "close a session"],
            )

    def _thinking(self, prompt: Sequence[int]) -> ThinkingLimit | None:
        """Return the limit of a thought after this prompt; None if the prompt has closed it, or nothing can end it."""
        format, most = self.thinking_format(), self.profile.thinking.max_tokens
        # a token has at least one byte
        begin = format.opener(decode(self.tokenizer, prompt[-len(format.begin.encode()) :])) if format.begin else None
        return None if begin is None else ThinkingLimit(most, begin, format.end, encode(self.tokenizer, format.end))

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
        except Preempted:  # it was closed while it waited
            turn = None
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

    def _end(self, *, waits: bool = True) -> None:
        """End the running answer. Its committed KV is kept."""
        if self._answer is not None:
            self.model.engine.between_rounds(partial(_close, self._answer), waits=waits)


def _is_in_loop() -> bool:
    with suppress(RuntimeError):
        return bool(asyncio.get_running_loop())
    return False


def _close(answer: Coroutine[Event, Turn | None]) -> None:
    if getgeneratorstate(answer) == GEN_RUNNING:  # called by the answer's own `cancel`
        raise BadInput(
            "this session is still generating an answer; close it from outside the event loop of the answer",
            code="interleaved",
            try_=["return True from cancel"],
        )
    answer.close()
