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

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Self

from kvcli.api import Events, Prompt, Turn
from kvcli.chat.conversation import Chat
from kvcli.chat.loaded_model import LoadedModel
from kvcli.chat.text_session import TextSession
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.errors import BadModel
from kvcli.models.refusals import head_method, refuse_across_ranks
from kvcli.models.retokenizer import spelling
from kvcli.models.text import tokens_with
from kvcli.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvcli.chat.shared_weights import SharedWeights
    from kvcli.engine.hf.lm import LM
    from kvcli.models.source import Source
    from kvcli.settings.profile import Profile
    from kvcli.settings.schema import DraftModelRef, Load


class Model(LoadedModel):
    """A loaded model with text sessions and chats over its weights.

    A context manager; closing frees the KV cache of its own text session. The last reference frees the weights.
    """

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
        return TextSession(self.chosen(profile, set))

    def under(self, profile: Profile) -> Self:
        changed = super().under(profile)
        vars(changed).pop("text_session", None)
        return changed

    def chat(self, system: str | None = None) -> Chat:
        """Start a chat in the model's own text session."""
        return Chat(self.text_session, system)

    def generate(self, prompt: Prompt, max_new_tokens: int | None = None, **options: Any) -> Turn:
        """Return one answer of the model's own text session. Options are those of `TextSession.answer`."""
        return self.text_session.generate(prompt, max_new_tokens, **options)

    def stream(self, prompt: Prompt, **options: Any) -> Events:
        """Yield one answer as events: Live and Read first, then Text pieces, End last."""
        return self.text_session.stream(prompt, **options)


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
    from kvcli.engine.loading.open_lm import open_lm
    from kvcli.engine.loading.weights import keeps_quantized
    from kvcli.models.gguf import convert

    untrusted = replace(load, quant=wanted.quant, adapters=(), allow_pickle=False, trust_remote_code=False)
    fit = {key: getattr(type(load), key) for key in ("layers_on_gpu", "experts_on_gpu", "embeddings", "head")}
    wants = replace(untrusted, **fit)  # chosen to fit the target
    given = find(wanted.model)
    found = convert.convert_if_needed(given, wants.dtype, cache, keeps_on=keeps_quantized(wants, given), tell=tell)
    if (kind := head_method(found.config)) != wanted.head:
        what = {"": "a complete model", "eagle3": "an EAGLE-3 head"}.get(kind, "an assistant")
        kind = kind or "model"
        raise BadModel(
            f"{wanted.model} is {what}, which drafts with spec.method = {kind}",
            code="draft_head",
            try_=[f"--set spec.method={kind} --set spec.model={wanted.model}, instead of --draft", "--spec ngram"],
        )
    if untrusted == load and (str(found.path), found.revision) == (target.info.path, target.info.revision):
        return ModelPair(target, target)
    if wanted.load is not None:
        return ModelPair(target, wanted.load(target, found, wants))
    respelled = spelling(words, load_tokenizer(found, wants.trust_remote_code))
    return ModelPair(target, open_lm(found, **asdict(wants)), respelled)


def load(
    model: str | Source,
    profile: Profile,
    *,
    cache: Path,
    find: Callable[[str], Source] | None = None,
    offline: bool = False,
    tell: Callable[[str], None] | None = None,
    shared: SharedWeights | None = None,
) -> Model:
    """Load `demo`, a folder, a GGUF file, a hub id, or files already found; config files of the user are not read.

    A hub id is downloaded only with `offline=False` and a `tell` for messages. A GGUF file is converted below `cache`.
    `find`: finds the files of a draft model by name; default: as for `model`. `shared`: weights that are used if they
    are of the same files. Raises KvcliError subclasses.
    """
    from kvcli.chat.shared_weights import open_model
    from kvcli.engine.loading.weights import keeps_quantized
    from kvcli.engine.ranks import n_ranks
    from kvcli.models import source
    from kvcli.models.catalog import Hashes, recommended
    from kvcli.models.gguf import convert
    from kvcli.models.sampling import generation_defaults

    began, wants = time.perf_counter(), profile.load
    named = partial(source.find, offline=offline, tell=tell)
    found = named(model, allow_pickle=wants.allow_pickle) if isinstance(model, str) else model
    if n_ranks() > 1:
        refuse_across_ranks(found.id, **{"a GGUF file": found.is_gguf})
    keeps_on = keeps_quantized(wants, found)
    given, found = found, convert.convert_if_needed(found, wants.dtype, cache, keeps_on=keeps_on, tell=tell)
    can_take = shared is not None and shared.matches(found, wants)
    tokenizer, lm = shared.take(wants) if shared is not None and can_take else open_model(found, wants)
    lm.tokens_with = lru_cache(partial(tokens_with, tokenizer, lm.vocab))
    lm.hashes = Hashes(cache, tell)
    told = convert.conversion_notes(given, lm.info.dtype, keeps_on=keeps_on)
    usual = recommended(given.text_config, given.id)
    if lm.generation != (
        sampling := generation_defaults(getattr(lm.model, "generation_config", None), lm.info.id, usual)
    ):
        told += (f"the model has no sampling settings; kvcli uses {', '.join(f'{k} {v:g}' for k, v in usual.items())}",)
    notes = lm.info.notes
    if not given.is_gguf and any(given.path.glob("adapter_*")):
        notes = (*notes, f"the model folder has an adapter, which is not applied; --adapter {given.path} applies it")
    lm.generation, lm.info = sampling, replace(lm.info, details=told, notes=notes)
    find = find or partial(named, may_assist=True)
    second = partial(load_draft_model, words=tokenizer, load=wants, find=find, cache=cache, tell=tell)
    return Model(lm, tokenizer, profile, load_seconds=time.perf_counter() - began, second=second)
