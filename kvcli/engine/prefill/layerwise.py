"""Layer-wise prefill: the whole prompt runs through one layer, chunk by chunk, before the next layer.

A chunk's KV in a layer is committed and compressed before the next chunk runs. So the same rows read the same cache as
in chunked prefill, in another order, and get the same bits. A pass needs memory for one chunk in one layer, besides the
hidden states of the whole prompt. Between layers, when all rows are done, a pruner selects the rows that continue.
Deferred rows are no longer computed, and rows that continue do not attend to them, as if masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest, Passes
from kvcli.engine.sequence.commit import commit
from kvcli.kv.slots import layer_groups

if TYPE_CHECKING:
    from kvcli.engine.forward_request import NewKV, Rows
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import KVCache


@dataclass(frozen=True, slots=True)
class ActiveRows:
    """The rows that reached a layer, all of which ran through the layer below."""

    rows: Sequence[int]  # rising
    fresh: NewKV | None  # new KV of the layer below; None before the first layer, or if it is committed already
    queries: Tensor | None  # [H, n, D], queries of the recorded rows there


# For one prompt: a layer and the rows that reached it -> the rows that continue, at least one and all recorded ones;
# None = all. A deferred row runs through none of the later layers (LazyLLM, arXiv 2407.14057).
Pruner = Callable[[int, ActiveRows], Sequence[int] | None]

Stopped = dict[int, tuple[list[int], Tensor]]  # layer before which they stopped -> positions, hidden states [n, E]


class LayerwisePrefill:
    """A layer-wise prefill of one prompt. A caller that abandons it must undo its changes to the KV cache."""

    def __init__(
        self,
        lm: LM,
        kv: KVCache,
        rows: Rows,
        part: int,
        recorded_rows: Sequence[int] = (),
        pruner: Pruner | None = None,
        *,
        may_revive: bool = False,
    ) -> None:
        """`part`: most rows of a pass. `recorded_rows`: rows whose queries are recorded. `may_revive`: deferred tokens
        may be revived later, so sliding windows keep the slots that they will attend to.
        """
        self.rows, self.recorded_rows, self.pruner = rows, recorded_rows, pruner
        self.queries: list[Tensor] = []  # per finished layer [H, len(recorded_rows), D]
        self.kv, self._lm, self._part = kv, lm, part
        self._may_revive, self.stopped = may_revive, Stopped()  # deferred rows so far, if they may be revived
        self._left = layer_groups(lm.shapes)  # layers left, the current ones first; a group runs together
        self._recorded_set = frozenset(recorded_rows)
        self._active: Sequence[int] = range(rows.n_rows)  # rows that run through the current layers, the active ones
        self._n_done_rows = 0  # number of the active rows that the current layers have run
        self._inputs: list[Tensor] = []  # [.., E] input of the rows still to run, in chunks that are freed one by one
        self._outputs: list[Tensor] = []  # [.., E] output of the rows that have run
        self._chunk_queries: list[Sequence[Tensor]] = []  # queries by chunk, of the current layers

    @property
    def is_over(self) -> bool:
        """True if all layers are done."""
        return not self._left

    @property
    def layer(self) -> int:
        """The current layer."""
        return self._left[0].start if self._left else self._lm.n_layers

    @property
    def active_rows(self) -> ActiveRows:
        """The rows that reached the current layer."""
        return ActiveRows(self._active, None, self.queries[-1] if self.queries else None)

    @property
    def n_done(self) -> int:
        """Number of rows through all layers that equals the work done, if all layers take the same time."""
        if not self._left:
            return self.rows.n_rows
        now = self._left[0]
        share = (now.start + len(now) * self._n_done_rows / len(self._active)) / self._lm.n_layers
        return int(share * self.rows.n_rows)

    def step(self) -> Passes[None]:
        """Run one pass: the next chunk through the current layers."""
        layers = self._left[0]
        if not self._n_done_rows:
            self._enter(layers)
        chunk = slice(self._n_done_rows, min(self._n_done_rows + self._part, len(self._active)))
        active = self._active[chunk]
        rows = self.rows.only(active)
        recorded = [i for i, row in enumerate(active) if row in self._recorded_set] if self._recorded_set else []
        inputs, left = _first(self._inputs, len(active))
        result = yield ForwardRequest(
            self._lm, rows, self.kv, record_queries=recorded, is_prompt=True, layers=layers, hidden=inputs
        )
        # evict slots that windows hide from later rows: before the commit to make room, and after it
        end = 0 if self._may_revive else rows.pos[-1] + 1
        self.kv.compress((), end, [layer for layer in self._lm.sliding if layer in layers])
        commit(self.kv, rows, result, range(rows.n_rows))
        self.kv.compress((), end, layers)
        if recorded:
            self._chunk_queries.append(result.queries)
        self._inputs, self._n_done_rows = left, chunk.stop
        if result.hidden is not None:
            out = result.hidden  # in a batched pass this is a slice, which would keep the other sequences' rows alive
            self._outputs.append(out if out.untyped_storage().nbytes() == out.nbytes else out.clone())
        if self._n_done_rows == len(self._active):
            self._inputs, self._outputs = self._outputs, []
            self.queries += [torch.cat(parts, 1) for parts in zip(*self._chunk_queries, strict=True)]
            self._left, self._n_done_rows, self._chunk_queries = self._left[1:], 0, []

    def _enter(self, layers: range) -> None:
        """Defer the rows that the pruner does not select, and reserve memory for the others at once: growing chunk by
        chunk would copy often."""
        chosen = self.pruner(layers.start, self.active_rows) if self.pruner is not None else None
        if chosen is not None and len(chosen) < len(self._active):
            on = set(chosen)
            assert self._recorded_set <= on, "the pruner deferred a row whose queries are recorded"
            if self._may_revive and self._inputs:
                stay = [i for i, row in enumerate(self._active) if row not in on]
                stopped = torch.cat([part[at] for part, at in _of_parts(self._inputs, stay)])
                self.stopped[layers.start] = [self.rows.pos[self._active[i]] for i in stay], stopped
            go = [i for i, row in enumerate(self._active) if row in on]
            for k, (part, at) in enumerate(_of_parts(self._inputs, go)):
                self._inputs[k] = part[at]
            self._active = [self._active[i] for i in go]
        here = [layer for layer in self._lm.storing if layer in layers]
        self.kv.reserve(max(map(self.kv.n_slots, here)) + len(self._active), here)


def _first(parts: Sequence[Tensor], n: int) -> tuple[Tensor | None, list[Tensor]]:
    """Return the first n rows of a list of chunks, and the chunks of the rest; None if there are no chunks."""
    found, left = [], list(parts)
    while n and left:
        found.append(left[0][:n])
        n -= len(found[-1])
        left[0] = left[0][len(found[-1]) :]
        left = left if len(left[0]) else left[1:]
    return (torch.cat(found) if len(found) > 1 else found[0]) if found else None, left


def _of_parts(parts: Sequence[Tensor], rows: Sequence[int]) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield each chunk and which of its rows are among `rows`, which rise."""
    at = end = 0
    for part in parts:
        begin, end, first = end, end + len(part), at
        while at < len(rows) and rows[at] < end:
            at += 1
        yield part, [row - begin for row in rows[first:at]]
