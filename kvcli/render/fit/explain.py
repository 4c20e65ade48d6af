"""Explain the memory of a plan in lines: how its budget is spent, or its largest parts and how to reduce them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.terminal import Span, folded, styled

if TYPE_CHECKING:
    from kvcli.schemas.fit import FitBudget, FitLevel, FitPart, FitPlan

GONE = "dropped tokens are lost; to keep them on disk: --set memory.disk=8GiB --set sparse.method=sketch"


def explained(plan: FitPlan, width: int) -> Iterator[list[Span]]:
    """Yield a title, then points of one or more lines, at most `width` columns wide."""
    budget, at = plan.budget, f"{plan.profile} at {f.count(plan.ctx)}"
    asked = f"memory.budget = {budget.asked}" if budget is not None and budget.asked else "memory.max_loss"
    what = "memory use" if budget is None else f"use of {asked}"
    yield from styled(f"{at}: {what}", width, "bold")
    for line in _parts(plan, plan.parts or []) if budget is None else _budget(plan, budget):
        for i, words in enumerate(folded(line, width, 4)):
            yield [(f"{'    ' if i else '  '}{words}", "")]


def _parts(plan: FitPlan, parts: list[FitPart]) -> Iterator[str]:
    for part in parts:
        ways = [f"{change.type} (peak {f.long_size(change.total)})" for change in part.changes]
        yield f"{part.name} {f.long_size(part.bytes)}{', reduced by ' if ways else ''}{' or '.join(ways)}"
    yield f"total {f.long_size(plan.total)}"


def _budget(plan: FitPlan, of: FitBudget) -> Iterator[str]:
    if of.asked:
        yield f"KV cache: {f.long_size(of.bytes)} of {f.long_size(of.whole)} at full precision"
    if of.lose:
        yield f"at most {of.lose:.1%} of the total score is lost{', if the budget allows it' if of.asked else ''}"
    first, more = f"{f.count(of.always)} first and newest tokens, {f.long_size(of.always_bytes)}", ""
    if of.always_bytes > of.bytes:
        more = f", which exceeds the budget by {f.long_size(of.always_bytes - of.bytes)}"
    yield f"always at full precision: {first}{more}; also the system prompt and tool output"
    if of.is_late:
        yield f"during prefill the cache is uncompressed: up to {f.long_size(plan.kv)}"
    yield f"in addition: {f.long_size(of.beside)} for {'' if of.is_late else 'a forward pass and '}the scores of tokens"
    for level in of.levels if of.asked else ():
        if level.bits or level.is_found:
            yield f"{_lies(level)}: up to {f.count(level.room)} tokens, {f.long_size(level.token)} each"
    if len(set(of.layers)) > 1:
        yield f"bytes per token at full precision, by layer: {_runs(of.layers)}"
    if of.asked:
        yield _shares(plan, of)
    again = f"; {f.count(of.again)} prompt tokens are computed twice for it" if of.again else ""
    yield f"importance of tokens: {of.score}, by {of.by}{again}"
    yield _heads(of)
    read = f"sparse attention reads {of.recall}" if of.recall else "all of them are read"
    yield f"tokens beyond the budget are stored on {of.elsewhere}: {read}" if of.elsewhere else GONE


def _shares(plan: FitPlan, of: FitBudget) -> str:
    shares = [f"{f.percent(level.share)} {_lies(level)}" for level in of.levels if level.share]
    return f"at equal importance, of {f.count(plan.ctx)} tokens: {', '.join(shares)}"


def _lies(level: FitLevel) -> str:
    if level.is_found:
        return "offloaded"
    return {16: "at full precision", 0: "dropped"}.get(level.bits, f"in {level.bits} bits")


def _heads(of: FitBudget) -> str:
    if of.headmap != "auto":
        given = f"head weights from {of.headmap}"
        return (
            given if of.headmap else "all heads have equal weight; --set policy.headmap=auto measures which need more"
        )
    if of.is_mapped:
        return "head weights from the saved map of this model"
    takes = f"{f.count(of.passes)} short passes" if of.map_seconds is None else f"about {f.seconds(of.map_seconds)}"
    return f"head weights from a map of this model, measured at its first run: {takes}"


def _runs(sizes: list[int]) -> str:
    """Return `512 B in 0 to 4, 1.0 KiB in 5`: equal neighbours are merged."""
    said, first = list[str](), 0
    for i, size in enumerate(sizes):
        if i + 1 == len(sizes) or sizes[i + 1] != size:
            said.append(f"{f.count(size)} in {first if first == i else f'{first} to {i}'}")
            first = i + 1
    return ", ".join(said)
