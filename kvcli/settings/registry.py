"""Registry of methods by table and name: entry points of the group `kvcli.methods`, of kvcli and of other packages.

`"policy.mine" = "my_package:Mine"` in another package's `[project.entry-points."kvcli.methods"]` makes `policy.name =
"mine"` a method whose table is the frozen dataclass `Mine`. A method is imported only when a profile names it, and no
package can replace a method of kvcli.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import tomli

from kvcli.settings.schema import METHOD_TABLES

Registries = Mapping[str, Mapping[str, str]]  # table -> name of a method -> "module:Class"
GROUP = "kvcli.methods"


@cache
def registries() -> Registries:
    """Installed methods: kvcli's, the default of each table first, then those of other packages."""
    found: dict[str, dict[str, str]] = {table: {} for table in METHOD_TABLES}
    usual = [(f"{table}.{name}", _ours()[f"{table}.{name}"]) for table, (_, name) in METHOD_TABLES.items()]
    for dotted, target in (*usual, *sorted(_ours().items()), *sorted((point.name, point.value) for point in _others())):
        table, _, name = dotted.partition(".")
        found.setdefault(table, {}).setdefault(name, target)
    return found


@cache
def foreign() -> Mapping[str, str]:
    """Methods of other packages: "module:Class" -> the package and its version."""
    # excludes another name for a kvcli method
    points = [point for point in _others() if point.value not in _ours().values()]
    return {point.value: f"{point.dist.name} {point.dist.version}" for point in points if point.dist is not None}


@cache
def _ours() -> Mapping[str, str]:
    checkout = Path(__file__).parents[2] / "pyproject.toml"
    if checkout.is_file():  # the checkout is newer than its installed metadata, and there may be none installed
        project = tomli.loads(checkout.read_text(encoding="utf-8"))["project"]
        if project["name"] == "kvcli":
            points: Mapping[str, str] = project["entry-points"][GROUP]
            return points
    return {point.name: point.value for point in metadata.distribution("kvcli").entry_points.select(group=GROUP)}


@cache
def _others() -> list[metadata.EntryPoint]:
    found = metadata.entry_points(group=GROUP)
    return [point for point in found if point.dist is not None and point.dist.name != "kvcli"]
