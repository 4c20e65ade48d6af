"""Matching spans of other sequences with keys rotated to their new positions; a callback may recompute some tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from kvcli.engine.hf.rope import rotaries
from kvcli.engine.prefill.span_reuse import Found, Held, Past, SpanSourceGone
from kvcli.kernels.rope import rotate, unrotate

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Passes, Rows
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.span_reuse import MatchingSpan, SpanSource
    from kvcli.kv.slots import KVCache

# (rows of a span, their reused KV, the KV cache with all tokens before, the span, its source) -> the KV to commit
Again = Callable[["Rows", Held, "KVCache", "MatchingSpan", "SpanSource"], "Passes[Held]"]


class RerotatedSpans:
    """Reusable spans of other sequences for one prompt."""

    def __init__(self, lm: LM, least: int, again: Again | None = None) -> None:
        """Accept spans of at least `least` tokens. `again` recomputes some tokens of a span before it is committed."""
        self._lm, self._least, self._again = lm, least, again
        self._found: list[Found] = []  # rising, without overlaps

    def add(self, found: Iterable[Found]) -> None:
        """Add spans, cut where they overlap spans added before."""
        for run, source in found:
            at = run.new
            for other in [*(r for r, _ in self._found if r.end > at and r.new < run.end), run.part(run.end, run.end)]:
                if other.new - at >= self._least:
                    self._found.append((run.part(at, other.new), source))
                at = max(at, other.end)
            self._found.sort(key=lambda one: one[0].new)

    def next(self, at: int) -> int | None:
        """Return the first position >= `at` that a span covers; None if there is none."""
        return min((max(run.new, at) for run, _ in self._found if run.end > at), default=None)

    def load(self, at: int, most: int, kv: KVCache, ids: Sequence[int]) -> Passes[tuple[int, Past]]:
        """Return end position and KV of up to `most` tokens of the span at `at`; (at, ()) if its source is gone."""
        from kvcli.engine.forward_request import Rows

        self._found = [one for one in self._found if one[0].end > at]
        run, source = self._found[0]
        part = run.part(at, min(run.end, at + most))
        try:
            held = source.held(part.old, part.n)
        except SpanSourceGone:
            del self._found[0]
            return at, ()
        held = {layer: (self._turned(layer, k, part), v) for layer, (k, v) in held.items()}
        if self._again is not None:
            held = yield from self._again(Rows.chain(ids[at : part.end], at), held, kv, part, source)
        return part.end, [(layer, k, v, at) for layer, (k, v) in held.items()]

    def _turned(self, layer: int, k: torch.Tensor, run: MatchingSpan) -> torch.Tensor:
        if (rotary := rotaries(self._lm)[layer]) is None or run.old == run.new:
            return k
        old = torch.arange(run.old, run.old + run.n, device=k.device)
        wide = k.to(torch.promote_types(k.dtype, torch.float32))
        return rotate(unrotate(wide, old, rotary), old + (run.new - run.old), rotary).to(k.dtype)
