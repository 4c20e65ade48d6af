"""Benchmark side for a profile: kvcli's engine, ids in and ids out, a new session for every prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcli.bench.side import TimedSample
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.resources import use_threads
from kvcli.engine.stats import Stats
from kvcli.errors import BadInput, ContextOverflow
from kvcli.kv.slots import nbytes
from kvcli.settings.schema import Memory

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.settings.profile import Profile


def plain(profile: Profile) -> Profile:
    """Profile for plain decoding of the same weights: full prefill, full cache, no drafts."""
    kept = {
        "kv": {"dtype": "auto", "k_bits": 16, "v_bits": 16, "split_codes": False},
        "kv_format": {"method": "kivi"},
        "memory": {"fallbacks": [], "budget": "", "bits": [*Memory().bits], "evicted": "drop"},
        "policy": {"name": "none"},
        "sparse": {"method": "none"},
        "prune": {"method": "none"},
        "reuse": {"method": "none"},
    }
    return profile.replace(exactness="exact", **kept, spec={"method": "off"})


class Models:
    """Loaded weights, once per set of load settings; profiles with equal load settings share them."""

    def __init__(self, load: Callable[[Profile], Model]) -> None:
        self._load = load
        self._held: dict[object, Model] = {}
        self._others: dict[Hashable, Any] = {}
        self._threads = torch.get_num_threads()  # value of "all"; a profile that is loaded later may change it

    def under(self, profile: Profile) -> Model:
        """Return the model under this profile."""
        if profile.load not in self._held:
            self._held[profile.load] = self._load(profile)
        return self._held[profile.load].with_profile(profile)

    def threads(self, profile: Profile) -> int:
        """Number of threads torch computes with under this profile."""
        return int(profile.load.threads) or self._threads

    def shared(self, key: Hashable, load: Callable[[], Any]) -> Any:
        """Return an object shared by several sides of another engine, loaded by the first of them."""
        if key not in self._others:
            self._others[key] = load()
        return self._others[key]

    def close(self) -> None:
        """Free all weights."""
        self._held.clear()
        self._others.clear()


class ProfileSide:
    """Benchmark side for one profile on loaded weights."""

    peak_bytes: int | None = None  # it runs in this process

    def __init__(self, name: str, model: Model, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.name, self.model, self.threads, self.clock = name, model, threads, clock

    @property
    def setup(self) -> dict[str, str]:
        info, profile = self.model.info, self.model.profile
        is_plain = info.backend.partition(",")[0] == "torch"
        return {
            "engine": "kvcli",
            "profile": profile.name,
            "profile_hash": profile.hash,
            "dtype": info.dtype,
            "quant": info.quant,
            "weights": info.dtype if is_plain else info.backend,
            "linear": info.backend,
            "device": info.device,
            "threads": str(self.threads),
            "drafting": str(profile.spec.method),
            "cache": str(profile.policy.method),
        }

    def run(self, prompt: Sequence[int], new: int) -> TimedSample:
        """Continue `prompt`. Drafting starts without history, as in the first question of a process."""
        self._check(prompt, new)
        use_threads(self.threads)
        session = self.model.new_session()
        stats, at = Stats(prompt=len(prompt)), list[float]()
        began = self.clock()
        run_to_end(session.read(prompt))
        for step in iterate_events(session.stream(new)):
            at += [self.clock() - began] * len(step.new)
            stats.add_step(step)
        kv_bytes = sum(nbytes(session.stored_kv, session.drafter).values())
        drafts = self.model.profile.spec.method != "off"
        return TimedSample(
            tuple(session.ids[len(prompt) :]), tuple(at), len(prompt), kv_bytes, stats if drafts else None
        )

    def close(self) -> None:
        """Do nothing: the weights belong to `Models`."""

    def _check(self, prompt: Sequence[int], new: int) -> None:
        limit = self.model.limit
        if len(prompt) + new > limit:
            raise ContextOverflow(
                f"{len(prompt):,} prompt and {new:,} new tokens exceed the context window of {self.name}",
                lines=[f"{len(prompt):,} + {new:,} > {limit:,}"],
                try_=[f"--ctx {limit}"],
            )
        if outside := [i for i in prompt if not 0 <= i < self.model.lm.vocab]:
            raise BadInput(f"token {outside[0]} is outside the vocabulary", code="no_such_token")
