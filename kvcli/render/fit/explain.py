"""Explain the memory of a plan in lines: how its budget is spent, or its largest parts and how to reduce them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcli.render.terminal import numbers as f
from kvcli.render.terminal.terminal import Span
from kvcli.render.terminal.wrap import folded, styled

if TYPE_CHECKING:
    from kvcli.schemas.fit import FitBudget, FitPart, FitPlan, FitRung

GONE = "what has no room is gone: --set memory.disk=8GiB --set sparse.method=sketch finds it again"


def explained(plan: FitPlan, width: int) -> Iterator[list[Span]]:
    """Yield a title, then points of one or more lines, at most `width` columns wide."""
    budget, at = plan.budget, f"{plan.profile} at {f.count(plan.ctx)}"
    asked = f"memory.budget = {budget.asked}" if budget is not None and budget.asked else "memory.max_loss"
    what = "what takes memory" if budget is None else f"how {asked} is spent"
    yield from styled(f"{at}: {what}", width, "bold")
    for line in _parts(plan, plan.parts or []) if budget is None else _budget(plan, budget):
        for i, words in enumerate(folded(line, width, 4)):
            yield [(f"{'    ' if i else '  '}{words}", "")]


def _parts(plan: FitPlan, parts: list[FitPart]) -> Iterator[str]:
    for part in parts:
        ways = [f"{change.type} (peak {f.long_size(change.total)})" for change in part.changes]
        yield f"{part.name} {f.long_size(part.bytes)}{', less with ' if ways else ''}{' or '.join(ways)}"
    yield f"all together {f.long_size(plan.total)}"


def _budget(plan: FitPlan, of: FitBudget) -> Iterator[str]:
    if of.asked:
        yield f"keys and values: {f.long_size(of.bytes)} of {f.long_size(of.whole)} that all of it takes in full"
    if of.lose:
        yield f"no more than {of.lose:.1%} of what it is worth is lost{', if that is enough' if of.asked else ''}"
    first, more = f"{f.count(of.always)} first and newest tokens, {f.long_size(of.always_bytes)}", ""
    if of.always_bytes > of.bytes:
        more = f": more than the budget, by {f.long_size(of.always_bytes - of.bytes)}"
    yield f"always in full: {first}{more}; and the system prompt and what tools said"
    if of.is_late:
        yield f"until it has been read all of it is there: {f.long_size(plan.kv)} at most"
    yield f"beside it: {f.long_size(of.beside)}, {'' if of.is_late else 'of a pass, and '}what is remembered of tokens"
    for rung in of.rungs if of.asked else ():
        if rung.bits or rung.is_found:
            yield f"room for {f.count(rung.room)} tokens {_lies(rung)}, {f.long_size(rung.token)} each"
    if len(set(of.layers)) > 1:
        yield f"bytes of a token in full by layer: {_runs(of.layers)}"
    if of.asked:
        yield _shares(plan, of)
    again = f"; {f.count(of.again)} rows run once more for it" if of.again else ""
    yield f"a token's worth says {of.score}, by {of.by}{again}"
    yield _heads(of)
    read = f"recall reads {of.recall}" if of.recall else "all of it is read"
    yield f"what has no room lies on {of.elsewhere}: {read}" if of.elsewhere else GONE


def _shares(plan: FitPlan, of: FitBudget) -> str:
    shares = [f"{f.percent(rung.share)} {_lies(rung)}" for rung in of.rungs if rung.share]
    return f"were all {f.count(plan.ctx)} worth alike: {', '.join(shares)}"


def _lies(rung: FitRung) -> str:
    if rung.is_found:
        return "elsewhere"
    return {16: "in full", 0: "without room"}.get(rung.bits, f"in {rung.bits} bits")


def _heads(of: FitBudget) -> str:
    if of.headmap != "auto":
        given = f"heads weigh as {of.headmap} says"
        return given if of.headmap else "heads weigh alike: --set policy.headmap=auto finds out which need more"
    if of.is_mapped:
        return "heads weigh by a map of this model, which is there"
    takes = f"{f.count(of.passes)} short passes" if of.map_seconds is None else f"about {f.seconds(of.map_seconds)}"
    made = f"made when it is first run: {takes}"
    return f"heads weigh by a map of this model, {made}"


def _runs(sizes: list[int]) -> str:
    """Return `512 B in 0 to 4, 1.0 KiB in 5`: equal neighbours are merged."""
    said, first = list[str](), 0
    for i, size in enumerate(sizes):
        if i + 1 == len(sizes) or sizes[i + 1] != size:
            said.append(f"{f.count(size)} in {first if first == i else f'{first} to {i}'}")
            first = i + 1
    return ", ".join(said)
