"""Load and speed of an inference server, from its Prometheus metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import tomli

TABLE = tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?[ \t]+([-+.\w]+)", re.MULTILINE)


def parsed(text: str) -> Mapping[str, float]:
    """Return the values of the text format of Prometheus by name, each summed over its labels, such as engine ranks."""
    values = defaultdict[str, float](float)
    for name, number in _SAMPLE.findall(text):
        with suppress(ValueError):
            values[name] += float(number)
    return values


def figures(now: Mapping[str, float], before: Mapping[str, float], seconds: float) -> dict[str, float | None]:
    """Return the columns of metrics.toml, for the `seconds` between two looks; None = the server has no such metric."""

    def grown(name: str) -> float:
        old = before.get(name, 0.0)
        return now[name] - (old if old <= now[name] else 0.0)  # a counter that fell began again

    found = dict[str, float | None]()
    for column, names in TABLE["now"].items():
        found[column] = next((now[name] for name in names if name in now), None)
    for column, names in TABLE["per_second"].items():
        found[column] = next((grown(name) / seconds for name in names if name in now and seconds > 0), None)
    for column, pairs in TABLE["quotient"].items():
        quotients = (grown(part) / whole for part, of in pairs if {part, of} <= now.keys() and (whole := grown(of)) > 0)
        found[column] = next(quotients, None)
    return found
