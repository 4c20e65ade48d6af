"""What a choice of slots costs in predictions: the newest tokens of a prompt run again, with and without the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.forward import Pass, run
from kvcli.kernels.attend import attend
from kvcli.kernels.merge import Part
from kvcli.kv.slots import Choose, Sight, Slots, Store, Usage, compact
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
        self._rows = Rows.chain(ids[start:], start, lm.device)
        self._start = start

    def __call__(self, pick: Callable[[Slots, Moment], Tensor]) -> float:
        """Mean KL, in nats a token, from what the whole past predicts to what the slots [K, S] picked do.

        Runs a pass, the first time two.
        """
        some = self._predict(lambda layer, s: pick(s, self._moment(layer, s)))
        return float((self._whole.exp() * (self._whole - some)).sum(-1).mean())

    @cached_property
    def _whole(self) -> Tensor:
        """With everything kept: what to compare with, if anything is compared."""
        return self._predict(None)

    def _predict(self, choose: Choose | None) -> Tensor:
        """[N, V] logarithms of probabilities."""
        past = _Before(self._kv, self._start, choose)
        logits = run(self._lm, Pass(self._rows, past), torch.arange(self._rows.n_rows, device=self._lm.device))  # type: ignore[arg-type]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


class _Before:
    """Reads of `store` what stands before a position and is chosen; None = all of that. For passes never committed."""

    def __init__(self, store: Store, end: int, choose: Choose | None) -> None:
        self.dtype = store.dtype
        self._store, self._end, self._choose = store, end, choose

    def attend(self, layer: int, q: Tensor, sight: Sight, pos: Tensor) -> list[Part]:
        s = self._store.slots(layer)
        mask = (s.pos >= 0) & (s.pos < self._end)
        few = compact(s, mask if self._choose is None else mask & self._choose(layer, s))
        if not few.n_slots:
            return []
        seen = few.pos.unsqueeze(1) >= 0
        if sight.window is not None:
            seen = seen & (few.pos.unsqueeze(1) > (pos - sight.window).view(1, -1, 1))
        seen = seen.expand(-1, pos.shape[0], -1)
        return [attend(q, few.k, few.v, sight.scale, softcap=sight.softcap, mask=seen)]

    def usage(self) -> list[Usage]:
        return []
