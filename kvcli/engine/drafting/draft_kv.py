"""KV of draft tokens. It is kept outside the KV cache until verification accepts the tokens.

Draft tokens form a tree after the stored tokens, as in SpecInfer (arXiv 2305.09781). A row of a further pass attends to
the KV cache, then to its ancestors from the first one down, then to itself. This is the order of plain decoding, so the
bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvcli.engine.forward_request import Choice, ForwardRequest, ForwardResult, LogitsHook, Passes, Rows, TokenIds
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.recurrent_state import RecurrentStates, StateCheckpoint
from kvcli.kv.slots import empty
from kvcli.kv.tiers.device_tables import MOST_ROWS, DeviceCache
from kvcli.kv.tiers.draft_buffers import DraftBuffers
from kvcli.kv.views.borrowing import BorrowingReader

if TYPE_CHECKING:
    from kvcli.engine.forward_request import ChosenRows, RanRow, SamplingContext
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import AttentionParams, CacheReader, KVCache


class DraftTreeKV(BorrowingReader):
    """The KV of a draft tree. It grows by passes, whose rows attend to `cache` and to their ancestors in the tree."""

    def __init__(
        self,
        lm: LM,
        cache: CacheReader,
        at: int,
        states: RecurrentStates | None = None,
        buffers: DraftBuffers | None = None,
    ) -> None:
        """`cache`: KV that all rows attend to, at positions below `at`; it may not change while the tree grows.
        `states`: the recurrent states after it; with them the rows of a pass must form a chain. `buffers`: those of the
        drafter, so that captured passes of its earlier trees serve this one."""
        self._lm, self._cache, self._at, self._states = lm, cache, at, states
        stored = ((layer, lm.shapes[layer]) for layer in lm.storing)
        self.buffers = buffers or DraftBuffers({i: empty(of, cache.dtype, of.device or lm.device) for i, of in stored})
        self._sees: list[list[int]] = []  # by row of the running pass, the rows that it attends to
        self._commit_rows: Callable[[Sequence[int]], None] | None = None  # as in ForwardResult, of the newest pass
        # by row: state update of its pass, states, number of rows of the pass to apply
        self._folds: list[tuple[Callable[[int], None], RecurrentStates, int]] = []
        self.dtype = cache.dtype
        self._ids: list[Sequence[int]] = []  # by pass
        self.parents: list[int] = []  # parent row; -1 = the last stored token
        self._above: list[list[int]] = []  # a row's ancestors from the root, then the row itself
        self._pos: list[int] = []  # positions of all rows, including the running pass
        self._tree_mask = torch.empty(0)  # [n, M + n] bool, of the running pass: rows that its rows attend to
        self._masks: dict[int | None, Tensor] = {}  # by window, on the device
        self._sent: dict[Any, Any] = {}  # as in ForwardPass

    def __len__(self) -> int:
        return len(self.parents)

    def grow(
        self, ids: Sequence[int], parents: Sequence[int], logits_hook: LogitsHook, layers: Sequence[range] = ()
    ) -> Passes[list[list[float]]]:
        """Run a pass of further rows and return its hook output; a parent comes before its children. `layers`: ranges
        of layers to run, up to the last one; () = all."""
        result = yield from self.add(ids, parents, logits_hook=logits_hook, layers=layers)
        return [result.hook_output(i) for i in range(len(ids))]

    def grow_by_choices(
        self, root: ForwardResult, rows: ChosenRows, logits_hook: LogitsHook, layers: Sequence[range] = ()
    ) -> Passes[list[RanRow]]:
        """Run these rows below the newest row, whose pass is `root`, level by level while passes are captured. The host
        need not read the tokens, which the device hands on. Return what ran, the newest row first."""
        ran: list[RanRow] = [(of := root, 0)]
        newest = len(self) - 1
        while of.choices is not None and len(ran) <= len(rows):
            level = [row for row in rows[len(ran) - 1 :] if row[0] < len(ran)]
            parents, choices = [newest + at for at, _ in level], [Choice(*ran[at], rank) for at, rank in level]
            of = yield from self.add((), parents, logits_hook=logits_hook, layers=layers, choices=choices)
            ran += [(of, row) for row in range(len(level))]
        return ran

    def add(
        self, ids: Sequence[int], parents: Sequence[int], *, choices: Sequence[Choice] = (),
        logits_hook: LogitsHook | None = None, draw: SamplingContext | None = None, layers: Sequence[range] = (),
        hidden: Tensor | None = None, shows: tuple[int, ...] = (), record_queries: Sequence[int] = (),
    ) -> Passes[ForwardResult]:  # fmt: skip
        """Run a pass of further rows. `hidden`, `shows`, `record_queries`: `hidden`, `record_hidden_states` and
        `record_queries` of the request; `choices`: as in `Rows`, after `ids`."""
        ids = TokenIds.of(ids, choices)
        n_before, n, above = len(self), len(ids), list(self._above)
        tree_mask = np.zeros((n, n_before + n), dtype=np.bool_)
        for row, parent in enumerate(parents):
            above.append([*(above[parent] if parent >= 0 else ()), n_before + row])
            tree_mask[row, above[-1]] = True
        self._tree_mask, self._masks, self._sent = torch.from_numpy(tree_mask), {}, {}
        self.buffers = self.buffers.grown(len(above))
        self._pos, self._sees = [self._at + len(seen) - 1 for seen in above], above[n_before:]
        states = None if self._states is None else self._behind(parents[0], self._states)
        assert states is None or [*parents[1:]] == [*range(n_before, n_before + n - 1)], "draft tokens are no chain"
        mask = self._tree_mask[:, n_before:] if n > 1 and states is None else None
        rows = Rows(ids, self._pos[n_before:], mask, tree=n, parent=(-1,) * n, choices=choices)  # never verified
        for run in layers[:-1]:
            hidden = (yield ForwardRequest(self._lm, rows, self, layers=run, hidden=hidden)).hidden
        last = layers[-1] if layers else None
        of = self._lm, rows, self
        result = yield ForwardRequest(
            *of, want=range(n), draw=draw, logits_hook=logits_hook, layers=last, hidden=hidden,
            record_hidden_states=shows, record_queries=record_queries, states=states,
        )  # fmt: skip
        if states is not None and result.fold is not None:
            self._folds += [(result.fold, states, i + 1) for i in range(n)]
        self._ids.append(ids)
        self.parents += parents
        self._above, self._commit_rows = above, result.commit_rows
        return result

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the device tables of the KV cache, with the buffers in which captured passes keep the tree."""
        tables = self._cache.device_tables(MOST_ROWS, more)  # so many may be committed
        self.buffers = self.buffers.grown(len(self._pos) - len(self._sees) + rows)
        return replace(tables, tree=self.buffers, tree_pos=self._pos, sees=self._sees)

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, n, D] of the running pass, at positions pos [n], over all rows and slots it
        attends to."""
        assert own is not None, "the new KV of the rows is missing"
        source = self._lm.shapes[layer].shared_from
        holder = layer if source is None else source
        n, (k, v) = len(self._pos), self.buffers.kv[holder]
        k, v = k[:, :n], v[:, :n]
        k[:, len(self) :], v[:, len(self) :] = own.k, own.v
        mask = self._mask_on_device(params.window, q)
        # `dataclasses.replace` takes four times as long
        both = NewRows(k, v, self._pos, self._tree_mask, mask, own.sink, own.before, self._sent)
        return self._cache.attend(layer, q, params, pos, both)

    def _mask_on_device(self, window: int | None, like: Tensor) -> Tensor:
        if window not in self._masks:
            mask = self._tree_mask
            if window is not None:
                pos = torch.tensor(self._pos)
                mask = mask & (pos > (pos[-len(mask) :] - window).unsqueeze(1))
            self._masks[window] = mask.to(like.device)
        return self._masks[window]

    def path(self, ids: Sequence[int]) -> list[int]:
        """Return the rows whose tokens match the beginning of `ids`, from the root on."""
        found, at, known = [], -1, [*chain.from_iterable(self._ids)]
        for token in ids:
            below = (i for i in range(at + 1, len(self)) if self.parents[i] == at and known[i] == token)
            if (at := next(below, -1)) < 0:
                break
            found.append(at)
        return found

    def _behind(self, row: int, states: RecurrentStates) -> RecurrentStates:
        """Return the recurrent states after this row; -1 = after the stored tokens."""
        found = RecurrentStates()
        found.now = states.now if row < 0 else self._known(row)
        return found

    def _known(self, row: int) -> StateCheckpoint:
        fold, states, n = self._folds[row]
        fold(n)
        return states.now

    def above(self, row: int) -> list[int]:
        """Return a row's ancestors from the root, then the row itself."""
        return self._above[row]

    def held(self, path: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor, int]]:
        """Return keys and values of these rows in order, by layer, and their first position (`SequenceState.adopt`)."""
        for layer, (k, v) in self.buffers.kv.items() if path else ():
            at = torch.tensor(path, device=k.device)
            yield layer, k.index_select(1, at), v.index_select(1, at), self._at

    def commit_path(self, kv: KVCache, path: Sequence[int]) -> None:
        """Commit the KV of these rows, to the KV cache that they attended to."""
        if self._commit_rows is not None and 0 < len(path) <= MOST_ROWS:
            self._commit_rows(path)
        else:
            for layer, k, v, at in self.held(path):
                kv.append(layer, k, v, at)
        if self._states is not None and path:
            self._states.advance(self._known(path[-1]))
