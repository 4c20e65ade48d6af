"""What a choice of slots costs in predictions: the newest tokens of a prompt run again, with and without the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.feed import Asks, Feed
from kvcli.kernels.attend import attend
from kvcli.kernels.merge import Part
from kvcli.kv.slots import Choose, Sight, Slots, Store, Usage, compact, visible
from kvcli.policies.base import Moment
from kvcli.rows import Rows

if TYPE_CHECKING:
    from kvcli.model import LM


class Replay:
    """Predictions for the tokens from position `start` on, by a past of which only a part is kept.

    The tokens run again see each other whole and, of what stands before them, what is kept. Nothing is stored.
    """

    def __init__(
        self, lm: LM, kv: Store, ids: Sequence[int], start: int, moment: Callable[[int, Slots], Moment]
    ) -> None:
        """`ids` are all that is stored."""
        self._lm, self._kv, self._moment = lm, kv, moment
        self._rows = Rows.chain(ids[start:], start)
        self._start = start
        self._whole: Tensor | None = None  # predicted with everything kept, once anything is compared with it

    def __call__(self, pick: Callable[[Slots, Moment], Tensor]) -> Asks[float]:
        """Mean KL, in nats a token, from what the whole past predicts to what the slots [K, S] picked do.

        Takes a pass, the first time two.
        """
        if (whole := self._whole) is None:
            whole = self._whole = yield from self._predict(None)
        some = yield from self._predict(lambda layer, s: pick(s, self._moment(layer, s)))
        return float((whole.exp() * (whole - some)).sum(-1).mean())

    def _predict(self, choose: Choose | None) -> Asks[Tensor]:
        """[N, V] logarithms of probabilities."""
        past, rows = _Before(self._kv, self._start, choose), self._rows
        made = yield Feed(self._lm, rows, past, want=range(rows.n_rows))  # type: ignore[arg-type]
        return made.logits.to(torch.promote_types(made.logits.dtype, torch.float32)).log_softmax(-1)


class _Before:
    """Reads of `store` what stands before a position and is chosen; None = all of that. For passes never committed."""

    def __init__(self, store: Store, end: int, choose: Choose | None) -> None:
        self.dtype = store.dtype
        self._store, self._end, self._choose = store, end, choose

    def attend(self, layer: int, q: Tensor, sight: Sight, pos: Sequence[int]) -> list[Part]:
        s = self._store.slots(layer)
        mask = (s.pos >= 0) & (s.pos < self._end)
        few = compact(s, mask if self._choose is None else mask & self._choose(layer, s))
        if not few.n_slots:
            return []
        shown = visible(few.pos, pos, sight.window)
        return [attend(q, few.k, few.v, sight.scale, softcap=sight.softcap, mask=shown)]

    def usage(self) -> list[Usage]:
        return []
