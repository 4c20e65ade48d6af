"""Output of `kvcli spec`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcli.render.fit.plans import pass_grid
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.tables import columns, fitting
from kvcli.render.terminal.terminal import folded
from kvcli.render.turn.turn_summary import joined

if TYPE_CHECKING:
    from kvcli.schemas.spec import Range, SpecDocument, SpecTuneDocument


def doctor_lines(found: SpecDocument, width: int) -> list[str]:
    """Return speed, passes, draft sources, lookahead, and the verdict."""
    setting = f"{found.workload}, {f.count(found.context)} + {found.new} tokens"
    lines = joined(
        [f"{found.model} · {found.profile}", setting, f"{f.plural(found.reps, 'interleaved repetition')}"], width
    )
    lines += ["", *(part for line in _speeds(found) for part in folded(line, width)), ""]
    if found.passes:
        lines += [*pass_grid(found.passes, width), ""]
    lines += _sources(found, width)
    for text in _words(found):
        lines += folded(text, width)
    return lines


def _speeds(found: SpecDocument) -> list[str]:
    expected = f", predicted speedup {found.predicted:.2f}× from measured pass times" if found.predicted else ""
    return [
        f"plain     {_range(found.plain_tok_s, 1)} tok/s",
        f"drafting  {_range(found.tok_s, 1)} tok/s   speedup {_range(found.ratio, 2)}",
        f"drafts    {f.percent(found.drafted_share)} of passes, acceptance length {found.mean_acceptance_length:.2f}, "
        f"{found.tokens_per_pass:.2f} tokens per pass",
        f"rows      {found.rows_per_pass:.1f} per pass{expected}",
    ]


def _range(r: Range, digits: int) -> str:
    low, middle, high = (f"{value:,.{digits}f}" for value in (r.low, r.median, r.high))
    return f"{middle} ({low}–{high})"


def _sources(found: SpecDocument, width: int) -> Iterator[str]:
    """Yield for each draft source its accepted draft tokens, and how often its first choices were right."""
    for name, kinds in found.sources.items():
        taken = found.accepted_by.get(name, 0)
        said = [f"{kind.kind}: {f.percent(kind.share)} of {f.count(kind.made)}" for kind in kinds]
        text = f"{f.count(taken)} accepted"
        text += f"; top-1 acceptance by {BY.get(name, 'kind')}: {', '.join(said)}" if said else ""
        for i, line in enumerate(folded(text, width, 17)):
            yield f"{'' if i else name:<17}{line}"


BY = {
    "prompt-lookup": "match length in tokens",
    "lookahead": "key length in tokens",
    "stand": "confidence margin (nats)",
    "token-recycling": "confidence margin (nats)",
}
BY["model"] = BY["self"] = BY["mtp"] = BY["assistant"] = BY["stand"]


def _words(found: SpecDocument) -> Iterator[str]:
    if (s := found.lookahead) is not None:
        cost = "not measured" if s.cost is None else f"{s.cost:.2f} plain passes"
        brought = "not used" if s.brought is None else f"{s.brought:.2f} tokens per pass"
        rest = f"; paused for {f.count(s.rested_passes)} passes" if s.rested_passes else ""
        why = f": {s.why}" if s.why else ""
        yield f"lookahead: {brought} ({s.rows} rows, cost {cost}){rest}{why}"
    if found.draft_pass is not None:
        yield f"a pass of the draft model takes {found.draft_pass:.2f} plain passes"
    if found.view_bytes:
        yield f"KV copy for lookahead: {f.long_size(found.view_bytes)}"
    if found.paused:
        yield f"drafting is paused: {found.reason}"
    if (d := found.difference) is not None:
        about = f"logit difference {d.margin:.3g}, rounding error up to {d.bound:.3g}"
        kind = "explained by rounding" if d.near_tie else "not explained by rounding: please report it"
        yield f"the texts first differ at new token {f.count(d.token)}, {kind} ({about})"
    yield found.verdict


def tune_lines(found: SpecTuneDocument, width: int) -> list[str]:
    """Return the settings that were measured, the best first."""
    head = [found.model, f"{f.count(found.context)} + {found.new} tokens"]
    table = [["settings", "speedup", "lowest", "highest", *found.workloads, "tokens/pass"]]
    for one in found.tried:
        speeds = [f"{value:.2f}" for value in (one.ratio.median, one.ratio.low, one.ratio.high)]
        texts = [f"{one.by_workload[name]:.2f}" for name in found.workloads]
        table.append([one.name, *speeds, *texts, f"{one.tokens_per_pass:.2f}"])
    table = fitting(table, width - 1, [*reversed(found.workloads), "highest", "lowest"])
    lines = [*joined(head, width), "", *columns(table, width - 1), ""]
    end = found.verdict + (f"; saved as {found.file}" if found.file else "; --save NAME saves it as a profile")
    return [*lines, *folded(end, width)]
