"""A model loaded in this process: the Python API that the commands are a skin over.

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
from kvcli.chat.draft_model_loading import load_draft_model
from kvcli.chat.engine_thread import EngineThread
from kvcli.chat.text_session import TextSession
from kvcli.chat.token_kinds import kinds_by_id
from kvcli.chat.window import refuse_longer
from kvcli.engine.info import ModelInfo
from kvcli.errors import BadConfig, KvcliError
from kvcli.kv.out_of_memory import as_cache_full, free_caches
from kvcli.models.tokenizer import load_tokenizer
from kvcli.settings.conflicts import cautions

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvcli.chat.conversation import Chat
    from kvcli.engine.drafting.drafter import Costs, ModelPair
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.constraint import Constraint, Vocabulary
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.methods.steps.step_writer import Writer
    from kvcli.models.grammar import Grammar
    from kvcli.models.source import Source
    from kvcli.prefix_cache.prefix_cache import PrefixCache
    from kvcli.settings.profile import Profile
    from kvcli.settings.schema import DraftModelRef

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
    """Load `demo`, a folder, a GGUF file, a hub id, or files already found; nothing of a user's config is asked.

    A hub id is downloaded only with `offline=False` and a `tell` to say so to. A GGUF file is unpacked below `cache`.
    `find`: by name, the files of a model that drafts; by default found as `model` is. Raises KvcliError subclasses.
    """
    from kvcli.engine.hf import model_settings
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.loading.weights import keeps_quantized
    from kvcli.models import source
    from kvcli.models.catalog import recommended
    from kvcli.models.ends import ends
    from kvcli.models.gguf import convert
    from kvcli.models.hashes import Hashes

    began, wants = time.perf_counter(), profile.load
    named = partial(source.find, offline=offline, tell=tell)
    found = named(model, allow_pickle=wants.allow_pickle) if isinstance(model, str) else model
    packs = keeps_quantized(wants)
    given, found = found, convert.convert_if_needed(found, wants.dtype, cache, packs=packs, tell=tell)
    # first: what is wrong with it shows at once, and its chat template gets ready while the weights are read
    tokenizer = load_tokenizer(found, wants.trust_remote_code)
    lm = LM.load(found, **asdict(wants))  # the table's keys are what a model is loaded by
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
    """Weights, tokenizer and facts, shared by all texts over them, and the profile of those that name none.

    A context manager; closing frees the past of its own text. The weights go with the last who holds them.
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
        """`second`: loads a model that drafts beside this one; None = none can be had."""
        self.lm, self.tokenizer = lm, tokenizer
        self.profile, self._unkept = assemble.adapted_profile(lm, profile)
        self.info: ModelInfo = replace(lm.info, load_seconds=load_seconds or lm.info.load_seconds)
        self.engine = EngineThread()  # of the texts that event loops ask
        self.data: Path | None = None  # the user's folder, where chats are kept; None = nobody said which
        self.costs: Costs | None = None  # what passes take here; None = nobody measured it
        self.time_passes: Callable[[Model], Costs | None] | None = None  # finds out what passes take; set by who may
        self.map_heads: Callable[[Model], Path] | None = None  # its own head map, made at need; set as the one above
        # profile, tokens in memory -> estimated peak and what was available; set by who made an estimate
        self.foretell: Callable[[Profile, int], tuple[int, int]] | None = None
        # profile -> tokens for which memory has room, by that estimate; None = nobody looked
        self.fits: Callable[[Profile], int] | None = None
        # what texts have read, and where they look before they read; set by who has a place for it
        self.shelf: PrefixCache | None = None
        self.texts: WeakSet[TextSession] = WeakSet()  # that are open over these weights, under any profile
        self._second = partial(second, lm) if second is not None else None
        # loaded once while any text drafts with it, and no longer
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
        """Free the keys and values of its own text; one that was opened is closed by who opened it."""
        if "text" in vars(self):
            self.text.close()

    @cached_property
    def text(self) -> TextSession:
        """Its own text, that of `generate`, `stream` and `chat`."""
        return TextSession(self)

    def open(self, profile: str | Profile | None = None, set: Mapping[str, object] | None = None) -> TextSession:
        """Another text over the same weights, with nothing read yet; a context manager.

        `profile` and `set` as of `kvcli.load`; without, under the model's. Refuses a change of `load`, and raises
        DoesNotFit where there is no room for its past.
        """
        chosen = self.profile if profile is None else profile
        if isinstance(chosen, str):  # what it does not say about loading stays as it was loaded
            chosen = type(self.profile).load(chosen)
            loaded, origins = asdict(self.profile.load), chosen.origins
            chosen = chosen.replace(load={key: loaded[key] for key in loaded if origins[f"load.{key}"] == "default"})
        if set:
            chosen = chosen.replace(**set)
        return TextSession(self if chosen is self.profile else self.with_profile(chosen))

    def new_session(self, *, by_steps: bool = False) -> GenerationSession:
        """A session under this profile, with nothing read yet: ids in, ids out, for those who need no words.

        `by_steps`: who asks has `new_writer` write it. Raises BadConfig where the profile wants that and nobody does.
        """
        if self.profile.reasoning_steps.takes and not by_steps:
            raise BadConfig(
                "reasoning_steps works only for answers, not for measuring a text token by token",
                code="only_answers",
                try_=["--set reasoning_steps.method=none"],
            )
        tells = self.profile.policy.compression_interval is not None or bool(self.profile.prune.describe_read)
        kinds = self._kinds() if tells else None
        return assemble.session(self.lm, self.mapped(), self.costs, kinds, self._draft())

    def mapped(self) -> Profile:
        """The profile with the file of the model's own head map, where it asks for that."""
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
        """What writes a session's text by steps, under a profile that wants that."""
        return assemble.steps(self.lm, self.profile, self._draft(), self.tokenizer)

    def _draft(self) -> ModelPair | None:
        """This model with the one that drafts under its profile, loaded when it is first asked for.

        Where loading it runs out of memory or breaks, the profile drafts nothing, and `cautions` say so.
        """
        wanted = self.profile.spec.second or self.profile.reasoning_steps.second
        self._pair = self._pairs.get(wanted) if wanted is not None else None
        if self._pair is not None or wanted is None or self._second is None:
            return self._pair
        try:
            self._pair = self._pairs[wanted] = self._second(wanted)
            self.lm.__dict__.pop("spare", None)  # of which it takes its part
            return self._pair
        except Exception as error:
            if isinstance(error, KvcliError) and as_cache_full(error) is None:
                raise
            said = "out of memory" if as_cache_full(error) else f"{type(error).__name__}: {error}"
            log.warning("%s cannot be loaded", wanted.model, exc_info=error)
        free_caches()
        self.profile = self.profile.replace(spec={"method": "off"}, reasoning_steps={"method": "none"})
        self._unkept = f"no drafting: draft model {wanted.model} cannot be loaded: {said}"
        return None

    @property
    def drafts_by(self) -> str:
        """Name of a model that drafts, and how where that is no matter of course; "" = none does."""
        if (pair := self._draft()) is None:
            return ""
        name = "itself" if pair.draft is self.lm else pair.draft.info.id
        how = [*(["by re-encoding"] if pair.spelling is not None else []), *_elsewhere(pair)]
        return f"{name} ({', '.join(how)})" if how else name

    def prepare(self) -> None:
        """Find out what passes take here, if the profile drafts and nobody has found out yet. Before texts open."""
        if self.costs is None and self.profile.spec.method != "off" and self.time_passes is not None:
            self.costs = self.time_passes(self)

    @property
    def limit(self) -> int:
        """The window in use, tokens: the profile's, at most the model's."""
        asked = self.profile.context.limit
        return self.lm.limit if asked == "auto" else min(int(asked), self.lm.limit)

    @property
    def on_overflow(self) -> str:
        """What becomes of a conversation that is longer than the window."""
        return self.profile.context.on_overflow

    @property
    def cautions(self) -> list[str]:
        """What the user should know of the profile on this device, one line each."""
        spends = assemble.plan(self.lm, self.profile).spending.describe if self.profile.memory.spends else ""
        said = self._unkept, self.profile.prune.describe(self.lm), spends
        return [*filter(None, said), *cautions(self.profile, self.lm.device.type)]

    @property
    def exactness_label(self) -> str:
        """What may be said of the text: "bit-exact", "exact", "exact up to 16-bit rounding", "certified", "approx"."""
        return assemble.promise(self.lm, self.profile)

    def with_profile(self, profile: Profile) -> Model:
        """The same under another profile. Refuses a change of `load`."""
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
        """The same, with nothing refused or measured: for a text that has to go on."""
        changed = copy(self)
        changed.profile, changed._unkept = assemble.adapted_profile(self.lm, profile)
        vars(changed).pop("text", None)
        return changed

    def chat(self, system: str | None = None) -> Chat:
        """A conversation with this model, in its own text."""
        return self.text.chat(system)

    def constraint(self, grammar: Grammar) -> Constraint:
        """What holds answers of this model to a grammar; the first takes a moment, for the vocabulary."""
        return self._vocabulary().constraint(grammar)

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt: text becomes one user message of the chat template, ids stay as they are."""
        if not isinstance(prompt, str):
            return list(prompt)
        from kvcli.models.text import render_prompt

        refuse_longer(prompt, self.tokenizer, self.limit)
        return render_prompt(self.tokenizer, [{"role": "user", "content": prompt}])

    def generate(self, prompt: Prompt, max_new_tokens: int | None = None, **options: Any) -> Turn:
        """One answer in its own text, all at once. Options are those of `TextSession.answer`."""
        return self.text.generate(prompt, max_new_tokens, **options)

    def stream(self, prompt: Prompt, **options: Any) -> Events:
        """The same in events: Live and Read first, then Text as it comes, End last."""
        return self.text.stream(prompt, **options)


def _elsewhere(pair: ModelPair) -> list[str]:
    """Where its weights are, if that is not where the other's are."""
    return [f"on {pair.draft.device}"] if pair.draft.device.type != pair.target.device.type else []


def _vocabulary(tokenizer: PreTrainedTokenizerBase, lm: LM) -> Vocabulary:
    from kvcli.engine.sequence.constraint import Vocabulary  # late: its library is an extra

    return Vocabulary(tokenizer, lm.vocab, lm.stop_ids)


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    return [f"load.{key}: {old[key]} -> {new[key]}" for key in old if old[key] != new[key]]
