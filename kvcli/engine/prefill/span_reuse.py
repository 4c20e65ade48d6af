"""Span reuse: a prompt takes the KV of matching spans from other sequences instead of computing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvcli.engine.prefill.matching_spans import MatchingSpan, find_matching_spans

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Steps
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import KVCache

Held = dict[int, tuple[Tensor, Tensor]]  # by layer that stores KV: keys [K, n, D] and values [K, n, E]
Past = Iterable[tuple[int, Tensor, Tensor, int]]  # argument of `SequenceState.adopt`


class SpanSourceGone(Exception):
    """Raised if the source of a span no longer has its KV."""


class SpanSource(Protocol):
    """Protocol of a sequence whose KV can be reused."""

    @property
    def ids(self) -> Sequence[int]:
        """Its tokens, up to the end of the reusable part."""

    def held(self, first: int, n: int) -> Held:
        """Return the KV of n tokens from position `first` on, as computed there. Raises SpanSourceGone."""


Found = tuple[MatchingSpan, SpanSource]


class ReusableSpans(Protocol):
    """Protocol of the reusable spans of one prompt. They need no prefill once the tokens before them are stored."""

    def add(self, found: Iterable[Found]) -> None:
        """Add spans; a span never replaces an earlier one."""

    def next(self, at: int) -> int | None:
        """Return where the next span begins or continues, at or after position `at`; None = no more spans."""

    def load(self, at: int, most: int, kv: KVCache, ids: Sequence[int]) -> Steps[tuple[int, Past]]:
        """Load up to `most` tokens of the span at `at` of `ids`; `kv` holds all tokens before it. Return their end and
        their KV. The end is `at` if the source is gone."""


class ReuseMethod(Protocol):
    """Protocol of the `[reuse]` table of a profile, shared by all sequences."""

    @property
    def describe_reused(self) -> str:
        """Describe what is reused from other sequences, in words; "" = nothing."""

    @property
    def min_span(self) -> int:
        """Shortest span that is reused, in tokens."""

    @property
    def recompute(self) -> float:
        """Share of a span that is recomputed layer by layer."""

    def bind(self, lm: LM) -> ReusableSpans:
        """Return an empty set of reusable spans for the next prompt."""


@dataclass(frozen=True, slots=True)
class CopiedSpan:
    """A copy of the KV of one span, made before its sequence was rewound."""

    ids: Sequence[int]
    first: int
    of: Held

    def held(self, first: int, n: int) -> Held:
        """Return views of the copy."""
        at = slice(first - self.first, first - self.first + n)
        return {layer: (k[:, at], v[:, at]) for layer, (k, v) in self.of.items()}


def copy_matching_spans(
    lm: LM, kv: KVCache, had: Sequence[int], ids: Sequence[int], start: int, least: int
) -> Iterator[Found]:
    """Yield copies of the stored spans of `had` that occur in `ids` from `start` on.

    A span is left out if a layer no longer has all of its slots, because its sliding window has moved on.
    """
    kept: dict[MatchingSpan, Held] = {run: {} for run in find_matching_spans(had, ids, start, least)}
    for layer, shape in enumerate(lm.shapes):
        if shape.shared_from is None and kept:
            s = kv.slots(layer)  # once per layer, because quantized slots are dequantized for it
            order = s.pos[0].argsort()
            for run in list(kept):
                if (at := _at(s.pos[0], order, run)) is None:
                    del kept[run]
                else:
                    kept[run][layer] = s.each(lambda t: t[:, at])  # copies: the slots will be overwritten
    for run, held in kept.items():
        yield run, CopiedSpan(had, run.old, held)


def _at(pos: Tensor, order: Tensor, run: MatchingSpan) -> Tensor | None:
    """Return which slots at positions pos [S], rising in `order`, hold a span; None if some are missing."""
    first = int(torch.searchsorted(pos[order], run.old))
    at = order[first : first + run.n]
    return at if len(at) == run.n and int(pos[at[0]]) == run.old and int(pos[at[-1]]) == run.old + run.n - 1 else None
