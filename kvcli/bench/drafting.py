"""Measurements of drafting: alternating runs with and without drafts, and a search over settings of `[spec]`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.stats import Stats
from kvcli.kv.slots import nbytes

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.engine.stats import DraftReport
    from kvcli.settings.profile import Profile

Tell = Callable[[int, int, str], None]  # steps done, total steps, message


@dataclass
class TimedRun:
    """A timed decoding of a sequence."""

    seconds: float  # from the first token to the last
    ids: list[int]
    stats: Stats
    report: DraftReport | None
    view_bytes: int

    @property
    def tok_s(self) -> float:
        """Tokens per second after the first pass."""
        return (self.stats.new - self.stats.recent[0]) / self.seconds if self.seconds else 0.0


@dataclass
class TunedSettings:
    """A setting of `[spec]` and its speed ratios to plain decoding: workload -> one ratio per repetition."""

    name: str
    spec: Mapping[str, Any]
    ratios: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    passes: int = 0

    @property
    def all(self) -> list[float]:
        return [ratio for ratios in self.ratios.values() for ratio in ratios]

    @property
    def score(self) -> float:
        """Median over workloads of the median over repetitions, so that no single workload decides."""
        return median(median(ratios) for ratios in self.ratios.values())


def read_once(model: Model, prompt: Sequence[int]) -> GenerationSession:
    """Prefill the prompt in a session without a drafter. Timed runs start from copies of it."""
    session = model.under(model.profile.replace(spec={"method": "off"})).new_session()
    run_to_end(session.read(prompt))
    return session


def decode(model: Model, profile: Profile, past: GenerationSession, new: int, clock: Callable[[], float]) -> TimedRun:
    """Decode `new` tokens after the sequence of `past` under the profile. The drafter starts without history."""
    session = model.under(profile).new_session()
    session.take_over(past.fork())
    run_to_end(session.read([]))  # gives the drafter the sequence
    stats, first, last = Stats(), 0.0, 0.0
    for step in iterate_events(session.stream(new)):
        last = clock()
        first = first or last
        stats.add_step(step)
        stats.recent = stats.recent[:1]  # only the first pass is needed
    ids = session.ids[-stats.new :]
    view = sum(nbytes(session.view).values())
    return TimedRun(last - first, ids, stats, session.drafter.report(), view)


def in_turns(
    model: Model, profiles: Sequence[Profile], session: GenerationSession, new: int, reps: int, tell: Tell, words: str
) -> list[list[TimedRun]]:
    """Decode with each profile alternately: [profile][repetition]. The first round is a warm-up and not recorded."""
    turns: list[list[TimedRun]] = [[] for _ in profiles]
    total = (reps + 1) * len(profiles)
    for rep in range(reps + 1):
        for i, profile in enumerate(profiles):
            tell(rep * len(profiles) + i, total, f"{profile.name} · {words}")
            turn = decode(model, profile, session, new, time.perf_counter)
            if rep:
                turns[i].append(turn)
    return turns


def candidates(profile: Profile) -> list[TunedSettings]:
    """Settings to try: plain decoding, prompt lookup, prompt lookup with recycled logits, and all with lookahead rows;
    each with few, more and many rows."""
    found = [TunedSettings("off", {"method": "off"})]
    for most in (7, 15, 31):
        found.append(TunedSettings(f"ngram, {most} rows", {"method": "ngram", "max": most}))
    for most in (7, 15, 31):
        logits = {"method": "mix", "sources": ("prompt-lookup", "stand", "token-recycling"), "max": most}
        found.append(TunedSettings(f"prompt lookup and recycled logits, {most} rows", logits))
    for window in (4, 8):
        lookahead = {"method": "mix", "view": "stream", "window": window}
        found.append(TunedSettings(f"with lookahead, window {window}", lookahead))
    if profile.spec.method not in ("off", "ngram", "mix"):
        found.append(TunedSettings(profile.name, {"method": profile.spec.method}))
    return found


def laid_over(profile: Profile, rival: TunedSettings) -> dict[str, Any]:
    """Keys of `rival` over those of the profile; profile keys that the rival does not use get their defaults."""
    own = dict(rival.spec)
    alone = profile.replace(spec={"method": "off"}).replace(spec=own).spec
    if profile.spec.method != alone.method:
        return own
    unread = {key: getattr(alone, key) for key in alone.ignored_keys()}
    return {key: value for key, value in unread.items() if getattr(profile.spec, key) != value} | own


def tune(model: Model, prompts: Mapping[str, Sequence[int]], new: int, reps: int, tell: Tell) -> list[TunedSettings]:
    """Time all candidates on all prompts, alternating on each prompt. Return the fastest first."""
    rivals = candidates(model.profile)
    profiles = [model.profile.replace(spec=laid_over(model.profile, rival), name=rival.name) for rival in rivals]
    for workload, prompt in prompts.items():
        tell(0, 0, f"reading {workload}")
        turns = in_turns(model, profiles, read_once(model, prompt), new, reps, tell, workload)
        for rival, mine in zip(rivals, turns, strict=True):
            pairs = zip(turns[0], mine, strict=True)
            rival.ratios[workload] = [b.tok_s / a.tok_s if a.tok_s and b.tok_s else 1.0 for a, b in pairs]
            rival.tokens += sum(turn.stats.new for turn in mine)
            rival.passes += sum(turn.stats.passes for turn in mine)
    return sorted(rivals, key=lambda rival: -rival.score)
