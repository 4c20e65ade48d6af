"""Result document of a benchmark, complete or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvcli.bench.compare import acceptance, all_figures, paired, samples_of, unpaired
from kvcli.bench.environment import environment
from kvcli.bench.fail_if import Condition
from kvcli.bench.measure import Series
from kvcli.bench.run import Bench, hash_of
from kvcli.bench.text_agreement import first_difference
from kvcli.schemas.bench import BenchDocument, BenchModel, BenchRow, Check, Ratio, Ratios, Same, Samples
from kvcli.version import __version__

SURE = 5  # repetitions, the default: with fewer, a verdict of faster or slower is too often wrong


def document_of(bench: Bench) -> BenchDocument:
    """Build the document from the results so far; the model must have been loaded."""
    ask, info = bench.ask, bench.info
    assert info is not None
    rows = [row_of(bench, series) for series in bench.series]
    env = environment(info.device, bench.load_before)
    document = BenchDocument(
        kvcli=__version__, model=BenchModel.from_attributes(info, revision=info.revision or None), env=env,
        args=ask.args, complete=bench.complete, baseline=ask.baseline, rows=rows, checks=[], quality=bench.quality,
        notes=[*ask.notes, *bench.notes],
    )  # fmt: skip
    document.notes += notes_of(document)
    document.notes += unlike(ask.earlier_name, ask.earlier, document) if ask.earlier is not None else []
    document.checks = checks_of(bench, document) if bench.complete else []
    return document


def row_of(bench: Bench, series: Series) -> BenchRow:
    """Result row of one side on one case."""
    case, runs = series.case, series.samples
    samples = samples_of(runs)
    found = all_figures(samples)
    recipe = next(r for r in bench.ask.recipes if r.name == series.side)
    kv = [run.kv_bytes for run in runs if run.kv_bytes is not None]
    method = str(recipe.settings["spec.method"]) if recipe.kind == "profile" else "prompt lookup"
    return BenchRow.from_attributes(
        case,
        profile=series.side,
        prompt=len(case.prompt),
        prompt_hash=hash_of(case.prompt),
        samples=samples,
        **found,
        text_tok_s=found["median"].tok_s and found["median"].tok_s / recipe.batch,
        ratio=ratios_of(bench, series, samples),
        accept=acceptance(runs, method),
        kv_bytes=kv[-1] if kv else None,
        peak_bytes=series.peak,
        same=same_of(bench, series),
        steady=len({run.ids for run in runs}) == 1 if len(runs) > 1 else None,
        exactness=str(recipe.settings["exactness"]) if recipe.kind == "profile" else None,
        setup=bench.setups.get(series.side, {}),
        ids=list(runs[-1].ids) if runs else [],
        ends=next((i for i, token in enumerate(runs[-1].ids) if token in bench.stops), None) if runs else None,
        error=series.error,
    )


def ratios_of(bench: Bench, series: Series, samples: Samples) -> Ratios:
    base: Samples | None = None
    over = paired
    if bench.ask.earlier is not None:
        row, over = bench.earlier_row(series), unpaired
        base = row.samples if row is not None else None
    else:
        found = bench.base_series(series)
        base = samples_of(found.samples) if found is not None and found is not series else None
    if base is None:
        return Ratios(tok_s=None, read_tok_s=None)
    tok_s: Ratio | None = over(samples.tok_s, base.tok_s)
    return Ratios(tok_s=tok_s, read_tok_s=over(samples.read_tok_s, base.read_tok_s))


def same_of(bench: Bench, series: Series) -> Same | None:
    """Compare tokens up to the first difference. After it, the two sides continue different texts."""
    other = bench.reference_ids(series)
    if other is None or not series.samples:
        return None
    mine = series.samples[-1].ids
    of = min(len(mine), len(other))
    at = first_difference(mine, other)
    tie = bench.ties.get((series.side, series.case))
    equal = of if at is None else at
    return Same(
        tokens=equal,
        of=of,
        share=equal / of if of else 1.0,
        first_difference=at,
        near_tie=tie.is_near if tie else None,
        margin=tie.margin if tie else None,
        bound=tie.bound if tie else None,
    )


def notes_of(document: BenchDocument) -> list[str]:
    """Notes on conditions that make the figures less reliable."""
    args, env = document.args, document.env
    notes = []
    if not document.complete:
        notes.append("incomplete: it was stopped before the end")
    if env.quiet is False and env.load_before and env.load_after:
        was, now = env.load_before[0], env.load_after[0]
        notes.append(f"the machine was busy (load {was:.2f} before, {now:.2f} after, {env.cores} cores)")
    if args.reps == 1:
        notes.append("with one repetition no difference can be significant")
    elif args.reps < SURE:
        odds = 2 ** (args.reps - 1)
        notes.append(f"only {args.reps} repetitions: 1 of {odds} equal pairs seems different by chance; use -r {SURE}")
    others = dict.fromkeys(row.profile for row in document.rows if row.exactness is None)
    if args.temperature and others:
        notes.append(f"{', '.join(others)}: random numbers differ from kvcli's, so texts are not compared")
    if not args.interleave:
        notes.append("the profiles did not alternate, so a machine that slows down affects the later ones more")
    for row in document.rows:
        where = f"{row.profile}, {row.workload} {row.ctx:,}"
        if row.error:
            notes.append(f"{where}: {row.error}")
        if row.steady is False:
            notes.append(f"{where}: the repetitions produced different texts")
    return [*notes, *_beyond(document.rows)]


def _beyond(rows: Sequence[BenchRow]) -> list[str]:
    """Notes on answers that end early. The tokens after the end are easy to predict, but also easy to get wrong."""
    found: dict[str, str] = {}
    for row in rows:
        if row.ends is not None and row.ends < row.new // 2:
            where = f"{row.workload} {row.ctx:,}"
            found.setdefault(
                where, f"{where}: the answer ends after {row.ends} of {row.new} tokens; later tokens are no answer"
            )
    return list(found.values())


def checks_of(bench: Bench, document: BenchDocument) -> list[Check]:
    """Check every --fail-if on every row that it applies to."""
    found = []
    earlier = bench.ask.earlier
    for condition in map(Condition.of, document.args.fail_if):
        for row in document.rows:
            among = earlier.rows if earlier is not None else document.rows
            name = row.profile if earlier is not None else document.baseline
            wanted = (name, row.ctx, row.workload)
            base = next((b for b in among if (b.profile, b.ctx, b.workload) == wanted), None)
            check = condition.check(row, base)
            if check is not None:
                found.append(check)
    return found


def unlike(name: str, earlier: BenchDocument, now: BenchDocument) -> Iterator[str]:
    """Yield notes: different conditions, and rows that the earlier result lacks or measured on other prompts."""
    was, is_ = _conditions(earlier), _conditions(now)
    other = [f"{what} {was[what]}, not {is_[what]}" for what in was if was[what] != is_[what]]
    if other:
        yield f"{name} was measured with {'; '.join(other)}: × includes that difference"
    rows = {(row.profile, row.ctx, row.workload): row for row in earlier.rows}
    for row in now.rows:
        where = f"{row.profile}, {row.workload} {row.ctx:,}"
        base = rows.get((row.profile, row.ctx, row.workload))
        if base is None:
            yield f"{where}: {name} has no such result"
        elif base.prompt_hash != row.prompt_hash:
            yield f"{where}: {name} was measured with another prompt"


def _conditions(document: BenchDocument) -> Mapping[str, str]:
    env, model = document.env, document.model
    return {
        "model": model.id,
        "dtype": model.dtype,
        "quant": model.quant,
        "processor": str(env.machine),
        "device": env.device,
        "threads": str(env.threads),
        "torch": str(env.versions.get("torch")),
        "--new": str(document.args.new),
        "--batch": str(document.args.batch),
        "temperature": f"{document.args.temperature:g}",
    }
