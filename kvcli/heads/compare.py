"""Compare two head profiles: differences per head, and rank correlation."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import StatisticsError, correlation
from typing import TYPE_CHECKING

from kvcli.errors import BadInput
from kvcli.heads.headmap import PROFILE, read_map
from kvcli.schemas.heads import HeadsCompare

if TYPE_CHECKING:
    from kvcli.schemas.heads import HeadsDocument


def compare(document: HeadsDocument, path: Path, shown: str, scalar: str) -> HeadsCompare:
    """Compare `document` with the profile in `path`, which may be another tool's head map. Raises BadInput."""
    theirs, policies = _tables(path, shown)
    name = scalar if scalar in theirs and scalar in document.scalars else "retrieval"
    mine, other = document.scalars[name], theirs[name]
    if [len(row) for row in other] != [len(row) for row in mine]:
        raise BadInput(
            f"{shown} is a head map of another model",
            code="bad_headmap",
            lines=[f"it has {len(other)} layers of {len(other[0])} KV heads, this one {len(mine)} of {len(mine[0])}"],
        )
    difference = [[round(a - b, 6) for a, b in zip(x, y, strict=True)] for x, y in zip(mine, other, strict=True)]
    flat = [value for row in mine for value in row], [value for row in other for value in row]
    changed = None
    if document.policy is not None and policies is not None:
        now = [[document.policy.candidates[c] if c >= 0 else "" for c in row] for row in document.policy.chosen]
        changed = sum(a != b for x, y in zip(now, policies, strict=True) for a, b in zip(x, y, strict=True))
    return HeadsCompare(name=shown, scalar=name, spearman=spearman(*flat), changed=changed, difference=difference)


def _tables(path: Path, shown: str) -> tuple[dict[str, list[list[float]]], list[list[str]] | None]:
    """Return the tables of scalars by name, and the policy of each head if the run chose policies."""
    tables = {"retrieval": read_map(path, shown)}
    file = path / PROFILE if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return tables, None
    held = json.loads(file.read_text(encoding="utf-8"))
    tables = {**held.get("scalars", {}), **tables}
    policy = held.get("policy")
    if not policy:
        return tables, None
    names = policy["candidates"]
    return tables, [[names[c] if c >= 0 else "" for c in row] for row in policy["chosen"]]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the rank correlation, ties sharing their mean rank; None if all values of `a` or of `b` are equal."""
    try:
        return max(-1.0, min(1.0, correlation(_ranks(a), _ranks(b))))
    except StatisticsError:  # no spread, or a single head
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [(bisect_left(order, value) + bisect_right(order, value) - 1) / 2 for value in values]
