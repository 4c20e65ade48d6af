"""A model loaded in this process: the Python API that the commands are a skin over.

    import kvcli
    with kvcli.load("demo", profile="ngram", set={"sample.temperature": 0.0}) as model:
        print(model.generate("Hello", max_new_tokens=32).text)

The library never prints and never exits; the commands do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcli import build
from kvcli.api import Cancel, Events, Prompt, Turn, turn_of
from kvcli.clashes import cautions
from kvcli.engine import events
from kvcli.errors import BadConfig, BadInput, BadModel
from kvcli.info import ModelInfo
from kvcli.schema import ORDER
from kvcli.text import Messages, StopStrings
from kvcli.token_kinds import chat_spans, kinds_by_id
from kvcli.tokenizer import load_tokenizer
from kvcli.turn import Answering, Asked
from kvcli.window import Window

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvcli.conversation import Chat
    from kvcli.drafts.base import Costs
    from kvcli.model import LM
    from kvcli.profile import Profile
    from kvcli.session import Session
    from kvcli.source import Source


def load(
    model: str | Source = "demo",
    profile: str | Profile | None = None,
    set: Mapping[str, object] | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    tell: Callable[[str], None] | None = None,
    cache: Path | None = None,
) -> Model:
    """Load `demo`, a folder, a GGUF file, a hub id at `revision`, or files already found.

    `set` overrides profile keys: {"load.device": "cpu"}. A hub id is downloaded only with `offline=False` and a `tell`
    to say so to. A GGUF file is unpacked below `cache`, by default the user's. Raises KvcliError subclasses.
    """
    from kvcli import source
    from kvcli.gguf import unpack
    from kvcli.model import LM
    from kvcli.profile import Profile
    from kvcli.weights import keeps_blocks
    from kvcli.world import Paths

    chosen = profile if isinstance(profile, Profile) else Profile.load(profile)
    if set:
        chosen = chosen.replace(**_nested(set))
    began = time.perf_counter()
    wants = chosen.load
    found = (
        source.find(model, offline=offline, revision=revision, allow_pickle=wants.allow_pickle, tell=tell)
        if isinstance(model, str)
        else model
    )
    packs = keeps_blocks(wants)
    given, found = found, unpack.ready(found, wants.dtype, cache or Paths.of({}).cache, packs=packs, tell=tell)
    # first: what is wrong with it shows at once, and its chat template gets ready while the weights are read
    tokenizer = load_tokenizer(found, wants.trust_remote_code)
    lm = LM.load(
        found,
        quant=wants.quant,
        dtype=wants.dtype,
        device=wants.device,
        threads=wants.threads,
        allow_pickle=wants.allow_pickle,
        trust_remote_code=wants.trust_remote_code,
        verify=wants.verify,
    )
    notes = unpack.told(given, packs, lm.info.dtype)
    lm.info = replace(lm.info, notes=(*lm.info.notes, *notes))
    return Model(lm, tokenizer, chosen, load_seconds=time.perf_counter() - began)


class Model:
    """A loaded model under a profile. A context manager; closing frees the past and the weights."""

    def __init__(
        self,
        lm: LM,
        tokenizer: PreTrainedTokenizerBase,
        profile: Profile,
        *,
        load_seconds: float = 0.0,
        kinds: bytes | None = None,
    ) -> None:
        """`kinds`: kvcli.token_kinds.kinds_by_id of the tokenizer, where somebody has it; else made when needed."""
        self.lm, self.tokenizer = lm, tokenizer
        self.profile, self._unkept = build.settled(lm, profile)
        self.info: ModelInfo = replace(lm.info, load_seconds=load_seconds or lm.info.load_seconds)
        self.costs: Costs | None = None  # what passes take here; None = nobody measured it
        self.time_passes: Callable[[Model], Costs | None] | None = None  # finds out what passes take; set by who may
        self._kinds = kinds
        self.session = self.open()
        # profile, tokens in memory -> estimated peak and what was available; set by who made an estimate
        self.foretell: Callable[[Profile, int], tuple[int, int]] | None = None
        # profile -> tokens for which memory has room, by that estimate; None = nobody looked
        self.fits: Callable[[Profile], int] | None = None
        self.answering: object = None  # the stream whose answer the session holds

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the keys and values; the weights go with the last model that shares them."""
        self.session = self.open()

    def open(self) -> Session:
        """A session under this profile, with nothing read yet."""
        if self._kinds is None and self.profile.policy.every is not None:
            self._kinds = kinds_by_id(self.tokenizer, self.lm.vocab)
        return build.session(self.lm, self.profile, self.costs, self._kinds)

    def expect(self, costs: Costs | None) -> None:
        """What passes were measured to take here. With nothing read yet."""
        self.costs = costs
        if costs is not None:
            self.session.drafter.expect(costs)

    def prepare(self) -> None:
        """Find out what passes take here, if the profile drafts and nobody has found out yet."""
        if self.costs is None and self.profile.spec.method != "off" and self.time_passes is not None:
            self.expect(self.time_passes(self))

    @property
    def limit(self) -> int:
        """The window in use, tokens: the profile's, at most the model's."""
        asked = self.profile.context.limit
        return self.lm.limit if asked == "auto" else min(int(asked), self.lm.limit)

    @property
    def cautions(self) -> list[str]:
        """What the user should know of the profile on this device, one line each."""
        return [*([self._unkept] if self._unkept else []), *cautions(self.profile, self.lm.device.type)]

    @property
    def promise(self) -> str:
        """What may be said of the text, for people: "exact", "exact but for near ties", "certified", "approx"."""
        return build.promise(self.lm, self.profile)

    def with_profile(self, profile: Profile) -> Model:
        """The same weights under another profile, with nothing read yet. Refuses a change of `load`."""
        if profile.load != self.profile.load:
            raise BadConfig(
                "the weights are loaded already, and this changes how",
                code="needs_reload",
                lines=_changes(asdict(self.profile.load), asdict(profile.load)),
                try_=["leave and start again with --profile or --set"],
            )
        changed = Model(self.lm, self.tokenizer, profile, load_seconds=self.info.load_seconds, kinds=self._kinds)
        changed.info, changed.time_passes = self.info, self.time_passes
        changed.foretell, changed.fits = self.foretell, self.fits
        changed.expect(self.costs)
        changed.prepare()
        return changed

    def take_past(self, other: Model) -> bool:
        """Go on with what `other` has read, if both profiles read and keep it alike; `other` then has nothing read."""
        kept = [table for table in ORDER if table not in ("spec", "sample", "context")]  # these leave the past alone
        if other.lm is not self.lm or any(getattr(self.profile, t) != getattr(other.profile, t) for t in kept):
            return False
        other.answering = None  # a stream of it that is under way ends with an error that says why
        self.session.take(other.session)
        return True

    def chat(self, system: str | None = None) -> Chat:
        """A conversation with this model."""
        from kvcli.conversation import Chat

        return Chat(self, system)

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt: text becomes one user message of the chat template, ids stay as they are."""
        if not isinstance(prompt, str):
            return list(prompt)
        from kvcli.text import render_prompt

        return render_prompt(self.tokenizer, [{"role": "user", "content": prompt}])

    def generate(self, prompt: Prompt, max_new_tokens: int | None = None, **options: Any) -> Turn:
        """One answer, all at once. Options are those of `stream`."""
        return turn_of(self.stream(prompt, max_new_tokens=max_new_tokens, **options))

    def stream(
        self,
        prompt: Prompt,
        *,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
        cancel: Cancel | None = None,
        messages: Messages = (),
        **sample: object,
    ) -> Events:
        """One answer in events: Live and Read first, then Text as it comes, End last.

        `sample`: settings of the profile's table of that name for this answer alone, `temperature=0.2, seed=7`; None
        leaves one as it is. Raises BadConfig for one that does not exist, or cannot have that value. `messages`: what
        the ids of `prompt` were rendered from, so that a policy can tell system text from the rest.
        What the store already holds of the prompt is not read again. Raises ContextOverflow before reading anything.
        """
        ids = self.encode(prompt)
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        if outside := [i for i in ids if not 0 <= i < self.lm.vocab]:
            kind = BadModel if messages else BadInput  # of text, the tokenizer made it
            raise kind(f"token {outside[0]} is none of the model's {self.lm.vocab:,}", code="no_such_token")
        profile = self.profile
        if changes := {key: value for key, value in sample.items() if value is not None}:
            profile = profile.changed({"sample": changes}, "what was asked of an answer")
        fits = partial(self.fits, self.profile) if self.fits is not None else None
        window = Window(self.limit, self.lm.limit, self.profile.context.reserve, fits)
        asked = Asked(
            ids,
            chat_spans(self.tokenizer, messages, ids) if messages and self.session.policy is not None else [],
            window.room(len(ids), profile.sample.max_new_tokens),
            () if ignore_eos else self.lm.stop_ids,
            StopStrings([stop] if isinstance(stop, str) else stop),
            cancel or (lambda: False),
            build.sampler(self.lm, profile),
            0 if ignore_eos else profile.sample.stop_loops,
        )
        return events(Answering(self, asked).events())

    def kv_table(self) -> list[dict[str, object]]:
        """Slots and bytes by layer and tier, and what scouts read as one more."""
        view = self.session.view.usage() if self.session.view is not None else []
        table = [asdict(use) for use in [*self.session.kv.usage(), *view]]
        return [{key: value for key, value in row.items() if key != "lost"} for row in table]


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    return [f"load.{key}: {old[key]} -> {new[key]}" for key in old if old[key] != new[key]]


def _nested(flat: Mapping[str, object]) -> dict[str, Any]:
    """{"kv.k_bits": 8} -> {"kv": {"k_bits": 8}}."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        table, _, name = key.partition(".")
        if name:
            nested.setdefault(table, {})[name] = value
        else:
            nested[table] = value
    return nested
