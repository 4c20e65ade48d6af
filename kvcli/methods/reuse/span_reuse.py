"""Span reuse: a prompt loads the KV of matching spans of other sequences, its keys rotated to their new positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.forward_request import Rows
from kvcli.engine.hf.rope import rotaries
from kvcli.engine.prefill.layer_by_layer import require_layer_gates
from kvcli.kernels.rope import rotate, unrotate
from kvcli.kv.companion import Companion
from kvcli.kv.out_of_memory import catch_cache_full
from kvcli.prefix_cache.matching_spans import Found, Held, SpanSource, SpanSourceGone, find_matching_spans

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.slots import KVCache, Loss
    from kvcli.kv.snapshot import SnapshotReader, State
    from kvcli.prefix_cache.matching_spans import MatchingSpan


# (rows of a span, their reused KV, the KV cache with all tokens before, the span, its source) -> the KV to commit
Recompute = Callable[[Rows, Held, "KVCache", "MatchingSpan", SpanSource], "Passes[Held]"]


class SpanReuse(Companion):
    """Spans of other sequences that the current prompt loads, once the tokens before them are stored."""

    def __init__(self, lm: LM, min_span: int, recompute: Callable[[], Recompute] | None = None) -> None:
        """Accept spans of at least `min_span` tokens. `recompute`: makes the function, for one prompt, that recomputes
        some tokens of a span. Raises BadModel if the model's keys cannot be rotated to new positions.
        """
        rotaries(lm)
        if recompute is not None:
            require_layer_gates(lm)
        self._lm, self.min_span, self._recompute_of_prompt = lm, min_span, recompute
        self._recompute: Recompute | None = None
        self._found: list[Found] = []  # rising, without overlaps
        self.reused = 0  # tokens of the prompt whose KV was loaded
        self._foreign_from = math.inf  # first position whose KV was computed with another prefix; inf = none

    def add(self, found: Iterable[Found]) -> None:
        """Add spans, cut where they overlap spans added before."""
        for run, source in found:
            at = run.new
            for other in [*(r for r, _ in self._found if r.end > at and r.new < run.end), run.part(run.end, run.end)]:
                if other.new - at >= self.min_span:
                    self._found.append((run.part(at, other.new), source))
                at = max(at, other.end)
            self._found.sort(key=lambda one: one[0].new)

    def before_prompt(self, text: GenerationSession, ids: Sequence[int]) -> None:
        """Copy the KV of spans that occur both in the sequence and in `ids`; none without memory for them."""
        self._found, self.reused = [], 0  # discards earlier copies
        if self._recompute_of_prompt is not None:
            self._recompute = self._recompute_of_prompt()
        had, start = text.ids[: text.committed], text.shared(ids)
        with catch_cache_full():
            self.add(copy_matching_spans(self._lm, text.cache, had, ids[:-1], start, self.min_span))

    def rewind(self, n: int, of: int) -> None:
        """Forget loaded KV that goes."""
        self._foreign_from = self._foreign_from if n > self._foreign_from else math.inf

    def prefill(self, text: GenerationSession, end: int) -> Passes[None] | None:
        """Load the span that begins here, or prefill the tokens before the next one."""
        self._found = [one for one in self._found if one[0].end > text.committed]
        if not self._found:
            return None
        ahead = self._found[0][0].new
        return text.read_chunk(ahead) if ahead > text.committed else self._load(text)

    def _load(self, text: GenerationSession) -> Passes[None]:
        """Load tokens of the span that begins here, in place of a chunk; nothing if its source is gone."""
        at, (run, source) = text.committed, self._found[0]
        part = run.part(at, min(run.end, at + text.chunk_rows))
        try:
            held = source.held(part.old, part.n)
        except SpanSourceGone:
            del self._found[0]
            return
        held = {layer: (self._rotated(layer, k, part), v) for layer, (k, v) in held.items()}
        if self._recompute is not None:
            rows = Rows.chain(text.ids[at : part.end], at)
            held = yield from self._recompute(rows, held, text.cache, part, source)
        self._foreign_from = min(self._foreign_from, at)
        for _ in text.append_by_layer([(layer, k, v, at) for layer, (k, v) in held.items()], part.end):
            pass
        self.reused += part.n

    def _rotated(self, layer: int, k: Tensor, run: MatchingSpan) -> Tensor:
        if (rotary := rotaries(self._lm)[layer]) is None or run.old == run.new:
            return k
        old = torch.arange(run.old, run.old + run.n, device=k.device)
        wide = k.to(torch.promote_types(k.dtype, torch.float32))
        return rotate(unrotate(wide, old, rotary), old + (run.new - run.old), rotary).to(k.dtype)

    def loss(self, n: int) -> Loss | None:
        """Return "reused" if KV was computed with another prefix."""
        return "reused" if self._foreign_from < n else None

    def snapshot(self) -> State:
        """Return how many first tokens have KV of their own prefix; of later ones some have not."""
        return {"own": -1 if math.isinf(self._foreign_from) else int(self._foreign_from)}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot, also one of a sequence without span reuse, whose KV is all its own. Raises
        SnapshotMismatch."""
        own = given.number("own", given.n, -1) if "own" in given else -1
        self._foreign_from = own if 0 <= own < given.n else math.inf


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
        yield run, SpanSource(had, partial(_views, held, run.old))


def _views(copies: Held, at: int, first: int, n: int) -> Held:
    """Return views of n tokens from position `first` on; the copies begin at position `at`."""
    return {layer: (k[:, first - at :][:, :n], v[:, first - at :][:, :n]) for layer, (k, v) in copies.items()}


def _at(pos: Tensor, order: Tensor, run: MatchingSpan) -> Tensor | None:
    """Return which slots at positions pos [S], rising in `order`, hold a span; None if some are missing."""
    first = int(torch.searchsorted(pos[order], run.old))
    at = order[first : first + run.n]
    return at if len(at) == run.n and int(pos[at[0]]) == run.old and int(pos[at[-1]]) == run.old + run.n - 1 else None
