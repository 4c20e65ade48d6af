"""Estimate the time to the first token and the decoding speed from measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvcli.schemas.fit import CalibrationDocument, FitSpeed, FitSplit, PassTime

if TYPE_CHECKING:
    from kvcli.fit.plan import Plan
    from kvcli.models.shape import Shape


LINK = 20e9  # bytes per second to a GPU, if they were not measured: PCIe 4
BANDWIDTH = 40e9  # bytes per second of host memory, if it was not measured: about two channels of DDR4


def speed(
    plan: Plan, shape: Shape, calibration: CalibrationDocument | None, host: CalibrationDocument | None = None
) -> FitSpeed | None:
    """Estimate the speed of a prompt that fills the context and of plain decoding after it; None without measurements.

    `host`: calibration of the CPU that runs some layers beside a GPU.
    """
    parts, context = split(plan, host), plan.need.context
    is_split = parts is not None and parts.layers < parts.of
    if calibration is None or (is_split and host is None):
        return None
    policy, again = plan.run.policy, plan.profile.policy.footprint(context).again
    kept = policy.footprint(context)
    held = context if plan.profile.memory.demotes else kept.slots  # demoted slots are read in their tier
    if calibration.model is not None and not is_split:
        grid = by_rows(calibration.model.passes)
        rows = max(grid)
        pieces = -(-context // rows)
        first = sum(at(grid[rows], policy.footprint(i * rows).peak) for i in range(pieces))
        first += again / rows * at(grid[rows], kept.peak)
        step = at(grid[min(grid)], held)
        return FitSpeed(first_token=first + step, tok_s=1 / step, basis="model")
    rereading = again / context * rereading_flop(shape, context)
    first = (reading_flop(shape, context) + rereading) / _flops(plan, calibration)
    step = (plan.run.weights.read + shape.kv_per_token * plan.run.cache.number * held) / calibration.bandwidth
    far = plan.run.far_experts * shape.active / max(1, shape.experts)  # read across the bus, at its rate
    step += far / calibration.links.get("to_device_pinned", LINK) - far / calibration.bandwidth
    if is_split and parts is not None and host is not None:
        above = parts.layers / parts.of
        first *= above + (1 - above) * _flops(plan, calibration) / _flops(plan, host)
        step = step * above + parts.seconds
    return FitSpeed(first_token=first + step, tok_s=1 / step, basis="machine")


def _flops(plan: Plan, of: CalibrationDocument) -> float:
    return of.gemm.get("float32" if plan.run.number > 2 else "bfloat16", max(of.gemm.values()))


def split(plan: Plan, host: CalibrationDocument | None) -> FitSplit | None:
    """Return the cost of the layers that the CPU runs beside a GPU, from its bandwidth; None if there are none."""
    if (layers := plan.run.on_card) is None:
        return None
    heavy, below = plan.run.weights, plan.run.shape.layers - layers
    read = int(heavy.active * sum(heavy.layers[:below])) + (plan.need.host if below else 0)
    bandwidth = host.bandwidth if host is not None else BANDWIDTH
    return FitSplit(
        layers=layers,
        of=plan.run.shape.layers,
        read=read,
        seconds=read / bandwidth,
        bandwidth=bandwidth,
        basis="assumed" if host is None else "machine",
        whole_with=plan.whole_with,
    )


def reading_flop(shape: Shape, n: int) -> float:
    """Count the FLOP of n prompt tokens: two per weight, plus scores and sums over earlier tokens that a layer sees."""
    layers = zip(shape.stores, shape.visible(n), strict=True)
    # a layer with a window sees a full window per token, not a triangle
    pairs = sum((of.key + of.value) * seen * (1 if seen == n else 2) for of, seen in layers)
    return 2.0 * shape.linear_active * n + shape.heads * n * pairs


def rereading_flop(shape: Shape, n: int) -> float:
    """Count the FLOP of n rows after n stored tokens, all of which each row sees: twice the triangle."""
    linear = 2.0 * shape.linear_active * n
    return linear + 2 * (reading_flop(shape, n) - linear)


def by_rows(passes: Sequence[PassTime]) -> dict[int, list[tuple[int, float]]]:
    """Return rows -> list of (context, seconds), by rising context."""
    found: dict[int, list[tuple[int, float]]] = {}
    for one in sorted(passes, key=lambda p: p.context):
        found.setdefault(one.rows, []).append((one.context, one.seconds))
    return found


def at(line: Sequence[tuple[int, float]], context: float) -> float:
    """Return the seconds at a context: interpolated, extrapolated at the end, never below the fastest measured time."""
    if len(line) == 1:
        return line[0][1]
    i = next((i for i in range(1, len(line) - 1) if context <= line[i][0]), len(line) - 1)
    (x0, y0), (x1, y1) = line[i - 1], line[i]
    return max(min(y for _, y in line), y0 + (y1 - y0) * (context - x0) / (x1 - x0))


def units(passes: Sequence[PassTime], context: int) -> Mapping[int, float]:
    """Return rows -> pass time relative to a pass of one row at this context; a drafter starts with these.

    The fastest measurement of each is used, because other programs disturbed it least.
    """
    fastest = by_rows([one.model_copy(update={"seconds": one.low}) for one in passes])
    plain = fastest.pop(1, None)
    return {rows: at(line, context) / at(plain, context) for rows, line in fastest.items()} if plain else {}
