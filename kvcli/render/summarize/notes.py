"""Messages of `kvcli summarize` besides the summary: the files, the plan, its parts, and notes at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcli.documents import Document, listed, scanned
from kvcli.engine.stats import FEW
from kvcli.render.terminal import terminal as f
from kvcli.render.turn.turn_summary import joined

if TYPE_CHECKING:
    from kvcli.summarize.events import MergeEnded, PartEnded, Stopped
    from kvcli.summarize.parts import Part
    from kvcli.summarize.plan import Plan
    from kvcli.summarize.result import Answered, Summary

GIB = 1 << 30
UNITS = {"page": "page", "heading": "section", "chapter": "chapter", "line": "line"}


def hung(words: Sequence[str], width: int) -> list[str]:
    """Return the words side by side, with lines after the first indented."""
    return [("  " if i else "") + line for i, line in enumerate(joined(words, width - 2))]


def size(document: Document) -> str:
    """Return `214 pages`, `12 of 214 pages`, `9 chapters`, `1,204 lines`."""
    n, whole = len(document.sections) + len(document.without_text) + document.blank, document.n_pages
    if document.unit == "line" or not n:  # a saved chat has the text alone
        return f.plural(document.lines, "line")
    if whole and n < whole:
        return f"{f.count(n)} of {f.plural(whole, 'page')}"
    return f.plural(n, UNITS[document.unit])


def about_file(name: str, document: Document, tokens: int | None = None) -> list[str]:
    """Return `annual-report.pdf`, `214 pages`, `131,902 tokens`, `3 pages without text (12, 13, 90)`."""
    empty = document.without_text
    return [
        name,
        size(document),
        f.plural(tokens, "token") if tokens is not None else "",
        f"{f.plural(len(empty), 'page')} without text ({listed(empty)})" if empty else "",
    ]


def plan_lines(plan: Plan, width: int) -> list[str]:
    """Return `plan: 5 parts, prompts up to 29,600 tokens · as requested`, and below it time and memory."""
    n = len(plan.parts)
    if plan.mode == "whole":
        what = f"one part, prompt {f.count(plan.longest)} tokens"
    else:
        then = f", then {'up to ' * (plan.merges > 1)}{f.plural(plan.merges, 'merge')}" if plan.merges else ""
        then = then or (", joined in order" if n > 1 else "")
        what = f"{f.plural(n, 'part')}, prompts up to {f.count(plan.longest)} tokens{then}"
    cost = joined([about(plan.seconds, at_most=plan.drafts), _room(plan.estimate, plan.available)], width - 2)
    return [*hung([f"plan: {what}", plan.why], width), *(f"  {line}" for line in cost)]


def about(seconds: float | None, *, at_most: bool = False) -> str:
    """Return `about 4 min`, without seconds, because the estimate is not that precise."""
    if seconds is None:
        return "time not estimated"
    word = "up to about" if at_most else "about"
    if seconds < 90:
        return f"{word} {max(1, round(seconds))} s"
    return f"{word} {round(seconds / 60)} min" if seconds < 5400 else f"{word} {seconds / 3600:.1f} h"


def _room(estimate: int, available: int) -> str:
    return f"{estimate / GIB:.1f} GiB of {available / GIB:.1f} GiB free memory" if estimate and available else ""


def stretch(part: Part) -> str:
    """Return the range of a part: `pages 86–129`, `§ Methods – § Results`, `lines 41–400`."""
    first, last = part.span
    a, b = first.label, last.label
    if first.document != last.document:
        return f"{first.document} {a} – {last.document} {b}"
    if first.unit in ("page", "line"):
        ends = [a.partition("-")[0], b.rpartition("-")[2]]
        return f"{first.unit} {ends[0]}" if ends[0] == ends[1] else f"{first.unit}s {ends[0]}–{ends[1]}"
    return f"§ {a}" if a == b else f"§ {a} – § {b}"


def part_done(event: PartEnded) -> list[str]:
    """Return the line that is printed when a part is done."""
    head = f"part {event.part.number} of {event.of}"
    return [head, stretch(event.part), f.plural(len(event.points), "point"), *_work(event.answered, event.seconds)]


def merge_done(event: MergeEnded) -> list[str]:
    return [f"merge {event.number}", f.plural(len(event.points), "point"), *_work(event.answered, event.seconds)]


def _work(answered: Answered, seconds: float) -> list[str]:
    if answered.is_cached:
        return ["saved by an earlier run"]
    stats = answered.turn.stats
    read = f"prompt {f.count(stats.prompt)} tokens"
    pace = f" at {f.rate(stats.read_tok_s)}" if stats.read > 0 else ""
    gain = f"{stats.tokens_per_pass:.2f} tok/pass" if stats.drafted_passes else ""
    wrote = f"wrote {f.count(stats.new)}" + (f" at {f.rate(stats.decode_tok_s)}" if stats.decode > 0 else "")
    return [read + pace, wrote, gain, f.seconds(seconds)]


def stopped(event: Stopped, *, no_cache: bool) -> str:
    """Return the last line after Ctrl-C: which results the next run can use."""
    if not event.done:
        return "stopped before the first part was done; the same command starts again"
    parts = {1: "part 1", 2: "parts 1 and 2"}.get(event.done, f"parts 1 to {event.done}")
    which = f"{parts} of {event.of} {'is' if event.done == 1 else 'are'}"
    if not event.is_kept:
        return f"stopped: {which} done but could not be saved; the same command starts again"
    return f"stopped: {which} saved; the same command {'without --no-cache ' * no_cache}continues"


def notes(summary: Summary, documents: Mapping[str, Document], *, cited: bool) -> Iterator[str]:
    """Yield notes on a finished summary, a sentence each. `documents` are keyed by their names on the screen."""
    yield from summary.notes
    n = len(summary.cites)
    if cited and not n:
        yield "the model cited no pages, so nothing could be verified"
    yield from checked(summary.unconfirmed, summary.corrected, n)
    if any(answered.is_cached for answered in summary.turns):
        kept = sum(answered.is_cached for answered in summary.turns)
        which = "the answer is" if len(summary.turns) == 1 else f"{kept} of {len(summary.turns)} answers are"
        yield f"{which} from an earlier run; --no-cache asks again"
    for name, document in documents.items():
        if document.without_text:
            left = "they are" if len(document.without_text) > 1 else "it is"
            yield f"{scanned(name, document.without_text, document.kind)}; {left} not in the summary"


def checked(unconfirmed: int, corrected: int, n: int) -> Iterator[str]:
    """Yield what the check did to `n` citations."""
    if unconfirmed:
        yield f'{unconfirmed} of {f.plural(n, "citation")} could not be confirmed, marked "?"'
    if corrected:
        moved = f"{'was' if corrected == 1 else 'were'} moved to the place that has the words"
        yield f"{corrected} of {f.plural(n, 'citation')} named a wrong place and {moved}"


def totals(summary: Summary) -> list[str]:
    """Return the figures of several turns together."""
    fresh = [answered.turn.stats for answered in summary.turns if not answered.is_cached]
    read, new = sum(s.prompt - s.cached for s in fresh), sum(s.new for s in fresh)
    reading, writing = sum(s.read for s in fresh), sum(s.decode for s in fresh)
    peak = max((s.peak for s in fresh), default=0)
    estimate = max((s.estimate for s in fresh), default=0)
    return [
        f"{f.plural(summary.n_parts, 'part')}, {f.plural(len(fresh), 'question')}",
        f"prompts {f.count(read)} tokens in {f.seconds(reading)}"
        + (f", {f.rate(read / reading)}" if reading and read >= FEW else ""),
        f"wrote {f.count(new)} in {f.seconds(writing)}"
        + (f", {f.rate(new / writing)}" if writing and new >= FEW else ""),
        "approx" if any(s.approx for s in fresh) else "",
        f"peak {f.long_size(peak)}" + (f", estimate {f.long_size(estimate)}" if estimate else "") if peak else "",
    ]
