"""Load and speed of an inference server, from its Prometheus metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import tomli

TABLE = tomli.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_SAMPLE = re.compile(r"(?m)^([a-zA-Z_:][\w:]*)(?:\{.*\})?[ \t]+([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?!\S)")


def parsed(text: str) -> Mapping[str, float]:
    """Return the values of the text format of Prometheus by name, each summed over its labels, such as engine ranks."""
    values = defaultdict[str, float](float)
    for name, number in _SAMPLE.findall(text):
        values[name] += float(number)
    return dict(values)


def figures(now: Mapping[str, float], before: Mapping[str, float], seconds: float) -> dict[str, float | None]:
    """Return the columns of metrics.toml, for the `seconds` between two looks; None = the server has no such metric."""
    # a counter that fell began again
    grown = {name: n - (old if (old := before.get(name, 0.0)) <= n else 0.0) for name, n in now.items()}
    found = dict[str, float | None]()
    for kind, values, whole in (("now", now, 1.0), ("per_second", grown, seconds), ("quotient", grown, None)):
        for column, names in TABLE[kind].items():
            each = ((one, whole) if isinstance(one, str) else (one[0], grown.get(one[1], 0.0)) for one in names)
            found[column] = next((values[part] / of for part, of in each if part in values and of), None)
    return found
