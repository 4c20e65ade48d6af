"""A pass straight through a model of the common form: embedding, native layers, norm, head.

Between these transformers looks up settings by name, asks for masks that nobody wants and keeps records of what went
by, which takes as long as the layers of a small model. As with what is fused, trial rows decide: where they do not give
the same bits both ways, as in a model that scales its embeddings or its logits, its own loop stays.
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

BLOCK = 256  # positions turned at once
KEPT = 64  # of these: layer by layer a prompt comes by as often as there are layers


class RopeTable:
    """Cosines and sines by position as the model's own module makes them, of a block at once."""

    def __init__(self, module: nn.Module, like: Tensor) -> None:
        """`like`: of the model's type and device."""
        self._module, self._like = module, like
        self._block = lru_cache(KEPT)(lambda i: self._asked(range(i * BLOCK, (i + 1) * BLOCK)))

    def __call__(self, pos: Sequence[int]) -> tuple[Tensor, Tensor]:
        """cos, sin [N, R]."""
        first, last = min(pos), max(pos)
        is_run = isinstance(pos, range) or all(b == a + 1 for a, b in pairwise(pos))
        blocks = range(first // BLOCK, last // BLOCK + 1)
        if len(blocks) > (KEPT if is_run or len(pos) > BLOCK else 1):  # of a pruned prompt many rows, with gaps
            return self._asked(pos)
        each = [self._block(i) for i in blocks]
        cos, sin = (torch.cat(of) if len(of) > 1 else of[0] for of in zip(*each, strict=True))
        at = first % BLOCK
        if is_run:
            return cos[at : at + len(pos)], sin[at : at + len(pos)]
        rows = torch.tensor(pos) - blocks[0] * BLOCK
        return cos[rows], sin[rows]

    def is_fixed(self, limit: int) -> bool:
        """Whether a position turns alike however far other rows of the pass are."""
        near = range(min(32, limit))
        alone, among = self._asked(near), self._asked([*near, limit - 1])
        return all(torch.equal(a, b[: len(near)]) for a, b in zip(alone, among, strict=True))

    def _asked(self, pos: Sequence[int]) -> tuple[Tensor, Tensor]:
        cos, sin = self._module(self._like, position_ids=torch.tensor([list(pos)]))
        return cos[0], sin[0]


class DirectForward:
    """Holds parts of the model, and not the model."""

    def __init__(
        self, embedding: nn.Module, turns: RopeTable | None, layers: Sequence[FusedLayer], norm: Any, head: nn.Module
    ):
        """`norm`: of what the last layer gives."""
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
        """Logits [len(want), V] of these rows; None = of all.

        `layers`: through these alone, of which the first is given `hidden` [N, E], or the embeddings. What they give
        [N, E] where they end below the last.
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
            if getattr(its_pass, "shows", False):  # no hook hears what calls no module
                its_pass.shown = x  # type: ignore[union-attr]
            logits: Tensor = self._head.forward(x)
        return logits

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        if isinstance(self._weight, NativeWeight):
            return rows_of(self._weight.packed, torch.tensor(ids), self._weight.dtype)
        found: Tensor = self._embedding(torch.tensor(ids))
        return found


def direct_forward_of(lm: LM, layers: Iterable[nn.Module]) -> DirectForward | None:
    """A way straight through a model all of whose layers are fused; None where its own loop does anything else."""
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
    """Whether it gives the model's logits to the bit: random tokens, of all rows and of some."""
    pos = [p % lm.limit for p in positions]
    ids = torch.randint(0, lm.vocab, (len(pos),), generator=torch.Generator().manual_seed(0)).tolist()
    return all(
        torch.equal(call(lm.model, ids, pos, want, its_pass=RecordingPass()), straight(ids, pos, want, RecordingPass()))
        for want in (None, [len(pos) - 1])
    )
