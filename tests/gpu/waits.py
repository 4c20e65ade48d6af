"""How often the host waits for the device in a decoding step: as called, as torch says, and as the profiler sees it.

The first is what `tests/bench/waits.py` counts on any device. On CUDA torch warns of each operation that synchronises,
and the profiler counts the calls of the runtime: waits that a library makes by itself show there alone. Each side by
single operations, and recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from kvcli.engine.engine import run_to_end
from tests.bench.waits import SIDES, counted, opened, steps_of
from tests.gpu.clock import runtime_calls, waited
from tests.gpu.stage import On, Row, why

STEPS = 4


def run(on: On) -> Iterator[Row]:
    most: dict[str, float] = {}
    for side in list(SIDES)[: 2 if on.is_tiny else None]:
        for layers, is_recorded in product((3, 9)[: 1 if on.is_tiny else None], (False, True)):
            if on.left < 0:
                yield {"says": f"out of time at {side}"}
                return
            try:
                row: Row = counted(side, layers, STEPS, on.device, is_recorded=is_recorded)
                if not on.is_tiny:
                    row |= _on_cuda(side, layers, on.device, is_recorded)
            except Exception as error:
                yield {"side": side, "layers": layers, "is_recorded": is_recorded, "fault": why(error)}
                continue
            yield row
            most["called"] = max(most.get("called", 0.0), row["waits"])
            most["torch says"] = max(most.get("torch says", 0.0), row.get("said", 0.0))
    said = ", ".join(f"{kind} {value:.1f}" for kind, value in most.items())
    yield {"says": f"waits a step at most: {said}"}


def _on_cuda(side: str, layers: int, device: str, is_recorded: bool) -> Row:
    session, steps = opened(side, layers, device, is_recorded=is_recorded), steps_of(side, STEPS)

    def go() -> None:
        for _ in range(steps):
            run_to_end(session.step())

    said = waited(go)
    row: Row = {"said": said.total() / steps, "said_where": {line: n / steps for line, n in said.most_common()}}
    try:
        row["runtime"] = {call: n / steps for call, n in runtime_calls(go).items()}
    except Exception as error:  # no CUPTI, or not the right to use it
        row["runtime"] = why(error)
    return row
