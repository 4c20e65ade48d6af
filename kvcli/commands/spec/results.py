"""Documents of `kvcli spec`, made from decoded turns."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from kvcli.bench.drafting import in_turns, read_once
from kvcli.schemas.spec import Difference, Kind, LookaheadFigures, Range, SpecDocument, SpecTuneDocument, Tried
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.bench.drafting import TimedRun, TunedSettings
    from kvcli.chat.model import Model
    from kvcli.engine.stats import DraftReport
    from kvcli.render.bench.progress import Bar
    from kvcli.schemas.fit import PassTime

CLEAR = 1.02  # speedup below which drafting is not called faster


def examine(
    name: str, model: Model, passes: list[PassTime], workload: str, prompt: Sequence[int], new: int, reps: int, bar: Bar
) -> SpecDocument:
    """Decode the prompt with and without drafting, in turns. `passes`: the pass times given to the drafter."""
    profile = model.profile
    plain = profile.replace(spec={"method": "off"}, name="plain")
    bar.show(0, 0, f"reading {workload}")
    without, with_ = in_turns(model, [plain, profile], read_once(model, prompt), new, reps, bar.show, workload)
    last, report = with_[-1], with_[-1].report
    assert report is not None, "a profile that drafts reports on it"
    ratios = [b.tok_s / a.tok_s if a.tok_s and b.tok_s else 1.0 for a, b in zip(without, with_, strict=True)]
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


def tuned(
    name: str, model: Model, rivals: Sequence[TunedSettings], workloads: list[str], new: int, reps: int, context: int
) -> SpecTuneDocument:
    """Return the document, without the file that may be written."""
    best = rivals[0]
    gain = f"{best.score:.2f}× plain decoding"
    pays = best.name != "off" and best.score > CLEAR
    said = f"fastest: {best.name}, {gain}" if pays else "no setting is significantly faster than plain decoding"
    return SpecTuneDocument(
        kvcli=__version__,
        model=name,
        profile=model.profile.name,
        workloads=workloads,
        context=context,
        new=new,
        reps=reps,
        tried=[
            Tried(
                name=rival.name,
                spec={key: list(v) if isinstance(v, tuple) else v for key, v in rival.spec.items()},
                ratio=spread(rival.all),
                by_workload={workload: median(ratios) for workload, ratios in rival.ratios.items()},
                tokens_per_pass=rival.tokens / rival.passes,
            )
            for rival in rivals
        ],
        best=best.name,
        file=None,
        verdict=said,
    )
