"""Head map: a number from 0 to 1 for each head; heads from 0.5 on need the full KV cache.

Scores of different probes have no common unit, and KL spans many powers of ten. So a head's number is s / (s + t),
where t is the lowest score among the top heads that together have most of the score sum. These heads get 0.5 or more.
"""

from __future__ import annotations

import io
import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import StatisticsError, correlation

import torch
from torch import Tensor

from kvcli.errors import BadInput
from kvcli.policies.scoring.headmap import read_headmap
from kvcli.schemas.heads import HeadsCompare, HeadsDocument

CARRY = 0.9  # share of the score sum in the heads that keep the full cache
FULL = 0.5  # heads from this number on keep the full cache


def headmap(score: Tensor, carry: float = CARRY, least: int = 0) -> Tensor:
    """Convert scores [L, K], not negative, to a head map [L, K] in 0..1; all 0 if all scores are 0.

    At least `least` heads get 0.5 or more, if so many have a score above 0.
    """
    ranked = score.flatten().double().sort(descending=True).values
    total = float(ranked.sum())
    if total <= 0:
        return torch.zeros_like(score, dtype=torch.float64)
    needed = int((ranked.cumsum(0) < carry * total * (1 - 1e-9)).sum()) + 1
    needed = max(needed, min(least, int((ranked > 0).sum())))
    threshold = float(ranked[needed - 1])
    value = score.double()
    return value / (value + threshold)


def full_heads(heads: Tensor) -> list[tuple[int, int]]:
    """Return (layer, KV head) of the heads that need the full KV cache, highest number first."""
    order = heads.flatten().argsort(descending=True, stable=True).tolist()
    return [divmod(i, heads.shape[1]) for i in order if float(heads.flatten()[i]) >= FULL]


# File formats of head maps: DuoAttention's table, Retrieval_Head's line, and kvcli's document.
#
# DuoAttention (arXiv 2410.10819) writes `full_attention_heads.tsv`, one line of gates from 0 to 1 per layer, and a
# `config.json` with its window. Retrieval_Head (arXiv 2404.15574) writes {"layer-head": [scores]} by query head.

TSV, DUO_CONFIG, PROFILE = "full_attention_heads.tsv", "config.json", "profile.json"
Map = list[list[float]]  # [layers][KV heads]


def duo_tsv(heads: Sequence[Sequence[float]]) -> str:
    """Return DuoAttention's table, as numpy.savetxt writes it."""
    return "".join("\t".join(f"{value:.6f}" for value in row) + "\n" for row in heads)


def duo_config(document: HeadsDocument) -> str:
    """Return DuoAttention's `config.json`, with its names for sinks and window."""
    said = {"sink_size": document.suggest.sinks, "recent_size": document.suggest.window, "model": document.model}
    return json.dumps(said, indent=2) + "\n"


def retrieval_line(document: HeadsDocument) -> str:
    """Return Retrieval_Head's line of scores by query head; empty if the needle probe was not run."""
    table = document.query.get("needle")
    if table is None:
        return ""
    scores = {f"{layer}-{head}": [value] for layer, row in enumerate(table) for head, value in enumerate(row)}
    return json.dumps(scores) + "\n"


def arrays(document: HeadsDocument) -> bytes:
    """Return all tables as the bytes of one .npz file."""
    import numpy as np

    tables = {"heads": document.heads, **{f"scalar_{k}": v for k, v in document.scalars.items()}}
    tables |= {f"query_{name}": table for name, table in document.query.items()}
    named = {name: np.asarray(table, dtype=np.float32) for name, table in tables.items()}
    if (policy := document.policy) is not None:
        named["policy"] = np.asarray(policy.chosen, dtype=np.int8)
        named["cost"] = np.asarray(policy.cost, dtype=np.float32)
        named |= {f"mass_{name}": np.asarray(table, dtype=np.float32) for name, table in policy.mass.items()}
    if document.distances is not None:
        longest = max((len(row) for layer in document.distances for row in layer), default=0)
        padded = [[row + [0.0] * (longest - len(row)) for row in layer] for layer in document.distances]
        named["distances"] = np.asarray(padded, dtype=np.float32)
    stream = io.BytesIO()
    np.savez_compressed(stream, **named)  # type: ignore[arg-type]
    return stream.getvalue()


def read_map(path: Path, shown: str) -> Map:
    """Read a head map from a kvcli document, a DuoAttention table, or a folder with either. Raises BadInput."""
    file = path
    if path.is_dir():
        found = [path / name for name in (PROFILE, TSV) if (path / name).is_file()]
        if not found:
            raise BadInput(f"{shown} holds neither {PROFILE} nor {TSV}", code="bad_headmap")
        file = found[0]
    return read_headmap(file)


# Comparison of two head profiles: differences per head, and rank correlation.


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
