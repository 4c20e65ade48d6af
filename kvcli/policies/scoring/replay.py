"""Loss of a slot selection: the newest prompt tokens are recomputed with all slots and with the selected slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest, Passes, Rows
from kvcli.engine.policy.policy import CompressionPoint, LayerContext
from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, Slots, attend_new_only, compact, visible
from kvcli.kv.views.borrowing import BorrowingReader

Pick = Callable[[Slots, LayerContext], Tensor]  # one layer -> slots to keep [K, S]


class Replay:
    """Predictions for the newest `n` tokens, computed from a selection of the KV cache.

    The recomputed tokens attend to each other fully and to the selected slots before them. No KV is committed.
    """

    def __init__(self, at: CompressionPoint, n: int) -> None:
        self._at, self._start = at, len(at.ids) - n
        self._rows = Rows.chain(at.ids[self._start :], self._start)
        self._whole: Tensor | None = None  # predictions from all slots; computed on first use

    def loss(self, pick: Pick) -> Passes[float]:
        """Return the mean KL divergence, in nats per token, from predictions of all slots to those of `pick`.

        Runs one forward pass, and a second one on the first call.
        """
        if (whole := self._whole) is None:
            whole = self._whole = yield from self._predict(lambda s, at: s.pos >= 0)
        some = yield from self._predict(pick)
        return float((whole.exp() * (whole - some)).sum(-1).mean())

    def _predict(self, pick: Pick) -> Passes[Tensor]:
        """Return log-probabilities [N, V]."""
        past = SlotsBeforeView(self._at, self._start, pick)
        made = yield ForwardRequest(self._at.lm, self._rows, past, want=range(self._rows.n_rows))
        return made.logits.to(torch.promote_types(made.logits.dtype, torch.float32)).log_softmax(-1)


class SlotsBeforeView(BorrowingReader):
    """Cache view of the slots before position `end` that `pick` selects (default: all). Such passes never commit."""

    why_not = "the policy cannot select tokens to replay"

    def __init__(self, at: CompressionPoint, end: int, pick: Pick = lambda s, at: s.pos >= 0) -> None:
        self.dtype = at.kv.dtype
        self._at, self._end, self._pick = at, end, pick

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        s, at = self._at.layer(layer)
        few = compact(s, (s.pos >= 0) & (s.pos < self._end) & self._pick(s, at))
        if not few.n_slots:
            return attend_new_only(q, params, own)
        shown = visible(few.pos, pos, params.window)
        v = few.k if self._at.lm.shapes[layer].rank else few.v  # new rows of MLA layers return latents, too
        part = attend(q, few.k, v, params.scale, softcap=params.softcap, mask=shown)
        return [part, *attend_new_only(q, params, own)]
