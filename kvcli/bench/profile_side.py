"""Benchmark side for a profile: kvcli's engine, ids in and ids out, a new session for every prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcli.bench.side import TimedSample
from kvcli.engine.engine import Engine, generate_together
from kvcli.engine.resources import use_threads
from kvcli.engine.stats import Stats, Step
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

    def __init__(
        self, name: str, model: Model, threads: int, clock: Callable[[], float] = time.perf_counter, batch: int = 1
    ) -> None:
        """`batch`: texts that are continued side by side; the others are the prompt from another place on."""
        self.name, self.model, self.threads, self.clock, self.batch = name, model, threads, clock, batch

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
        sessions, n = [self.model.new_session() for _ in range(self.batch)], len(prompt)
        texts = [
            [*prompt[:1], *prompt[at:], *prompt[1:at]]
            for at in (1 + (n - 1) * i // self.batch for i in range(self.batch))
        ]
        stats, at, steps, engine = Stats(prompt=n), list[float](), list[Step](), Engine()
        began = self.clock()
        for read in generate_together(*(one.read(text) for one, text in zip(sessions, texts, strict=True))):
            read.result()
        tasks = [engine.add(session.stream(new), steps.append) for session in sessions]
        while engine.step():
            now = self.clock() - began
            for step in steps:
                at += [now] * len(step.new)
                stats.add_step(step)
            steps.clear()
        for task in tasks:
            task.result()
        kv_bytes = sum(sum(nbytes(session.stored_kv, session.drafter).values()) for session in sessions)
        drafted, ids = stats if self.model.profile.spec.method != "off" else None, tuple(sessions[0].ids[n:])
        return TimedSample(ids, tuple(at), n * self.batch, kv_bytes, drafted, self.batch)

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
