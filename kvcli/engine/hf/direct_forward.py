"""Direct forward pass through a model of standard decoder layers: embedding, native layers, norm, output layer.

transformers' own loop looks up settings by name, makes unneeded masks and records outputs, which takes as long as the
layers of a small model. As for fused layers, probe rows decide: if both ways do not give the same bits, as in a model
that scales its embeddings or logits, the model's own loop is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvcli.engine.engine import call
from kvcli.engine.hf.fused_layers import TRIAL, FusedLayer, RecordingPass
from kvcli.kernels.linear import rows_of
from kvcli.kernels.linear.module import NativeWeight
from kvcli.kernels.rms_norm.module import NativeNorm

if TYPE_CHECKING:
    from kvcli.engine.forward import BatchedPass, ForwardPass
    from kvcli.engine.hf.lm import LM

BLOCK = 256  # positions whose cosines and sines are computed at once
KEPT = 64  # blocks cached: in layer-wise prefill the positions recur in every layer


class RopeTable:
    """Cosines and sines by position, computed by the model's own module in blocks."""

    def __init__(self, module: nn.Module, like: Tensor) -> None:
        """`like`: a tensor of the model's dtype and device."""
        self._module, self._like = module, like
        self._block = lru_cache(KEPT)(lambda i: self._asked(range(i * BLOCK, (i + 1) * BLOCK)))

    def __call__(self, pos: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return cos, sin [N, R]."""
        first, last = min(pos), max(pos)
        is_run = isinstance(pos, range) or all(b == a + 1 for a, b in pairwise(pos))
        blocks = range(first // BLOCK, last // BLOCK + 1)
        if len(blocks) > (KEPT if is_run or len(pos) > BLOCK else 1):  # a pruned prompt has many rows with gaps
            return self._asked(pos)
        each = [self._block(i) for i in blocks]
        cos, sin = (torch.cat(of) if len(of) > 1 else of[0] for of in zip(*each, strict=True))
        at = first % BLOCK
        if is_run:
            return cos[at : at + len(pos)], sin[at : at + len(pos)]
        rows = torch.tensor(pos) - blocks[0] * BLOCK
        return cos[rows], sin[rows]

    def is_fixed(self, limit: int) -> bool:
        """True if the rotation of a position does not depend on the positions of other rows in the pass."""
        near = range(min(32, limit))
        alone, among = self._asked(near), self._asked([*near, limit - 1])
        return all(torch.equal(a, b[: len(near)]) for a, b in zip(alone, among, strict=True))

    def _asked(self, pos: Sequence[int]) -> tuple[Tensor, Tensor]:
        cos, sin = self._module(self._like, position_ids=torch.tensor([list(pos)]))
        return cos[0], sin[0]


class DirectForward:
    """A direct forward pass. It holds modules of the model, but not the model."""

    def __init__(
        self, embedding: nn.Module, turns: RopeTable | None, layers: Sequence[FusedLayer], norm: Any, head: nn.Module
    ):
        """`norm`: the final norm."""
        self._embedding, self._turns, self._layers, self._norm, self._head = embedding, turns, layers, norm, head
        self._weight = embedding.weight if type(embedding) is nn.Embedding else None

    def __call__(
        self,
        ids: Sequence[int],
        pos: Sequence[int],
        want: Sequence[int] | None,
        its_pass: ForwardPass | BatchedPass | RecordingPass,
        layers: range | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return the logits [len(want), V] of these rows; None = of all rows.

        `layers`: run these layers only, with the input `hidden` [N, E] or the embeddings. If they end below the last
        layer, return their output [N, E].
        """
        through = range(len(self._layers)) if layers is None else layers
        with torch.inference_mode():
            x = self._embedded(ids) if hidden is None else hidden
            cos, sin = self._turns(pos) if self._turns is not None else (None, None)
            for i in through:
                x = self._layers[i].run(x, cos, sin, its_pass)
            if through.stop < len(self._layers):
                return x
            x = self._norm(x if want is None else x[want])
            if getattr(its_pass, "shows", False):  # hooks do not run, because no module is called
                its_pass.hidden_states = x  # type: ignore[union-attr]
            logits: Tensor = self._head.forward(x)
        return logits

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        if isinstance(self._weight, NativeWeight):
            return rows_of(self._weight.packed, torch.tensor(ids), self._weight.dtype)
        found: Tensor = self._embedding(torch.tensor(ids))
        return found


def direct_forward_of(lm: LM, layers: Iterable[nn.Module]) -> DirectForward | None:
    """Return the direct forward pass of a model whose layers are all fused; None if its own loop computes anything
    else."""
    every = list(layers)
    inside = {id(module) for layer in every for module in layer.modules()}
    ways = [way for layer in every if isinstance(way := vars(layer).get("forward"), FusedLayer)]
    outside = [module for module in lm.model.modules() if id(module) not in inside]
    norms = [way for module in outside if isinstance(way := vars(module).get("forward"), NativeNorm)]
    tables = [module for module in outside if hasattr(module, "inv_freq")]
    embedding, head = lm.model.get_input_embeddings(), lm.model.get_output_embeddings()
    if not ways or len(ways) < len(every) or len(norms) != 1 or len(tables) > 1:
        return None
    turns = RopeTable(tables[0], torch.empty(0, dtype=lm.dtype)) if tables else None
    found = DirectForward(embedding, turns, ways, norms[0], head)
    is_fixed = turns is None or turns.is_fixed(lm.limit)
    return found if is_fixed and all(_is_same(lm, found, pos) for pos in (TRIAL, (lm.limit - 1,))) else None


def _is_same(lm: LM, straight: DirectForward, positions: Sequence[int]) -> bool:
    """True if it gives the model's logits to the bit: for random tokens, for all rows and for some."""
    pos = [p % lm.limit for p in positions]
    ids = torch.randint(0, lm.vocab, (len(pos),), generator=torch.Generator().manual_seed(0)).tolist()
    return all(
        torch.equal(call(lm.model, ids, pos, want, its_pass=RecordingPass()), straight(ids, pos, want, RecordingPass()))
        for want in (None, [len(pos) - 1])
    )
