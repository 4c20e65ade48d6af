"""A prompt on its way through a model layer by layer: all of it goes through one, part by part, before the next.

What a part makes in a layer is stored, and settled, before the next part comes. So the same rows meet the same past as
in reading chunk by chunk, in another order, and make the same bits; what a pass holds on to is of a part and a layer,
beside the hidden states of the whole prompt. Between layers, when all of the prompt is there, a pruner says who goes
on: rows that stay behind are no longer computed, and those further on do not see them, as if a mask hid them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest, Steps
from kvcli.engine.prefill.prompt_pruner import ActiveRows, PromptPruning, Pruner
from kvcli.engine.prefill.revival_pass import Stopped
from kvcli.engine.sequence.commit import commit
from kvcli.kv.slots import spans

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.rows import Rows
    from kvcli.kv.slots import KVCache


def check_model(lm: LM, pruning: PromptPruning | None) -> None:
    """Raises BadModel where rows cannot be stopped between layers, or be judged there."""
    if pruning is not None:
        pruning.describe(lm)
    if lm.straight is None:
        lm.check_layer_gates()


class LayerwisePrefill:
    """One such prompt. Whoever gives it up undoes in the store what was not there before."""

    def __init__(
        self,
        lm: LM,
        kv: KVCache,
        rows: Rows,
        part: int,
        hear: Sequence[int] = (),
        pruner: Pruner | None = None,
        *,
        comes_back: bool = False,
    ) -> None:
        """`part`: rows of a pass at most; `hear`: rows whose queries are kept. Layers that share slots go together.

        `comes_back`: some of it may go through layers later, so windows keep what these will see.
        """
        self.rows, self.hear, self.pruner = rows, hear, pruner
        self.queries: list[Tensor] = []  # per layer that it is through [H, len(hear), D]
        self._lm, self._kv, self._part = lm, kv, part
        self._comes_back, self.stopped = comes_back, Stopped()  # of those left behind so far, who may come back
        self._left = spans(lm.shapes)  # layers to come, those that it is in first
        self._hear = frozenset(hear)
        self._live: Sequence[int] = range(rows.n_rows)  # rows that go through these
        self._at = 0  # of these, how many did
        self._given: list[Tensor] = []  # [.., E] what the others are given: in parts, let go of one by one
        self._gave: list[Tensor] = []  # [.., E] what those gave
        self._heard: list[Sequence[Tensor]] = []  # by part, of these layers

    @property
    def is_over(self) -> bool:
        """Is it through all layers?"""
        return not self._left

    @property
    def layer(self) -> int:
        """That it is in."""
        return self._left[0].start if self._left else self._lm.n_layers

    @property
    def active_rows(self) -> ActiveRows:
        """Its rows as they come to this layer."""
        return ActiveRows(self._live, None, self.queries[-1] if self.queries else None)

    @property
    def n_done(self) -> int:
        """Rows whose way through all layers would have taken as much, all layers taken for equally long."""
        if not self._left:
            return self.rows.n_rows
        now = self._left[0]
        share = (now.start + len(now) * self._at / len(self._live)) / self._lm.n_layers
        return int(share * self.rows.n_rows)

    def step(self) -> Steps[None]:
        """One pass: the next part through its layers."""
        layers = self._left[0]
        if not self._at:
            self._enter(layers)
        mine = slice(self._at, min(self._at + self._part, len(self._live)))
        live = self._live[mine]
        rows = self.rows.only(live)
        hear = [i for i, row in enumerate(live) if row in self._hear] if self._hear else []
        given, left = _first(self._given, len(live))
        made = yield ForwardRequest(
            self._lm, rows, self._kv, record_queries=hear, is_prompt=True, layers=layers, hidden=given
        )
        end = 0 if self._comes_back else rows.pos[-1] + 1  # what windows hide behind it makes room, and then goes
        self._kv.compress((), end, [layer for layer in self._lm.sliding if layer in layers])
        commit(self._kv, rows, made, range(rows.n_rows))
        self._kv.compress((), end, layers)
        if hear:
            self._heard.append(made.queries)
        self._given, self._at = left, mine.stop
        if made.hidden is not None:
            gave = made.hidden  # of a pass with other texts it is a part, which would keep theirs
            self._gave.append(gave if gave.untyped_storage().nbytes() == gave.nbytes else gave.clone())
        if self._at == len(self._live):
            self._given, self._gave = self._gave, []
            self.queries += [torch.cat(parts, 1) for parts in zip(*self._heard, strict=True)]
            self._left, self._at, self._heard = self._left[1:], 0, []

    def _enter(self, layers: range) -> None:
        """Leave behind who does not go on, and make room for those who do: what grows by the part is copied often."""
        chosen = self.pruner(layers.start, self.active_rows) if self.pruner is not None else None
        if chosen is not None and len(chosen) < len(self._live):
            on = set(chosen)
            assert self._hear <= on, "rows that are heard go through every layer"
            if self._comes_back and self._given:
                stay = [i for i, row in enumerate(self._live) if row not in on]
                stopped = torch.cat([part[at] for part, at in _of_parts(self._given, stay)])
                self.stopped[layers.start] = [self.rows.pos[self._live[i]] for i in stay], stopped
            go = [i for i, row in enumerate(self._live) if row in on]
            for k, (part, at) in enumerate(_of_parts(self._given, go)):
                self._given[k] = part[at]
            self._live = [self._live[i] for i in go]
        here = [layer for layer in self._lm.storing if layer in layers]
        self._kv.reserve(max(map(self._kv.n_slots, here)) + len(self._live), here)


def _first(parts: Sequence[Tensor], n: int) -> tuple[Tensor | None, list[Tensor]]:
    """The first n rows of what lies in parts, and the parts of the others; None of nothing."""
    found, left = [], list(parts)
    while n and left:
        found.append(left[0][:n])
        n -= len(found[-1])
        left[0] = left[0][len(found[-1]) :]
        left = left if len(left[0]) else left[1:]
    return (torch.cat(found) if len(found) > 1 else found[0]) if found else None, left


def _of_parts(parts: Sequence[Tensor], rows: Sequence[int]) -> Iterator[tuple[Tensor, list[int]]]:
    """Each part, and which of its rows are among these, which rise."""
    at = end = 0
    for part in parts:
        begin, end, first = end, end + len(part), at
        while at < len(rows) and rows[at] < end:
            at += 1
        yield part, [row - begin for row in rows[first:at]]
