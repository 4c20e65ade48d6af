"""Explain a plan's memory: how a precision budget is divided, or the component sizes and settings that reduce them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import Any

from kvcli.errors import KvcliError
from kvcli.fit.plan import Plan, PlannedModel, plan_on
from kvcli.fit.speed import at, by_rows
from kvcli.kv.cache.precision_budget import PrecisionBudget
from kvcli.methods.policies.precision.plan import level_paths, quality
from kvcli.schemas.fit import CalibrationDocument, FitBudget, FitChange, FitLevel, FitPart
from kvcli.schemas.heads import SAMPLE, TEXTS
from kvcli.settings.schema import size_of

# rows of each short pass after a text when a head map is made (heads/run.py): one pass without each head in turn, one
# with all heads, and two that verify the result
ROWS = 64


def budget(plan: Plan, has_map: bool, calibration: CalibrationDocument | None) -> FitBudget | None:
    """Return how the precision budget is divided; None if the profile has none. `has_map`: a head map of this model
    exists. `calibration`: measured times of this model, if any."""
    if (spent := plan.spending) is None:
        return None
    need, policy, memory = plan.need, plan.profile.policy, plan.profile.memory
    has_disk = size_of(memory.disk) > 0
    has_host = plan.room.kind != "cpu" and spent.has_place and (memory.host == "auto" or size_of(memory.host) > 0)
    elsewhere = ["host memory"] * has_host + ["the disk"] * has_disk
    always = min(need.context, plan.run.always)
    whole = spent.of_token * need.context
    return FitBudget.from_attributes(
        spent, policy, bytes=min(need.budget, whole), whole=whole, always=always, always_bytes=always * spent.of_token,
        beside=max(0, need.kv - (whole if spent.is_late else min(need.budget, whole))),
        levels=_levels(spent, need.context, need.budget), layers=[spent.whole(i) for i in range(len(spent.shapes))],
        by=policy.scorer.by, again=policy.footprint(need.context).again,
        is_mapped=has_map if policy.headmap == "auto" else bool(policy.headmap), told=spent.describe,
        passes=TEXTS * (3 + spent.heads) if policy.headmap == "auto" else 0,
        map_seconds=_to_map(spent.heads, calibration) if policy.headmap == "auto" else None,
        recall=plan.profile.sparse.describe_read if elsewhere else "", elsewhere=" and ".join(elsewhere),
    )  # fmt: skip


def _levels(spent: PrecisionBudget, n: int, most: float) -> list[FitLevel]:
    costs, bits = spent.by_level, [16, *spent.bits, *([0] if spent.has_place else []), 0]
    shares = _placed(spent, n, most / n)
    return [
        FitLevel(
            bits=b,
            is_found=not b and level < spent.last,
            token=round(cost),
            room=_room(spent, level, cost, most),
            share=share,
        )
        for level, (b, cost, share) in enumerate(zip(bits, costs, shares, strict=True))
    ]


def _room(spent: PrecisionBudget, level: int, cost: float, most: float) -> int:
    """Return the tokens that would fit if all were at this precision level."""
    held = spent.holds if spent.has_place and level == spent.last - 1 else None
    room = int(most / cost) if cost else held or 0
    return room if held is None else min(room, held)


def _placed(spent: PrecisionBudget, n: int, each: float) -> list[float]:
    """Return the share of tokens per precision level if all scores are equal, with at most as many offloaded tokens as
    fit there, as the policy does."""
    costs, left, there = spent.by_level, quality(spent), spent.last - 1
    shares = alike(costs, left, each)
    if not spent.has_place or spent.holds is None or shares[there] * n <= spent.holds:
        return shares
    full = alike([*costs[:there], inf, costs[-1]], left, each)
    shares[-1] += shares[there] - spent.holds / n
    shares[there] = spent.holds / n
    return max(shares, full, key=lambda by: sum(share * of for share, of in zip(by, left, strict=True)))


def alike(costs: list[float], left: list[float], each: float) -> list[float]:
    """Return the share of tokens per precision level if all scores are equal and each token has `each` bytes. The
    result mixes two neighbouring levels of those on the optimal path. `left`: the quality left at each level."""
    path = [0, *level_paths(costs, left)[0].to]
    shares = [0.0] * len(costs)
    for upper, lower in pairwise(path):
        if costs[lower] <= each:
            shares[upper] = min(1.0, (each - costs[lower]) / (costs[upper] - costs[lower]))
            shares[lower] = 1 - shares[upper]
            return shares
    shares[path[-1]] = 1.0
    return shares


def _to_map(heads: int, calibration: CalibrationDocument | None) -> float | None:
    """Return the seconds that making a head map takes; None if this model's passes were not timed."""
    if calibration is None or calibration.model is None:
        return None
    grid = by_rows(calibration.model.passes)
    most = max(grid)
    reading = -(-SAMPLE // most) * at(grid[most], SAMPLE)
    short = at(grid[min((rows for rows in grid if rows >= ROWS), default=most)], SAMPLE)
    return TEXTS * (reading + (3 + heads) * short)


def parts(plan: Plan, subject: PlannedModel) -> list[FitPart]:
    """Return the memory components, largest first, each with the settings of any profile that make it smaller."""
    need = plan.need
    names = {
        "weights": need.weights,
        "KV cache": need.kv,
        "draft model": need.draft,
        "runtime": need.base,
        "activations": need.working,
        "loading": need.loading_peak,
    }
    found = {name: FitPart(name=name, bytes=size, changes=[]) for name, size in names.items() if size}
    for name, words, changes in _ways(plan):
        if name in found:
            try:
                tried = plan_on(subject, plan.profile.replace(**changes), plan.room, need.context, plan.facts)
            except KvcliError:
                continue
            if tried.total < plan.total:
                found[name].changes.append(FitChange(type=words, total=tried.total, ctx=need.context))
    return sorted(found.values(), key=lambda part: -part.bytes)


def _ways(plan: Plan) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the component that gets smaller, the words to type, and the change."""
    if plan.profile.load.quant == "none":
        for quant in ("int8", "int4"):
            yield "weights", f"--quant {quant}", {"load": {"quant": quant}}
    if plan.profile.policy.compression_interval is None:
        # a quarter: a budget given as a share is in memory in full until prefill ends
        asked = f"{max(1, plan.need.kv >> 22)}MiB"
        lossy = {"exactness": "approx", "policy": {"name": "budget"}}
        yield "KV cache", f"--budget {asked}", {**lossy, "memory": {"budget": asked}}
    yield "KV cache", "--set kv.k_bits=8 --set kv.v_bits=8", {"kv": {"k_bits": 8, "v_bits": 8}}
    yield "draft model", "--spec off", {"spec": {"method": "off"}}
    yield "activations", "--set prefill.chunk=256", {"prefill": {"chunk": 256}}
