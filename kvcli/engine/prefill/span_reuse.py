"""Keys and values of other texts that a prompt takes over in runs, in place of reading them."""

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

Held = dict[int, tuple[Tensor, Tensor]]  # by layer that stores: keys [K, n, D] and values [K, n, E]
Past = Iterable[tuple[int, Tensor, Tensor, int]]  # what `Text.adopt` takes


class SpanSourceGone(Exception):
    """What a run was to be taken from is no longer there."""


class SpanSource(Protocol):
    """A text that was read."""

    @property
    def ids(self) -> Sequence[int]:
        """Its tokens, as far as anything is to be taken from it."""

    def held(self, first: int, n: int) -> Held:
        """Of n tokens at positions from `first` on, as they were read there. Raises SpanSourceGone."""


Found = tuple[MatchingSpan, SpanSource]


class ReusableSpans(Protocol):
    """Runs of one prompt, which need no reading where the text before them is stored."""

    def add(self, found: Iterable[Found]) -> None:
        """More of them; nothing takes the place of one that is there."""

    def next(self, at: int) -> int | None:
        """Where the next run begins or goes on, at or behind position `at`; None = there is none."""

    def load(self, at: int, most: int, kv: KVCache, ids: Sequence[int]) -> Steps[tuple[int, Past]]:
        """Up to `most` tokens of the run at `at` of `ids`, of which all before that is in `kv`: where they end, and
        what belongs to them. They end where they begin if they are gone.
        """


class ReuseMethod(Protocol):
    """The `[reuse]` table of a profile, shared by all texts."""

    @property
    def describe_reused(self) -> str:
        """What is taken over that was read behind another text, in words; "" = nothing."""

    @property
    def min_span(self) -> int:
        """Tokens in a row that are worth taking over."""

    def check_model(self, lm: LM) -> None:
        """Raises BadModel where nothing can be taken over."""

    def bind(self, lm: LM) -> ReusableSpans:
        """For the next prompt, with nothing in it yet."""


@dataclass(frozen=True, slots=True)
class CopiedSpan:
    """What a text had stored of one run before it went back."""

    ids: Sequence[int]
    first: int
    of: Held

    def held(self, first: int, n: int) -> Held:
        """As views."""
        at = slice(first - self.first, first - self.first + n)
        return {layer: (k[:, at], v[:, at]) for layer, (k, v) in self.of.items()}


def copy_matching_spans(
    lm: LM, kv: KVCache, had: Sequence[int], ids: Sequence[int], start: int, least: int
) -> Iterator[Found]:
    """Runs of what is stored of `had` that stand in `ids` from `start` on, copied.

    Layers that no longer hold a run all along, as their window moved on, leave it to be read.
    """
    kept: dict[MatchingSpan, Held] = {run: {} for run in find_matching_spans(had, ids, start, least)}
    for layer, shape in enumerate(lm.shapes):
        if shape.shared_from is None and kept:
            s = kv.slots(layer)  # once, as what is packed is unpacked for it
            order = s.pos[0].argsort()
            for run in list(kept):
                if (at := _at(s.pos[0], order, run)) is None:
                    del kept[run]
                else:
                    kept[run][layer] = s.each(lambda t: t[:, at])  # copies: what lies there is overwritten
    for run, held in kept.items():
        yield run, CopiedSpan(had, run.old, held)


def _at(pos: Tensor, order: Tensor, run: MatchingSpan) -> Tensor | None:
    """Which slots at positions pos [S], rising in `order`, hold a run; None where some of it is gone."""
    first = int(torch.searchsorted(pos[order], run.old))
    at = order[first : first + run.n]
    return at if len(at) == run.n and int(pos[at[0]]) == run.old and int(pos[at[-1]]) == run.old + run.n - 1 else None
