"""Kinds of tokens, which policies distinguish: by id, and by position in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TEXT, SPECIAL, PUNCT, NEWLINE, SYSTEM, END, QUESTION, TOOLS, SHOT = range(9)
# END: punctuation that ends a sentence; TOOLS: output of a tool; SHOT: the first token of a paragraph


class KindSpan(NamedTuple):
    """A span of positions, start to end - 1, whose tokens have this kind whatever their ids are."""

    start: int
    end: int
    kind: int


def edit_points(spans: Sequence[KindSpan]) -> set[int]:
    """Return positions where a user is likely to edit the text: the last message and its question, if spans give
    them."""
    specials = [span.end for span in spans if span.kind == SPECIAL]
    return {*specials[-2:-1], *(span.start for span in spans if span.kind == QUESTION)}


def kinds_of(ids: Sequence[int], table: Tensor | None, spans: Sequence[KindSpan]) -> Tensor:
    """Return the kind of each token, [T] int8. `table` [V] gives kinds by id; None = all are text."""
    t = len(ids)
    kinds = torch.zeros(t, dtype=torch.int8) if table is None else table[torch.tensor(ids, dtype=torch.int64)]
    for span in spans:
        kinds[span.start : span.end] = span.kind
    return kinds
