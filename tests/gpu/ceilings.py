"""What a card can do at best: the rate of a copy and of a plain read, and what a launch in a replayed graph adds.

A launch: one of 200 small kernels that wait for each other, of one program and of one a processor; and the same where
each begins before the one in front has ended (programmatic dependent launch), on cards of compute capability 9.0 and
above. A read is not a copy: half of what a copy moves is written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch

from kvcli.engine.cuda_graphs.capture import CudaGraphs
from tests.gpu.clock import copy_rate, spread, times
from tests.gpu.stage import On, Row, interpret_on_a_cpu, why

LAUNCHES = 200
PER = (2, 4, 8)  # programs a processor that read


def _recorded(work: Callable[[], object], on: On) -> Callable[[], object]:
    return work if on.is_tiny else CudaGraphs(torch.device(on.device)).record(work)[1]


def _read(on: On) -> Iterator[Row]:
    from tests.gpu import ceilings_kernels as kernels

    nbytes, processors = (1 << 20, 2) if on.is_tiny else (4 << 30, _processors(on))
    a = torch.ones(nbytes // 4, dtype=torch.int32, device=on.device)
    for per in PER[: 1 if on.is_tiny else None]:
        programs, out = (
            per * processors,
            torch.empty(per * processors, kernels.PIECE, dtype=torch.int32, device=on.device),
        )
        turn = _recorded(lambda out=out, programs=programs: kernels.read(a, out, programs), on)  # type: ignore[misc]
        took = statistics.median(times(turn, on.device, 1 if on.is_tiny else 10))
        yield {"what": "plain read", "programs_a_processor": per, "gb_s": nbytes / took / 1e9}


def _launches(on: On) -> Iterator[Row]:
    from tests.gpu import ceilings_kernels as kernels

    processors = 1 if on.is_tiny else _processors(on)
    x, n = torch.zeros(kernels.PIECE * processors, device=on.device), 2 if on.is_tiny else LAUNCHES
    can = not on.is_tiny and torch.cuda.get_device_capability(on.device) >= (9, 0)
    for programs in sorted({1, processors}):
        for early in (False, True) if can else (False,):
            row: Row = {"what": "launch", "programs": programs, "early": early}
            try:
                turn = _recorded(lambda p=programs, e=early: [kernels.touch(x, p, e) for _ in range(n)], on)  # type: ignore[misc]
                row["us"] = [round(1e3 * ms / n, 3) for ms in spread(times(turn, on.device, 1 if on.is_tiny else 15))]
            except Exception as error:
                row["fault"] = why(error)
            yield row


def _processors(on: On) -> int:
    return int(torch.cuda.get_device_properties(on.device).multi_processor_count)


def run(on: On) -> Iterator[Row]:
    interpret_on_a_cpu(on)
    copied = copy_rate(on.device, 1 << 20 if on.is_tiny else 4 << 30) / 1e9
    yield {"what": "copy", "gb_s": copied}
    rows = []
    for part in (_read, _launches):
        for row in part(on):
            rows.append(row)
            yield row
    best = max((row["gb_s"] for row in rows if "gb_s" in row), default=0.0)
    us = ", ".join(f"{row['us'][1]:.2f}{' early' if row['early'] else ''}" for row in rows if "us" in row)
    yield {"says": f"copy {copied:.0f} GB/s, plain read {best:.0f}; a launch {us} us"}
