"""Convert findings to tables of a document: [layers][KV heads], or [layers][query heads]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from kvcli.heads.attention import SHARES, AttentionSummary
from kvcli.heads.needle import OFFSETS
from kvcli.heads.prompt import Judged, Reading, scalar
from kvcli.heads.run import Findings, by_kv_head
from kvcli.models.text import decode
from kvcli.schemas.heads import HeadsTop

if TYPE_CHECKING:
    from kvcli.chat.model import Model

DIGITS = 6  # decimals of numbers in a document
Figure = TypeVar("Figure")


def head_map(found: Findings) -> Tensor:
    """Return the head map; layers that were not probed get 1."""
    heads = found.heads.clone()
    for layer in set(range(heads.shape[0])) - set(found.layers):
        heads[layer] = 1.0
    return heads


def scalars(found: Findings, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return the tables by which the head grid can be coloured."""
    tables: dict[str, Tensor] = {"retrieval": head_map(found)}
    if found.fetched is not None and found.fetched.kl is not None:
        tables["ablate"] = found.fetched.kl
    if found.fetched is not None and found.fetched.read is not None:
        tables["needle"] = by_kv_head(found.fetched.read.amax(-1), shape)
    if found.reasoning is not None:
        tables["reason"] = by_kv_head(found.reasoning, shape)
    if found.induction is not None:
        tables["repeat"] = by_kv_head(found.induction, shape)
    if (reading := found.reading) is not None:
        tables |= {name: scalar(reading, shape, of) for name, of in _FIGURES.items()}
        for i, share in enumerate(SHARES):
            tables[f"n{100 * share:.0f}"] = scalar(reading, shape, lambda g, i=i: g.needed[i])  # type: ignore[misc]
    return tables


_FIGURES: Mapping[str, Callable[[AttentionSummary], float]] = {
    "sink": lambda g: g.sink,
    "local": lambda g: g.local,
    "far": lambda g: g.far,
    "worst": lambda g: g.worst,
    "entropy": lambda g: g.entropy,
}


def query(found: Findings, judged: Judged | None) -> dict[str, Tensor]:
    """Return the scores of query heads."""
    tables = {}
    if found.fetched is not None and found.fetched.read is not None:
        tables["needle"] = found.fetched.read.amax(-1)
    if found.reasoning is not None:
        tables["reason"] = found.reasoning
    if found.induction is not None:
        tables["repeat"] = found.induction
    if judged is not None:
        tables["recovered"] = judged.groups[0]  # of the cheapest candidate, where groups differ most
    return tables


def offsets(found: Findings, shape: tuple[int, int]) -> list[list[int]] | None:
    """Return the needle offset with most attention over the query heads of each KV head."""
    if found.fetched is None or found.fetched.read is None:
        return None
    of_group = found.fetched.read.view(*shape, -1, len(OFFSETS)).amax(2)
    best: list[list[int]] = of_group.argmax(-1).tolist()
    return [[OFFSETS[i] for i in row] for row in best]


def by_head(
    reading: Reading | None, shape: tuple[int, int], of: Callable[[AttentionSummary], list[Figure]]
) -> list[list[list[Figure]]] | None:
    """Return a list of values per head; empty for heads not measured."""
    if reading is None:
        return None
    return [
        [of(reading.gazes[layer, head]) if (layer, head) in reading.gazes else [] for head in range(shape[1])]
        for layer in range(shape[0])
    ]


def kinds(reading: Reading | None, shape: tuple[int, int]) -> dict[str, list[list[float]]] | None:
    """Return the attention mass by kind of token."""
    if reading is None or not reading.gazes:
        return None
    names = next(iter(reading.gazes.values())).kinds
    return {name: rounded(scalar(reading, shape, lambda g, name=name: g.kinds[name])) for name in names}  # type: ignore[misc]


def top(model: Model, reading: Reading | None, shape: tuple[int, int]) -> list[list[list[HeadsTop]]] | None:
    """Return the tokens with most attention of each head."""
    ids = reading.ids if reading is not None else []

    def of(gaze: AttentionSummary) -> list[HeadsTop]:
        return [
            HeadsTop(position=at, text=decode(model.tokenizer, [ids[at]]), mass=round(min(1.0, mass), DIGITS))
            for at, mass in gaze.top
            if at >= 0
        ]

    return by_head(reading, shape, of)


def rounded(table: Tensor) -> list[list[float]]:
    """Round a table to the decimals of a document."""
    rows: Sequence[Sequence[float]] = table.double().tolist()
    return [[round(value, DIGITS) for value in row] for row in rows]
