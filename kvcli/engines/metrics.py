"""Load and speed of an inference server, from its Prometheus metrics."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tomli

TABLE = tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+([-+.\w]+)(?:\s+-?\d+)?$")


@dataclass(frozen=True)
class Look:
    """The metrics of a server at one time: name -> sum over its labels, such as the ranks of an engine."""

    seconds: float
    values: Counter[str]

    @classmethod
    def of(cls, text: str, seconds: float) -> Look:
        """Parse the text format of Prometheus. Lines of another form are left out."""
        values = Counter[str]()
        for line in text.splitlines():
            if match := _SAMPLE.match(line.strip()):
                try:
                    values[match[1]] += float(match[2])  # type: ignore[assignment]
                except ValueError:
                    continue
        return cls(seconds, values)


def figures(now: Look, before: Look | None = None) -> dict[str, float | None]:
    """Return the columns: of the time between two looks, or since the server began; None = it has no such metric."""
    start, old = (before.seconds, before.values) if before is not None else (now.seconds, Counter[str]())

    def grown(name: str) -> float:
        return max(0.0, now.values[name] - (old[name] if old[name] <= now.values[name] else 0.0))  # it began again

    found = dict[str, float | None]()
    for column, names in TABLE["now"].items():
        found[column] = next((float(now.values[name]) for name in names if name in now.values), None)
    for column, names in TABLE["per_second"].items():
        passed = now.seconds - start
        found[column] = next((grown(name) / passed for name in names if name in now.values and passed > 0), None)
    for column, pairs in TABLE["quotient"].items():
        quotients = (grown(part) / whole for part, of in pairs if part in now.values and (whole := grown(of)) > 0)
        found[column] = next(quotients, None)
    return found
