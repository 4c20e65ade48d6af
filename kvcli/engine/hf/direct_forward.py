"""Direct forward pass through a model of standard decoder layers: embedding, native layers, norm, output layer.

transformers' own loop looks up settings by name, makes unneeded masks and records outputs, which takes as long as the
layers of a small model. As for fused layers, probe rows decide (fused_layers.py): if both ways do not give the same
bits, as in a model that scales its embeddings or logits, the model's own loop is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from kvcli.engine.hf.cache_shim import RunningPass, current
from kvcli.kernels.linear import NativeWeight

if TYPE_CHECKING:
    from kvcli.kv.slots import AttentionParams


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """The calls that compute a decoder layer around its attention."""

    before: Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor]]  # x, cos, sin -> q, k, v
    after: Callable[[Tensor, Tensor], Tensor]  # x, attention output [N, H, D] -> x
    dtype: torch.dtype | None  # of the layer's inputs
    keeps: Sequence[object]  # owners of memory that these refer to by address
    is_native: bool  # equal to the modules to the bit
    settle: Callable[[], None] = lambda: None  # frees what the modules have twice


class FusedLayer:
    """A decoder layer in two calls. It holds its weights and no module, because a module that refers to itself would
    outlive its model."""

    def __init__(
        self, index: int, calls: LayerCalls, params: AttentionParams, turns: bool, own: Callable[..., Any]
    ) -> None:
        """`turns`: keys are rotated. `own`: the module's forward, used outside of a pass."""
        self._index, self._calls, self._params, self._turns = index, calls, params, turns
        self.is_native, self.settle = calls.is_native, calls.settle
        self._own = WeakMethod(own)
        self.kind = turns

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer: hidden_states [1, N, E] -> hidden states after it [1, N, E]."""
        its_pass = current()
        if its_pass is None or hidden_states.shape[0] != 1 or hidden_states.dtype != self._calls.dtype:
            own: Any = self._own()
            return own(hidden_states, *args, **kwargs)
        cos, sin = (table[0] for table in kwargs["position_embeddings"]) if self._turns else (None, None)
        return self.run(hidden_states[0], cos, sin, its_pass).unsqueeze(0)

    def run(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, its_pass: RunningPass) -> Tensor:
        """Run the layer: x [N, E] in its dtype -> hidden states after it; cos, sin [N, R] if it has rotary
        embedding."""
        q, k, v = self._calls.before(x, cos, sin) if self._turns else self._calls.before(x, None, None)
        out = its_pass.attend(self._index, q, k, v, self._params, None).transpose(0, 1)
        return self._calls.after(x, out if out.dtype is x.dtype else out.to(x.dtype))


BLOCK = 256  # positions whose cosines and sines are computed at once
KEPT = 64  # blocks cached: in layer-wise prefill the positions recur in every layer


class RopeTable:
    """Cosines and sines by position, computed by the model's own module in blocks."""

    def __init__(self, module: nn.Module, like: Tensor) -> None:
        """`like`: a tensor of the model's dtype and device."""
        self._module, self._like = module, like
        self._block = lru_cache(KEPT)(lambda i: self._asked(range(i * BLOCK, (i + 1) * BLOCK)))

    def __call__(self, pos: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return cos, sin [N, R]; of positions on the device without the host."""
        if isinstance(pos, Tensor):
            return self._asked(pos)
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
        rows = torch.tensor(pos, device=cos.device) - blocks[0] * BLOCK
        return cos[rows], sin[rows]

    def is_fixed(self, limit: int) -> bool:
        """True if the rotation of a position does not depend on the positions of other rows in the pass."""
        near = range(min(32, limit))
        alone, among = self._asked(near), self._asked([*near, limit - 1])
        return all(torch.equal(a, b[: len(near)]) for a, b in zip(alone, among, strict=True))

    def _asked(self, pos: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        at = pos if isinstance(pos, Tensor) else torch.tensor(list(pos), device=self._like.device)
        cos, sin = self._module(self._like, position_ids=at.unsqueeze(0))
        return cos[0], sin[0]


class DirectForward:
    """A direct forward pass. It holds modules of the model, but not the model."""

    def __init__(
        self, embedding: nn.Module, turns: RopeTable | None, layers: Sequence[FusedLayer], norm: Any, head: nn.Module
    ):
        """`norm`: the final norm."""
        self._embedding, self._turns, self._layers, self._norm, self._head = embedding, turns, layers, norm, head
        self._weight = embedding.weight if type(embedding) is nn.Embedding else None
        self._device = next(embedding.parameters()).device

    def __call__(
        self,
        ids: Sequence[int] | Tensor,
        pos: Sequence[int] | Tensor,
        want: Sequence[int] | None,
        its_pass: RunningPass,
        layers: range | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return the logits [len(want), V] of these rows; None = of all rows.

        `layers`: run these layers only, with the input `hidden` [N, E] or the embeddings. If they end below the last
        layer, return their output [N, E]. Ids and positions are int64 tensors on the device in captured passes.
        """
        through = range(len(self._layers)) if layers is None else layers
        with torch.inference_mode():
            x = self._embedded(ids) if hidden is None else hidden
            cos, sin = self._turns(pos) if self._turns is not None else (None, None)
            for i in through:
                if i in its_pass.shows:  # hooks do not run, because no module is called
                    its_pass.hidden_states[i] = x
                x = self._layers[i].run(x, cos, sin, its_pass)
            if through.stop < len(self._layers):
                return x
            x = self._norm(x if want is None else x[want])
            if its_pass.shows:
                its_pass.hidden_states[-1] = x
            logits: Tensor = self._head.forward(x)
        return logits

    def _embedded(self, ids: Sequence[int] | Tensor) -> Tensor:
        at = ids if isinstance(ids, Tensor) else torch.tensor(ids, device=self._device)
        if isinstance(self._weight, NativeWeight):
            return self._weight.rows(at)
        found: Tensor = self._embedding(at)
        return found
