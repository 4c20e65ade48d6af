"""A model loaded in this process: the Python API that the commands are built on.

    import kvcli
    with kvcli.load("demo", profile="ngram", set={"sample.temperature": 0.0}) as model:
        print(model.generate("Hello", max_new_tokens=32).text)

The library never prints and never exits; the commands do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from kvcli import assemble
from kvcli.api import Events, Prompt, Turn
from kvcli.chat.engine_thread import EngineThread
from kvcli.chat.overflow import refuse_longer
from kvcli.chat.text_session import TextSession
from kvcli.chat.transcript import kinds_by_id
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.model_info import ModelInfo
from kvcli.errors import BadConfig, BadModel, KvcliError
from kvcli.kv.out_of_memory import as_cache_full, free_caches
from kvcli.models.refusals import is_assistant
from kvcli.models.retokenizer import spelling
from kvcli.models.tokenizer import load_tokenizer
from kvcli.settings.conflicts import cautions

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvcli.chat.conversation import Chat
    from kvcli.engine.drafting.drafter import Costs
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.constraint import Constraint, Vocabulary
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.methods.steps.step_writer import Writer
    from kvcli.models.grammar import Grammar
    from kvcli.models.source import Source
    from kvcli.prefix_cache.prefix_cache import PrefixCache
    from kvcli.settings.profile import Profile
    from kvcli.settings.schema import DraftModelRef, Load

# Loading of a draft model: found by name, and paired with the target model by the tokens that both know.


Tell = Callable[[str], None]


def load_draft_model(
    target: LM,
    wanted: DraftModelRef,
    words: PreTrainedTokenizerBase,
    load: Load,
    find: Callable[[str], Source],
    cache: Path,
    tell: Tell | None = None,
) -> ModelPair:
    """Load a draft model beside `target`, whose tokenizer is `words` and whose settings are `load`.

    A model that drafts for itself is loaded once. Raises BadModel if the model cannot draft. Its code and pickle files
    are never trusted, even if those of the target are, because a profile may name the draft model.
    """
    from kvcli.engine.drafting.gemma4_assistant import load_assistant
    from kvcli.engine.loading.open_lm import open_lm
    from kvcli.engine.loading.weights import keeps_quantized
    from kvcli.models.gguf import convert

    untrusted = replace(load, quant=wanted.quant, allow_pickle=False, trust_remote_code=False)
    wants = replace(untrusted, layers_on_gpu="auto")  # the user's choice counts layers of the target
    found = convert.convert_if_needed(find(wanted.model), wants.dtype, cache, packs=keeps_quantized(wants), tell=tell)
    if is_assistant(found.config) != wanted.is_assistant:
        raise _of_another_method(wanted)
    if untrusted == load and (str(found.path), found.revision) == (target.info.path, target.info.revision):
        return ModelPair(target, target)
    if wanted.is_assistant:
        return ModelPair(target, load_assistant(target, found, wants))
    respelled = spelling(words, load_tokenizer(found, wants.trust_remote_code))
    return ModelPair(target, open_lm(found, **asdict(wants)), respelled)


def _of_another_method(wanted: DraftModelRef) -> BadModel:
    what, other = ("no assistant of a Gemma 4", "model") if wanted.is_assistant else ("an assistant", "assistant")
    return BadModel(
        f"{wanted.model} is {what}",
        code="draft_head",
        lines=["a complete model drafts with spec.method = model, an assistant with spec.method = assistant"],
        try_=[f"--set spec.method={other} --set spec.model={wanted.model}, instead of --draft", "--spec ngram"],
    )


log = logging.getLogger("kvcli.chat")


def load(
    model: str | Source,
    profile: Profile,
    *,
    cache: Path,
    find: Callable[[str], Source] | None = None,
    offline: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Model:
    """Load `demo`, a folder, a GGUF file, a hub id, or files already found; config files of the user are not read.

    A hub id is downloaded only with `offline=False` and a `tell` for messages. A GGUF file is converted below `cache`.
    `find`: finds the files of a draft model by name; default: as for `model`. Raises KvcliError subclasses.
    """
    from kvcli.engine.hf import model_settings
    from kvcli.engine.loading.open_lm import open_lm
    from kvcli.engine.loading.weights import keeps_quantized
    from kvcli.models import source
    from kvcli.models.catalog import Hashes, recommended
    from kvcli.models.channels import ends
    from kvcli.models.gguf import convert

    began, wants = time.perf_counter(), profile.load
    named = partial(source.find, offline=offline, tell=tell)
    found = named(model, allow_pickle=wants.allow_pickle) if isinstance(model, str) else model
    packs = keeps_quantized(wants)
    given, found = found, convert.convert_if_needed(found, wants.dtype, cache, packs=packs, tell=tell)
    # first: its errors show at once, and its chat template is compiled while the weights are loaded
    tokenizer = load_tokenizer(found, wants.trust_remote_code)
    lm = open_lm(found, **asdict(wants))  # the keys of [load] are the parameters
    ids, strings = ends(tokenizer, lm.vocab)
    lm.stop_ids, lm.stop_strings = lm.stop_ids | ids, (*lm.stop_strings, *strings)
    lm.hashes = Hashes(cache, tell)
    told, usual = convert.conversion_notes(given, packs, lm.info.dtype), recommended(given.text_config, given.id)
    if lm.generation != (sampling := model_settings.generation_defaults(lm.model, lm.info.id, usual)):
        told += (f"the model has no sampling settings; kvcli uses {', '.join(f'{k} {v:g}' for k, v in usual.items())}",)
    notes = lm.info.notes
    if not given.is_gguf and any(given.path.glob("adapter_*")):
        notes = (*notes, "the model folder has an adapter, which is not applied; merge it into the weights first")
    lm.generation, lm.info = sampling, replace(lm.info, details=told, notes=notes)
    find = find or partial(named, may_assist=True)
    second = partial(load_draft_model, words=tokenizer, load=wants, find=find, cache=cache, tell=tell)
    return Model(lm, tokenizer, profile, load_seconds=time.perf_counter() - began, second=second)


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


def _elsewhere(pair: ModelPair) -> list[str]:
    """Return the device of the draft model, if it is not the target's."""
    return [f"on {pair.draft.device}"] if pair.draft.device.type != pair.target.device.type else []


def _vocabulary(tokenizer: PreTrainedTokenizerBase, lm: LM) -> Vocabulary:
    from kvcli.engine.sequence.constraint import Vocabulary  # late: its library is an optional extra

    return Vocabulary(tokenizer, lm.vocab, lm.stop_ids)


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    return [f"load.{key}: {old[key]} -> {new[key]}" for key in old if old[key] != new[key]]
