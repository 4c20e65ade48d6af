"""Where a plan's memory goes: how a budget is spent, or what takes the bytes and which setting changes that."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

from kvcli.errors import KvcliError
from kvcli.fit.auto_placement import plan_on
from kvcli.fit.speed import at, by_rows
from kvcli.methods.policies.precision.plan import level_paths, quality
from kvcli.schemas.fit import FitBudget, FitChange, FitPart, FitRung
from kvcli.schemas.heads import SAMPLE, TEXTS
from kvcli.settings.schema import size_of

if TYPE_CHECKING:
    from kvcli.fit.plan import Plan, PlannedModel
    from kvcli.kv.cache.precision_budget import PrecisionBudget
    from kvcli.schemas.fit import CalibrationDocument

# of the short passes behind a text of which a head map is made (heads/run.py): one without each head in turn, one with
# all of them, and two that check what was found
ROWS = 64


def budget(plan: Plan, has_map: bool, calibration: CalibrationDocument | None) -> FitBudget | None:
    """None for a profile without one. `has_map`: the model's own head map was made before. `calibration`: what was
    measured for it."""
    if (spent := plan.spending) is None:
        return None
    need, policy, memory = plan.need, plan.profile.policy, plan.profile.memory
    has_disk = size_of(memory.disk) > 0
    has_host = plan.room.kind != "cpu" and spent.has_place and (memory.host == "auto" or size_of(memory.host) > 0)
    elsewhere = ["host memory"] * has_host + ["the disk"] * has_disk
    always = min(need.context, plan.run.always)
    whole = spent.of_token * need.context
    return FitBudget.from_attributes(
        spent,
        policy,
        bytes=min(need.budget, whole),
        whole=whole,
        always=always,
        always_bytes=always * spent.of_token,
        beside=max(0, need.kv - (whole if spent.is_late else min(need.budget, whole))),
        rungs=_rungs(spent, need.context, need.budget),
        layers=[spent.whole(i) for i in range(len(spent.shapes))],
        by=policy.scorer.by,
        again=plan.run.again(need.context),
        is_mapped=has_map if policy.headmap == "auto" else bool(policy.headmap),
        passes=TEXTS * (3 + spent.heads) if policy.headmap == "auto" else 0,
        map_seconds=_to_map(spent.heads, calibration) if policy.headmap == "auto" else None,
        recall=plan.profile.recall.describe_read if elsewhere else "",
        elsewhere=" and ".join(elsewhere),
    )


def _rungs(spent: PrecisionBudget, n: int, most: float) -> list[FitRung]:
    costs, bits = spent.by_rung, [16, *spent.bits, *([0] if spent.has_place else []), 0]
    shares = _placed(spent, n, most / n)
    return [
        FitRung(
            bits=b,
            is_found=not b and rung < spent.last,
            token=round(cost),
            room=_room(spent, rung, cost, most),
            share=share,
        )
        for rung, (b, cost, share) in enumerate(zip(bits, costs, shares, strict=True))
    ]


def _room(spent: PrecisionBudget, rung: int, cost: float, most: float) -> int:
    """Tokens, were all of them on this rung."""
    held = spent.holds if spent.has_place and rung == spent.last - 1 else None
    room = int(most / cost) if cost else held or 0
    return room if held is None else min(room, held)


def _placed(spent: PrecisionBudget, n: int, each: float) -> list[float]:
    """Shares of tokens worth the same, by rung; no more elsewhere than have room there, as the policy has it."""
    costs, left, there = spent.by_rung, quality(spent), spent.last - 1
    shares = alike(costs, left, each)
    if not spent.has_place or spent.holds is None or shares[there] * n <= spent.holds:
        return shares
    full = alike([*costs[:there], inf, costs[-1]], left, each)
    shares[-1] += shares[there] - spent.holds / n
    shares[there] = spent.holds / n
    return max(shares, full, key=lambda by: sum(share * of for share, of in zip(by, left, strict=True)))


def alike(costs: list[float], left: list[float], each: float) -> list[float]:
    """Of tokens that are worth the same, with `each` bytes for one of them: the share on each rung. A mixture of two
    next to each other among those that are ever best; `left`: of its worth, by rung."""
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
    """Seconds that making a head map takes; None where passes of this model were not timed."""
    if calibration is None or calibration.model is None:
        return None
    grid = by_rows(calibration.model.passes)
    most = max(grid)
    reading = -(-SAMPLE // most) * at(grid[most], SAMPLE)
    short = at(grid[min((rows for rows in grid if rows >= ROWS), default=most)], SAMPLE)
    return TEXTS * (reading + (3 + heads) * short)


def parts(plan: Plan, subject: PlannedModel) -> list[FitPart]:
    """What takes memory, the most first, and what of all that a profile can have makes it smaller."""
    need = plan.need
    names = {
        "weights": need.weights,
        "keys and values": need.kv,
        "what drafts": need.draft,
        "program": need.base,
        "working memory": need.working,
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
    """What is smaller then, what to type, and the change."""
    if plan.profile.load.quant == "none":
        for quant in ("int8", "int4"):
            yield "weights", f"--quant {quant}", {"load": {"quant": quant}}
    if plan.profile.policy.every is None:
        asked = f"{max(1, plan.need.kv >> 22)}MiB"  # a quarter: a share is in memory whole until it has been read
        lossy = {"exactness": "approx", "policy": {"name": "budget"}}
        yield "keys and values", f"--budget {asked}", {**lossy, "memory": {"budget": asked}}
    yield "keys and values", "--set kv.k_bits=8 --set kv.v_bits=8", {"kv": {"k_bits": 8, "v_bits": 8}}
    yield "what drafts", "--spec off", {"spec": {"method": "off"}}
    yield "working memory", "--set prefill.chunk=256", {"prefill": {"chunk": 256}}
