"""Runs of other texts, their keys turned to where they stand now; what of them is read again is for others to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from kvcli.engine.hf.rope import rotaries
from kvcli.engine.prefill.span_reuse import Found, Held, Past, SpanSourceGone
from kvcli.kernels.rope import rotate, unrotate

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Steps
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.matching_spans import MatchingSpan
    from kvcli.engine.prefill.span_reuse import SpanSource
    from kvcli.engine.rows import Rows
    from kvcli.kv.slots import KVCache

# rows of a run, what is held of them, the store with all before them, where they come from -> what is to be stored
Again = Callable[["Rows", Held, "KVCache", "MatchingSpan", "SpanSource"], "Steps[Held]"]


class RerotatedSpans:
    """What other texts have for one prompt."""

    def __init__(self, lm: LM, least: int, again: Again | None = None) -> None:
        """Runs of `least` tokens or more. `again`: reads some of a run's tokens anew, before they are stored."""
        self._lm, self._least, self._again = lm, least, again
        self._found: list[Found] = []  # rising and apart

    def add(self, found: Iterable[Found]) -> None:
        """More of them; nothing takes the place of one that is there."""
        for run, source in found:
            at = run.new
            for other in [*(r for r, _ in self._found if r.end > at and r.new < run.end), run.part(run.end, run.end)]:
                if other.new - at >= self._least:
                    self._found.append((run.part(at, other.new), source))
                at = max(at, other.end)
            self._found.sort(key=lambda one: one[0].new)

    def next(self, at: int) -> int | None:
        """Where the next run begins or goes on, at or behind position `at`; None = there is none."""
        return min((max(run.new, at) for run, _ in self._found if run.end > at), default=None)

    def load(self, at: int, most: int, kv: KVCache, ids: Sequence[int]) -> Steps[tuple[int, Past]]:
        """Up to `most` tokens of the run at `at`: where they end, and what belongs to them."""
        from kvcli.engine.rows import Rows

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
