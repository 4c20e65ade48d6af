"""Measurements of drafting: alternating runs with and without drafts, and a search over settings of `[spec]`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.stats import DraftReport, Stats
from kvcli.kv.slots import nbytes
from kvcli.schemas.spec import Difference, Kind, LookaheadFigures, Range, SpecDocument, SpecTuneDocument, Tried
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.schemas.fit import PassTime
    from kvcli.settings.profile import Profile

CLEAR = 1.02  # speedup below which drafting is not called faster

Tell = Callable[[int, int, str], None]  # steps done, total steps, message
Spec = dict[str, Any]  # keys of [spec]


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


def examine(
    name: str,
    model: Model,
    passes: list[PassTime],
    workload: str,
    prompt: Sequence[int],
    new: int,
    reps: int,
    tell: Tell,
) -> SpecDocument:
    """Decode the prompt with and without drafting, in turns. `passes`: the pass times given to the drafter."""
    profile = model.profile
    plain = profile.replace(spec={"method": "off"}, name="plain")
    tell(0, 0, f"reading {workload}")
    without, with_ = in_turns(model, [plain, profile], read_once(model, prompt), new, reps, tell, workload)
    last, report = with_[-1], with_[-1].report
    assert report is not None, "a profile that drafts reports on it"
    ratios = speedups(without, with_)
    stats = last.stats
    return SpecDocument.from_attributes(
        report,
        stats,
        last,
        kvcli=__version__,
        model=name,
        profile=profile.name,
        method=profile.spec.method,
        workload=workload,
        context=len(prompt),
        new=new,
        reps=reps,
        plain_tok_s=spread([turn.tok_s for turn in without]),
        tok_s=spread([turn.tok_s for turn in with_]),
        ratio=spread(ratios),
        # null if a step also takes passes of a draft model
        predicted=None
        if report.ahead is not None
        else predicted(passes, stats.rows_per_pass, stats.tokens_per_pass, len(prompt)),
        passes=passes,
        sources={
            source: [Kind(kind=a.match, made=a.made, share=a.share) for a in kinds if a.made]
            for source, kinds in report.by_source.items()
        },
        lookahead=LookaheadFigures.from_attributes(report.lookahead) if report.lookahead else None,
        reason=report.reason if report.paused else "",
        draft_pass=report.ahead,
        same=all(a.ids == b.ids for a, b in zip(without, with_, strict=True)),
        difference=_difference(model.with_profile(plain), prompt, without, with_),
        verdict=verdict(spread(ratios), report),
    )


def _difference(
    plain: Model, prompt: Sequence[int], without: Sequence[TimedRun], with_: Sequence[TimedRun]
) -> Difference | None:
    """Return the first difference of the texts, and if a near tie explains it; None if they are equal."""
    from kvcli.bench.text_agreement import first_difference, tie_at

    for a, b in zip(without, with_, strict=True):
        if (at := first_difference(a.ids, b.ids)) is not None:
            tie = tie_at(plain, [*prompt, *a.ids[:at]], a.ids[at], b.ids[at])
            return Difference(token=at + 1, near_tie=tie.is_near, margin=tie.margin, bound=tie.bound)
    return None


def spread(values: Sequence[float]) -> Range:
    return Range(low=min(values), median=median(values), high=max(values))


def predicted(passes: Sequence[PassTime], rows: float, tokens: float, context: int) -> float | None:
    """Return the speedup over plain decoding by the measured time of passes of `rows` rows; None if not measured."""
    from kvcli.fit.speed import at, units

    if not (known := units(passes, context)):
        return None
    return tokens / at([(1, 1.0), *sorted(known.items())], rows)


def verdict(ratio: Range, report: DraftReport) -> str:
    if ratio.low > CLEAR:
        return f"drafting is faster on this text: {ratio.median:.2f}× plain decoding"
    if ratio.high < 1:
        why = f": {report.reason}" if report.paused else ""
        return f"drafting is slower on this text: {ratio.median:.2f}× plain decoding{why}"
    return f"no significant difference on this text: {ratio.low:.2f}× to {ratio.high:.2f}× plain decoding"


def candidates(profile: Profile) -> dict[str, Spec]:
    """Settings to try: plain decoding, prompt lookup, prompt lookup with recycled logits, and all with lookahead rows;
    each with few, more and many rows."""
    found: dict[str, Spec] = {"off": {"method": "off"}}
    for most in (7, 15, 31):
        found[f"ngram, {most} rows"] = {"method": "ngram", "max": most}
    for most in (7, 15, 31):
        logits = {"method": "mix", "sources": ["prompt-lookup", "stand", "token-recycling"], "max": most}
        found[f"prompt lookup and recycled logits, {most} rows"] = logits
    for window in (4, 8):
        found[f"with lookahead, window {window}"] = {"method": "mix", "view": "stream", "window": window}
    if profile.spec.method not in ("off", "ngram", "mix"):
        found[profile.name] = {"method": profile.spec.method}
    return found


def laid_over(profile: Profile, own: Spec) -> Spec:
    """Keys of `own` over those of the profile; profile keys that its method does not use get their defaults."""
    alone = profile.replace(spec={"method": "off"}).replace(spec=own).spec
    if profile.spec.method != alone.method:
        return own
    unread = {key: getattr(alone, key) for key in alone.ignored_keys()}
    return {key: value for key, value in unread.items() if getattr(profile.spec, key) != value} | own


def tune(
    name: str, model: Model, prompts: Mapping[str, Sequence[int]], new: int, reps: int, tell: Tell
) -> SpecTuneDocument:
    """Time all candidates on all prompts, alternating on each prompt; the fastest first."""
    settings = candidates(model.profile)
    profiles = [model.profile.replace(spec=laid_over(model.profile, spec), name=one) for one, spec in settings.items()]
    turns = {}
    for workload, prompt in prompts.items():
        tell(0, 0, f"reading {workload}")
        turns[workload] = in_turns(model, profiles, read_once(model, prompt), new, reps, tell, workload)
    tried = [_tried(one, spec, i, turns) for i, (one, spec) in enumerate(settings.items())]
    tried.sort(key=lambda one: -one.score)
    best = tried[0]
    pays = best.name != "off" and best.score > CLEAR
    gain = f"fastest: {best.name}, {best.score:.2f}× plain decoding"
    return SpecTuneDocument(
        kvcli=__version__, model=name, profile=model.profile.name, workloads=list(prompts),
        context=max(map(len, prompts.values())), new=new, reps=reps, tried=tried, best=best.name, file=None,
        verdict=gain if pays else "no setting is significantly faster than plain decoding",
    )  # fmt: skip


def _tried(name: str, spec: Spec, at: int, turns: Mapping[str, list[list[TimedRun]]]) -> Tried:
    ratios = {workload: speedups(found[0], found[at]) for workload, found in turns.items()}
    stats = [turn.stats for found in turns.values() for turn in found[at]]
    return Tried(
        name=name,
        spec=spec,
        ratio=spread([ratio for of_workload in ratios.values() for ratio in of_workload]),
        by_workload={workload: median(of_workload) for workload, of_workload in ratios.items()},
        tokens_per_pass=sum(one.new for one in stats) / sum(one.passes for one in stats),
    )


def speedups(without: Sequence[TimedRun], with_: Sequence[TimedRun]) -> list[float]:
    """Return the speed ratio of each repetition."""
    return [b.tok_s / a.tok_s if a.tok_s and b.tok_s else 1.0 for a, b in zip(without, with_, strict=True)]
