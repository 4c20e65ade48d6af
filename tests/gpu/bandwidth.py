"""How much of the memory's rate each fused op gets from cold memory, by rows; and what libraries get in its place.

Of the rate at which the device copies, read and written. Several sets of inputs take turns, more bytes than any cache
holds, so that each call finds none of its own there. What a call reads is what it must: weights, or keys and values.
A turn is recorded once and replayed, as passes are: of a kernel of ten microseconds a host sees the launch alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from kvcli.engine.cuda_graphs.capture import CudaGraphs
from tests.gpu.clock import copy_rate, times
from tests.gpu.ops import OURS, THEIRS, TINY, Make, Size
from tests.gpu.stage import On, Row, interpret_on_a_cpu, why

COLD = 200 << 20  # bytes: three times the largest second-level cache
CALLS = 40  # in a turn at least: what its own launch costs, 15 microseconds on an H200, is shared by so many
ROWS = (1, 16, 32)


def _rate(make: Make, size: Size, n_rows: int, on: On) -> tuple[float, float]:
    """Microseconds of a call, and bytes a second."""
    g = torch.Generator(on.device).manual_seed(0)
    first = make(size, g)
    more = 1 if on.is_tiny or not first.nbytes else COLD // first.nbytes + 1
    calls = [op.of(range(n_rows)) for op in (first, *(make(size, g) for _ in range(more)))]
    calls *= 1 if on.is_tiny else CALLS // len(calls) + 1

    def turn() -> None:
        for call in calls:
            call()

    replay = turn if on.is_tiny else CudaGraphs(torch.device(on.device)).record(turn)[1]
    took = statistics.median(times(replay, on.device, 1 if on.is_tiny else 20, 1)) / len(calls)
    return 1e6 * took, first.nbytes / took


def run(on: On) -> Iterator[Row]:
    interpret_on_a_cpu(on)
    copied = copy_rate(on.device, 1 << 20 if on.is_tiny else 4 << 30)
    said = []
    for kind, ops in (("ours", OURS), ("libraries", THEIRS)):
        for name, make in ops.items():
            for slots in (TINY.slots,) if on.is_tiny or "atten" not in name else (8192, 32_768):
                size = TINY if on.is_tiny else Size(slots=slots)
                for n in ROWS[: 1 if on.is_tiny else None]:
                    if on.left < 0:
                        yield {"says": f"out of time at {name}; of the copy rate: {', '.join(said)}"}
                        return
                    row: Row = {"op": name, "kind": kind, "rows": n, "slots": slots}
                    try:
                        us, rate = _rate(make, size, n, on)
                        row |= {"us": us, "gb_s": rate / 1e9, "of_copy": rate / copied}
                    except ImportError as error:
                        row["not_here"] = why(error)
                    except Exception as error:
                        row["fault"] = why(error)
                    else:
                        said += [f"{name} {rate / copied:.2f}"] if n == 1 and kind == "ours" else []
                    yield row
    yield {"says": f"of the copy rate, one row: {', '.join(said)}"}
