"""Kinds of tokens, as policies tell them apart: by id, and by where in the prompt they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TEXT, SPECIAL, PUNCT, NEWLINE, SYSTEM, END, QUESTION, TOOLS, SHOT = range(9)
# END: punctuation that ends a sentence; TOOLS: what a tool said; SHOT: the first token of a paragraph


class KindSpan(NamedTuple):
    """Positions start to end - 1 are of this kind, whatever their ids are."""

    start: int
    end: int
    kind: int


def edit_points(spans: Sequence[KindSpan]) -> set[int]:
    """Where a text is likely to be changed: at its last message, and at what that asks; as far as spans say so."""
    specials = [span.end for span in spans if span.kind == SPECIAL]
    return {*specials[-2:-1], *(span.start for span in spans if span.kind == QUESTION)}


def kinds_of(ids: Sequence[int], table: Tensor | None, spans: Sequence[KindSpan]) -> Tensor:
    """[T] int8: the kind of each token. `table` [V] gives kinds by id; None = all are text."""
    t = len(ids)
    kinds = torch.zeros(t, dtype=torch.int8) if table is None else table[torch.tensor(ids, dtype=torch.int64)]
    for span in spans:
        kinds[span.start : span.end] = span.kind
    return kinds
