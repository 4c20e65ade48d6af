"""The core of the tests: those that find most faults a second. Other cases are marked `slow`; `--whole` marks none.

Functions whose cases take at most `DEAR` seconds each are in it with all cases. Each other function has half a second
of CPU time: it goes to cases that differ in most words of their names, or to a single case if one takes at most
`DEAREST` seconds, else to none. `tests/seconds.json` has the CPU seconds of a case by function; `--whole --weigh`
writes those of the tests that it runs. Cases marked `core` are always in the core.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

import pytest

from tests.covering import spread

SECONDS = Path(__file__).with_name("seconds.json")
ALLOWANCE = 0.5  # CPU seconds of one function
DEAREST = 2.0  # CPU seconds of a case; a function whose cases take more has none in the core
DEAR = 0.03  # CPU seconds of a case; a function whose cases take at most this has all of them in the core


def cpu_seconds() -> float:
    """CPU time of this process and of the children it waited for."""
    return sum(os.times()[:4])


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def leave_out(items: Iterable[pytest.Item], seconds: Mapping[str, float], part: tuple[int, int] | None = None) -> None:
    """Mark as slow the cases that the core has no time for. `part`: (K, N) = leave the Kth of N parts unmarked."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if function_of(item.nodeid) in seconds and not any(map(item.get_closest_marker, ("slow", "core"))):
            cases[function_of(item.nodeid)].append(item)
    for name, same in cases.items():
        words = [tuple(item.nodeid.split("-")) for item in same]
        chosen = spread(words, max(seconds[name] <= DEAREST, int(ALLOWANCE / seconds[name])))
        for item, named in zip(same, words, strict=True):
            if named not in chosen and not is_in_part(item.nodeid, part):
                item.add_marker(pytest.mark.slow)


def part_of(text: str) -> tuple[int, int]:
    """Read "K/N", part K of N, counted from 0. Raises ValueError."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise ValueError(f"no part K/N: {text!r}")
    return int(number), int(of)


def is_in_part(nodeid: str, part: tuple[int, int] | None) -> bool:
    return part is not None and zlib.crc32(nodeid.encode()) % part[1] == part[0]


class Weigher:
    """Writes the CPU seconds of a case for each function whose cases take more than `DEAR`: their median."""

    def __init__(self) -> None:
        self._cases = defaultdict[str, list[float]](list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._cases[function_of(report.nodeid)].extend(each for name, each in report.user_properties if name == "cpu")

    def pytest_sessionfinish(self) -> None:
        known: dict[str, float] = json.loads(SECONDS.read_text(encoding="utf-8"))
        known |= {name: round(median(cases), 2) for name, cases in self._cases.items() if cases}
        dear = {name: seconds for name, seconds in sorted(known.items()) if seconds > DEAR}
        SECONDS.write_text(json.dumps(dear, indent=0) + "\n", encoding="utf-8")
