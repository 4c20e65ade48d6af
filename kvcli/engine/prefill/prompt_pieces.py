"""Pieces of a prompt request: its rows run in several passes and get the bits of one pass.

A row of a later piece attends to the KV cache, then to the rows of earlier pieces, then to its own piece. New KV is
kept here until the last piece, so the session commits and compresses the whole chunk at once, as without pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest, ForwardResult, NewKV
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.recurrent_state import RecurrentStates
from kvcli.kv.slots import AttentionParams
from kvcli.kv.views.borrowing import BorrowingReader


class PromptPieces(BorrowingReader):
    """The pieces of one prompt request, and the KV cache with the earlier pieces, which the rows of a piece attend
    to."""

    why_not = "a prompt runs in pieces"

    def __init__(self, request: ForwardRequest) -> None:
        self._request, self.dtype = request, request.cache.dtype
        self.n_done = self._end = 0  # rows that have run, and those up to the end of the running piece
        self._fresh: dict[int, NewKV] = {}  # by layer that stores; k [K, N, D] has place for all rows
        self._masks: dict[int | None, Tensor] = {}  # by window, of the running piece
        self._queries: list[Sequence[Tensor]] = []  # by piece with recorded rows
        self._hidden: list[Tensor] = []  # [n, E] by piece
        self._states = RecurrentStates()  # after the earlier pieces
        if request.states is not None:
            self._states.now = request.states.now

    @staticmethod
    def can_cut(request: ForwardRequest) -> bool:
        """True if rows of the request are known to get the same bits in any number of passes."""
        lm = request.lm
        is_invariant = lm.is_row_invariant and lm.max_invariant_rows is None and not request.cache.batch_variant_reason
        return is_invariant and request.is_prompt and not request.want

    def piece(self, n: int) -> ForwardRequest:
        """Return the request of the next n rows."""
        whole, first = self._request, self.n_done
        self._end, self._masks = first + n, {}
        return replace(
            whole,
            rows=whole.rows.only(range(first, self._end)),
            cache=self,
            record_queries=[row - first for row in whole.record_queries if first <= row < self._end],
            hidden=None if whole.hidden is None else whole.hidden[first : self._end],
            states=None if whole.states is None else self._states,
        )

    def add(self, result: ForwardResult) -> ForwardResult | None:
        """Add the result of the piece that ran. Returns the result of the request after its last piece."""
        for layer, fresh in result.fresh.items():
            self._put(layer, fresh.k, fresh.v)
        self._queries += [result.queries] if result.queries else []
        self._hidden += [] if result.hidden is None else [result.hidden]
        if result.fold is not None:
            result.fold(self._end - self.n_done)
        self.n_done = self._end
        if self.n_done < self._request.rows.n_rows:
            return None
        states, now = self._request.states, self._states.now
        return replace(
            result,
            fresh=self._fresh,
            queries=[torch.cat(pieces, 1) for pieces in zip(*self._queries, strict=True)],
            hidden=torch.cat(self._hidden) if self._hidden else None,
            fold=None if result.fold is None or states is None else lambda n: states.advance(now),
        )

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, n, D] at positions pos [n] over the KV cache, and all rows so far."""
        assert own is not None, "the new KV of the rows is missing"
        if self.n_done:
            k, v = self._put(layer, own.k, own.v)
            until, mask = self._request.rows.pos[: self._end], self._mask(params.window)
            own = NewRows(k, v, until, None, mask, own.sink, own.before, own.sent)
        return self._request.cache.attend(layer, q, params, pos, own)

    def _put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the KV [K, n, D] of the running piece behind that of earlier pieces, and return all of it."""
        if (whole := self._fresh.get(layer)) is None:
            n = self._request.rows.n_rows
            keys, values = (t.new_empty(t.shape[0], n, t.shape[2]) for t in (k, v))
            whole = self._fresh[layer] = NewKV(keys, keys if v is k else values)
        for buffer, piece in ((whole.k, k), (whole.v, v)):
            buffer[:, self.n_done : self._end] = piece
        return whole.k[:, : self._end], whole.v[:, : self._end]

    def _mask(self, window: int | None) -> Tensor:
        """Return which rows so far each row of the piece attends to: [n, N] bool."""
        if window not in self._masks:
            n = self._end - self.n_done
            mask = torch.ones(n, self._end, dtype=torch.bool).tril(self.n_done)
            if window is not None:
                pos = torch.tensor(self._request.rows.pos[: self._end])
                mask &= pos > (pos[-n:] - window).unsqueeze(1)
            self._masks[window] = mask
        return self._masks[window]
