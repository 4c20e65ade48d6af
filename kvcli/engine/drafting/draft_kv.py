"""Guesses that passes were made of: their keys and values, outside of any store until the text takes them.

They form a tree behind what is stored, as in SpecInfer (arXiv 2305.09781). A row of a further pass reads what is
stored, then its ancestors from the first one down, then itself: the order in which a text would read them, so that the
bits are those of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest, ForwardResult, LogitsHook, Steps
from kvcli.engine.rows import Rows
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.recurrent_state import RecurrentStates, StateCheckpoint
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.sampler import SamplingContext
    from kvcli.kv.slots import AttentionParams, CacheReader, KVCache, Usage


class DraftTreeKV:
    """Grows by passes, each of which reads `past` and what grew before. It is what their rows attend to."""

    def __init__(self, lm: LM, cache: CacheReader, at: int, states: RecurrentStates | None = None) -> None:
        """`past`: what all rows see, at positions below `at`; it may not change while this grows. `states`: what mixers
        know of it; with them each further row of a pass follows the one before."""
        self._lm, self._past, self._at, self._states = lm, cache, at, states
        self._folds: list[
            tuple[Callable[[int], None], RecurrentStates, int]
        ] = []  # by row: of its pass, and how many rows
        self.dtype = cache.dtype
        self.ids: list[int] = []
        self.parents: list[int] = []  # which row each follows; -1 = what is stored
        self._above: list[list[int]] = []  # a row's ancestors, the first one first, and itself
        self._pos: list[int] = []  # of all, those of the pass under way included
        self._line = torch.empty(0)  # [n, M + n] bool, of the pass under way: whom of all its rows see
        self._sees: dict[int | None, Tensor] = {}  # by window, on the device
        self._sent: dict[Any, Any] = {}  # as in a pass
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # by layer that stores, k [K, M, D] and v [K, M, E]
        self._grown: dict[int, tuple[Tensor, Tensor]] = {}  # the same with the pass under way

    def __len__(self) -> int:
        return len(self.ids)

    def grow(
        self, ids: Sequence[int], parents: Sequence[int], logits_hook: LogitsHook, layers: Sequence[range] = ()
    ) -> Steps[list[list[float]]]:
        """The hook output for a pass of further rows; a parent comes before its children. `layers`: runs of those that
        they go through, to the last one; () = all."""
        made = yield from self.add(ids, parents, logits_hook=logits_hook, layers=layers)
        return [made.hook_output(i) for i in range(len(ids))]

    def add(
        self,
        ids: Sequence[int],
        parents: Sequence[int],
        *,
        logits_hook: LogitsHook | None = None,
        draw: SamplingContext | None = None,
        layers: Sequence[range] = (),
        hidden: Tensor | None = None,
        shows: bool = False,
    ) -> Steps[ForwardResult]:
        """What a pass of further rows makes. `hidden`, `shows`: as a feed has them."""
        had, n, above = len(self), len(ids), list(self._above)
        line = np.zeros((n, had + n), dtype=np.bool_)
        for row, parent in enumerate(parents):
            above.append([*(above[parent] if parent >= 0 else ()), had + row])
            line[row, above[-1]] = True
        self._line, self._sees, self._grown, self._sent = torch.from_numpy(line), {}, {}, {}
        self._pos = [self._at + len(seen) - 1 for seen in above]
        among = (-1,) * n  # nobody walks down these rows
        states = None if self._states is None else self._behind(parents[0], self._states)
        assert states is None or [*parents[1:]] == [*range(had, had + n - 1)], "a state is of one line of rows"
        sees = self._line[:, had:] if n > 1 and states is None else None
        rows = Rows(ids, self._pos[had:], sees, tree=n, parent=among)
        for run in layers[:-1]:
            hidden = (yield ForwardRequest(self._lm, rows, self, layers=run, hidden=hidden)).hidden
        last = layers[-1] if layers else None
        of = self._lm, rows, self
        made = yield ForwardRequest(
            *of,
            want=range(n),
            draw=draw,
            logits_hook=logits_hook,
            layers=last,
            hidden=hidden,
            record_hidden_states=shows,
            states=states,
        )
        if states is not None and made.fold is not None:
            self._folds += [(made.fold, states, i + 1) for i in range(n)]
        self.ids += ids
        self.parents += parents
        self._above, self._held = above, self._grown
        return made

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Why it needs the host."""
        return DeviceCache(why_not="guesses of a draft lie beside the store")

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, n, D] of the pass under way, at positions pos [n] -> parts over all that they see."""
        assert own is not None, "rows see themselves"
        source = self._lm.shapes[layer].shared_from
        holder = layer if source is None else source
        if holder not in self._grown:
            k, v = self._held.get(holder, (own.k[:, :0], own.v[:, :0]))
            self._grown[holder] = torch.cat([k, own.k], 1), torch.cat([v, own.v], 1)
        k, v = self._grown[holder]
        sees = self._seen(sight.window, q)
        # by `dataclasses.replace` it takes four times as long
        both = NewRows(k, v, self._pos, self._line, sees, own.sink, own.before, self._sent)
        return self._past.attend(layer, q, sight, pos, both)

    def _seen(self, window: int | None, like: Tensor) -> Tensor:
        if window not in self._sees:
            near = self._line
            if window is not None:
                pos = torch.tensor(self._pos)
                near = near & (pos > (pos[-len(near) :] - window).unsqueeze(1))
            self._sees[window] = near.to(like.device)
        return self._sees[window]

    def path(self, ids: Sequence[int]) -> list[int]:
        """The rows that a text took that went on like this."""
        found, at = [], -1
        for token in ids:
            below = (i for i in range(at + 1, len(self)) if self.parents[i] == at and self.ids[i] == token)
            if (at := next(below, -1)) < 0:
                break
            found.append(at)
        return found

    def _behind(self, row: int, states: RecurrentStates) -> RecurrentStates:
        """Of a text that ends with this row; -1 = with what is stored."""
        found = RecurrentStates()
        found.now = states.now if row < 0 else self._known(row)
        return found

    def _known(self, row: int) -> StateCheckpoint:
        fold, states, n = self._folds[row]
        fold(n)
        return states.now

    def above(self, row: int) -> list[int]:
        """A row's ancestors, the first one first, and itself."""
        return self._above[row]

    def held(self, path: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor, int]]:
        """Keys and values of these rows, one behind the other, by layer, and where they begin (`Text.adopt`)."""
        for layer, (k, v) in self._held.items() if path else ():
            at = torch.tensor(path, device=k.device)
            yield layer, k.index_select(1, at), v.index_select(1, at), self._at

    def commit_path(self, kv: KVCache, path: Sequence[int]) -> None:
        """These become slots."""
        for layer, k, v, at in self.held(path):
            kv.append(layer, k, v, at)
        if self._states is not None and path:
            self._states.advance(self._known(path[-1]))

    def usage(self) -> list[Usage]:
        """Nothing that lasts."""
        return []
