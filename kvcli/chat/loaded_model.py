"""A model loaded in this process under a profile: its weights, tokenizer, draft model and facts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet, WeakValueDictionary

from kvcli import assemble
from kvcli.api import Prompt
from kvcli.chat.engine_thread import EngineThread
from kvcli.chat.overflow import refuse_longer
from kvcli.chat.transcript import kinds_by_id
from kvcli.engine.drafting.drafter import Costs, ModelPair
from kvcli.engine.model_info import ModelInfo
from kvcli.errors import BadConfig, KvcliError
from kvcli.kv.out_of_memory import as_cache_full, free_caches
from kvcli.models.thinking import thinking_format
from kvcli.models.tool_calls import call_syntax
from kvcli.settings.conflicts import cautions
from kvcli.settings.schema import METHOD_TABLES, DraftModelRef

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.constraint import Constraint, Vocabulary
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.methods.answer_writer import AnswerWriter
    from kvcli.models.grammar import Grammar
    from kvcli.prefix_cache.prefix_cache import PrefixCache
    from kvcli.settings.profile import Profile

log = logging.getLogger("kvcli.chat")


class LoadedModel:
    """Weights, tokenizer and facts of a model, shared by all its text sessions, with their default profile. The last
    reference frees the weights. `kvcli.chat.model.Model` adds sessions to it."""

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
        self.engine = EngineThread(
            cache(partial(assemble.pool_bytes, lm, self.profile))
        )  # for text sessions used by event loops
        self.data: Path | None = None  # the user's folder of saved chats; None = not set
        self.costs: Costs | None = None  # pass times on this machine; None = not measured
        self.time_passes: Callable[[Any], Costs | None] | None = None  # measures pass times of it; set by the caller
        self.map_heads: Callable[[Any], Path] | None = None  # makes the model's head map; set by the caller
        # profile, tokens in memory -> estimated peak and available memory; set by the caller that made an estimate
        self.foretell: Callable[[Profile, int], tuple[int, int]] | None = None
        # profile -> tokens that fit in memory by that estimate; None = not estimated
        self.fits: Callable[[Profile], int] | None = None
        # prefix cache, where sessions save KV and look for prompt prefixes before prefill; set by the caller
        self.prefix_cache: PrefixCache | None = None
        self.texts: WeakSet[Any] = WeakSet()  # text sessions over these weights, under any profile
        self._second = partial(second, lm) if second is not None else None
        # a draft model is loaded once, and freed when no text session drafts with it
        self._pairs: WeakValueDictionary[DraftModelRef, ModelPair] = WeakValueDictionary()
        self._pair: ModelPair | None = None
        self._draft()
        self._kinds = cache(partial(kinds_by_id, tokenizer, lm.vocab))
        self.thinking_format = cache(partial(thinking_format, tokenizer))
        self.call_syntax = cache(partial(call_syntax, tokenizer, lm.info.id))  # of tool calls; BadModel if it has none
        self._vocabulary = cache(partial(_vocabulary, tokenizer, lm))  # for constraints

    def __repr__(self) -> str:
        info = self.info
        return f"<kvcli.Model {info.id}: {info.dtype} on {info.device}, {self.limit:,} tokens, {self.profile.name}>"

    def new_session(self, *, by_steps: bool = False) -> GenerationSession:
        """Return a generation session with an empty KV cache, for callers that need ids and no text.

        `by_steps`: the caller generates with `new_writer`. Raises BadConfig if the profile needs that and it is False.
        """
        if (table := assemble.writer_table(self.profile)) and not by_steps:
            raise BadConfig(
                f"{table} works only for answers, not for measuring a text token by token",
                code="only_answers",
                try_=[f"--set {table}.method=none"],
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

    def kv_bytes(self, n: int, new: int) -> int:
        """Return the most bytes of KV that a session needs for n tokens, of which `new` are the answer's."""
        return assemble.kv_bytes(self.lm, self.profile, n, new, self._draft())

    def new_writer(self) -> AnswerWriter | None:
        """Return the writer that generates by the method of `[reasoning_steps]` or `[decode]`; None = no method."""
        return assemble.answer_writer(self.profile, self.lm, self._draft(), self.tokenizer)

    def _draft(self) -> ModelPair | None:
        """Return this model paired with the draft model of its profile, loaded at the first call.

        If loading fails or memory runs out, methods that need it are left out, and `cautions` reports it.
        """
        wanted = self.profile.second
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
        none = {f"{of}.{METHOD_TABLES[of].key}": METHOD_TABLES[of].default for of in self.profile.second_models}
        which = " and ".join(f"{key} is {value}" for key, value in none.items())
        why = f"{which}: draft model {wanted.model} cannot be loaded: {said}"
        self.profile = self.profile.changed(none, "the model", why)
        return None

    @property
    def drafts_by(self) -> str:
        """Name of the draft model, with its device and re-encoding if these are unusual; "" = no draft model."""
        if (pair := self._draft()) is None:
            return ""
        name = "itself" if pair.draft is self.lm else pair.draft.info.id
        how = ["by re-encoding"] if pair.spelling is not None else []
        how += [f"on {pair.draft.device}"] if pair.draft.device.type != pair.target.device.type else []
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
    def cautions(self) -> list[str]:
        """Warnings for the user about the profile on this device, one line each."""
        spends = assemble.plan(self.lm, self.profile).spending.describe if self.profile.memory.spends else ""
        said = filter(None, (self.profile.prune.describe(self.lm), spends, self.profile.decode.notice))
        idle = assemble.idle_samplers(self.lm, self.profile)
        return [*self.profile.adaptations, *said, *idle, *cautions(self.profile, self.lm.device.type)]

    @property
    def exactness_label(self) -> str:
        """Exactness of the text: "bit-exact", "exact", "exact up to 16-bit rounding", "certified", "approx"."""
        return assemble.exactness_label(self.lm, self.profile)

    def chosen(self, profile: str | Profile | None, set: Mapping[str, object] | None = None) -> Self:
        """Return this model under a profile or its name, with settings of `set`; None = its own. Refuses a change of
        `load`."""
        chosen = self.profile if profile is None else profile
        if isinstance(chosen, str):  # load settings that the profile does not set keep their values
            chosen = type(self.profile).load(chosen)
            loaded, origins = asdict(self.profile.load), chosen.origins
            chosen = chosen.replace(load={key: loaded[key] for key in loaded if origins[f"load.{key}"] == "default"})
        if set:
            chosen = chosen.replace(**set)
        return self if chosen is self.profile else self.with_profile(chosen)

    def with_profile(self, profile: Profile) -> Self:
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

    def under(self, profile: Profile) -> Self:
        """Return this model under another profile without refusals or measurements, for answers that must continue."""
        changed = copy(self)
        changed.profile = assemble.adapted_profile(self.lm, profile)
        return changed

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Variables of the chat template under this profile. Raises BadConfig if it lacks the mode of thinking."""
        mode = self.profile.thinking.mode
        return {} if mode == "auto" else self.thinking_format().variables(mode)

    def constraint(self, grammar: Grammar) -> Constraint:
        """Return a constraint of answers to a grammar. The first call is slower, because it prepares the vocabulary."""
        return self._vocabulary().constraint(grammar)

    def encode(self, prompt: Prompt, **variables: Any) -> list[int]:
        """Return the ids of a prompt: text becomes one user message of the chat template, ids are unchanged.
        `variables`: of the template."""
        if not isinstance(prompt, str):
            return list(prompt)
        from kvcli.models.text import render_prompt

        refuse_longer(prompt, self.tokenizer, self.limit)
        variables = {**self.template_variables, **variables}
        return render_prompt(self.tokenizer, [{"role": "user", "content": prompt}], **variables)


def _vocabulary(tokenizer: PreTrainedTokenizerBase, lm: LM) -> Vocabulary:
    from kvcli.engine.sequence.constraint import Vocabulary  # late: its library is an optional extra

    return Vocabulary(tokenizer, lm.vocab, lm.stop_ids)


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    return [f"load.{key}: {old[key]} -> {new[key]}" for key in old if old[key] != new[key]]
