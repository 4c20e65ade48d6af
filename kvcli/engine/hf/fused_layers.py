"""Native norms, MLPs and whole decoder layers around their attention.

A module is replaced by its behavior, not by its name: probe rows run through both, and it is unchanged if they differ.
Norms and layers must agree to the bit; in an MLP e^x may round the other way. Of MLPs and layers that are alike but for
their weights, two are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from kvcli.engine.engine import call
from kvcli.engine.hf.cache_shim import active_pass, current
from kvcli.engine.hf.model_probe import kinds, reduced_model
from kvcli.kernels.decoder_layer import Layer, after, before
from kvcli.kernels.gated_mlp import NativeMlp, mlp_, product_of, type_of
from kvcli.kernels.invariant_activations import make_activations_invariant_
from kvcli.kernels.linear import NativeWeight, rows_of
from kvcli.kernels.module_probe import first_and_last
from kvcli.kernels.rms_norm import NativeNorm, Norm, norm_

if TYPE_CHECKING:
    from kvcli.engine.forward import BatchedPass, ForwardPass
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import AttentionParams

TRIAL = (0, 1, 2, 5, 26, 27, 131)  # positions of the probe rows


def fuse_(lm: LM, layers: Sequence[nn.Module]) -> str:
    """Replace modules with native ones, in a model whose linear layers are native. Return a description; "" = none
    replaced."""
    norms, mlps = norm_(lm.model), mlp_(lm.model)
    done = 0
    if mlps and layers:
        trials = _trials(lm, layers)
        done = sum(_fuse_alike(lm, layers, group, trials) for group in kinds(lm, layers))
    make_activations_invariant_(lm.model)  # for ungated MLPs, and for rows that no native layer supports
    found = {"norms": norms, "MLPs": mlps, "whole layers": done}
    return ", ".join(f"{n} {what}" for what, n in found.items() if n)


def _fuse_alike(lm: LM, layers: Sequence[nn.Module], group: Sequence[int], trials: Mapping[int, _Trial]) -> int:
    """Replace all layers of a kind if the tested ones agree. Return their number."""
    first = trials[group[0]]
    for turns in (True, False):
        asked = [replace(first.asked, layer=i) for i in group]
        made = [_fused(layers[a.layer], replace(first, asked=a), turns) for a in asked]
        tried = [(fused, trials[i]) for fused, i in first_and_last([*zip(made, group, strict=True)])]
        if all(made) and all(fused is not None and _is_same(fused, trial) for fused, trial in tried):
            for i, fused in zip(group, made, strict=True):
                layers[i].forward = fused  # type: ignore[assignment]
            return len(group)
    return 0


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The arguments that a layer passed to its attention."""

    layer: int
    made: tuple[Tensor, Tensor, Tensor]  # q, k, v
    params: AttentionParams
    sink: Tensor | None


class FusedLayer:
    """A decoder layer in two native calls. It holds its weights and no module, because a module that refers to itself
    would outlive its model."""

    def __init__(
        self, layer: Layer, keeps: Sequence[object], asked: AttentionInputs, turns: bool, own: Callable[..., Any]
    ) -> None:
        """`keeps`: owners of the weights that `layer` points to; `own`: the module's forward, used outside of a
        pass."""
        self.layer, self._keeps, self._turns = layer, keeps, turns
        self._index, self._params = asked.layer, asked.params
        self._dtype = torch.float32 if layer.mlp.is_wide else torch.bfloat16
        self._own = WeakMethod(own)
        self.kind = turns

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer: hidden_states [1, N, E] -> hidden states after it [1, N, E]."""
        its_pass = current()
        if its_pass is None or hidden_states.shape[0] != 1 or hidden_states.dtype != self._dtype:
            own: Any = self._own()
            return own(hidden_states, *args, **kwargs)
        cos, sin = (table[0] for table in kwargs["position_embeddings"]) if self._turns else (None, None)
        return self.run(hidden_states[0], cos, sin, its_pass).unsqueeze(0)

    def run(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, its_pass: ForwardPass | BatchedPass | RecordingPass
    ) -> Tensor:
        """Run the layer: x [N, E] in its dtype -> hidden states after it; cos, sin [N, R] if it has rotary
        embedding."""
        q, k, v = before(self.layer, x, cos, sin) if self._turns else before(self.layer, x, None, None)
        out = its_pass.attend(self._index, q, k, v, self._params, None).transpose(0, 1)
        return after(self.layer, x, out if out.dtype is x.dtype else out.to(x.dtype))


# ---- tests of fused layers ----


class RecordingPass:
    """A stand-in for a forward pass that records attention arguments. A row attends to itself."""

    def __init__(self) -> None:
        self.asked: list[AttentionInputs] = []

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        self.asked.append(AttentionInputs(layer, (q.clone(), k.clone(), v.clone()), params, sink))
        return q if q.shape[2] == v.shape[2] else v.repeat_interleave(q.shape[0] // v.shape[0], 0)


@dataclass(frozen=True, slots=True)
class _Trial:
    """The input, keyword arguments, attention arguments and output of a layer in a test."""

    hidden: Tensor  # [1, N, E]
    kwargs: dict[str, Any]
    asked: AttentionInputs
    gave: Any


def _trials(lm: LM, layers: Sequence[nn.Module]) -> dict[int, _Trial]:
    """Run random tokens and return a test case for each layer to be tested."""
    ids = torch.randint(0, lm.vocab, (len(TRIAL),), generator=torch.Generator().manual_seed(0)).tolist()
    pos = [p % lm.limit for p in TRIAL]
    listener, seen = RecordingPass(), list[tuple[Tensor, dict[str, Any], Any]]()

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gave: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"], kwargs, gave))

    with reduced_model(lm, layers) as tried:
        hooks = [layers[i].register_forward_hook(note, with_kwargs=True) for i in tried]
        try:
            call(lm.model, ids, pos, [0], its_pass=listener)
        finally:
            for hook in hooks:
                hook.remove()
    found = zip(seen, listener.asked, strict=True)
    return {asked.layer: _Trial(hidden, kwargs, asked, gave) for (hidden, kwargs, gave), asked in found}


def _is_same(fused: FusedLayer, trial: _Trial) -> bool:
    """True if the fused layer passes the same tensors to attention and has the same output, to the bit."""
    listener = RecordingPass()
    with active_pass(listener):
        gave = fused(trial.hidden, **trial.kwargs)
    (asked,) = listener.asked
    pairs = [*zip(asked.made, trial.asked.made, strict=True), (gave, trial.gave)]
    return all(
        isinstance(theirs, Tensor) and theirs.dtype == ours.dtype and torch.equal(ours, theirs)
        for ours, theirs in pairs
    )


def _fused(layer: nn.Module, trial: _Trial, turns: bool) -> FusedLayer | None:
    """Return the fused layer, if the layer is a standard decoder layer; None if it has other modules."""
    parts = [vars(child).get("forward") for child in layer.children()]
    norms = [part for part in parts if isinstance(part, NativeNorm)]
    mlps = [part for part in parts if isinstance(part, NativeMlp)]
    asks = [child for child in layer.children() if getattr(child, "layer_idx", None) == trial.asked.layer]
    if len(norms) not in (2, 4) or (len(mlps), len(asks)) != (1, 1) or trial.asked.sink is not None:
        return None
    of_heads = [part for child in asks[0].children() if isinstance(part := vars(child).get("forward"), NativeNorm)]
    linears: list[Any] = [child for child in asks[0].children() if type_of(child) is not None]
    q, k, v = trial.asked.made
    e, d = trial.hidden.shape[2], q.shape[2]
    inside = q.shape[0] * d
    shapes = [(inside, e), (k.shape[0] * d, e), (v.shape[0] * d, e), (e, inside)]
    if [(linear.out_features, linear.in_features) for linear in linears] != shapes or e != mlps[0].mlp.down.N:
        return None
    if {norm.norm.H for norm in norms} != {e} or [norm.norm.H for norm in of_heads] not in ([], [d, d]):
        return None
    if {*map(type_of, linears), *(mlp.dtype for mlp in mlps)} != {trial.hidden.dtype}:
        return None
    cos, _ = trial.kwargs.get("position_embeddings") or (None, None)
    if turns and not (isinstance(cos, Tensor) and cos.dtype == trial.hidden.dtype and cos.shape[-1] <= d):
        return None
    products, weights = zip(*map(product_of, linears), strict=True)
    made = Layer(
        *(norm.norm for norm in (norms[0], norms[len(norms) // 2])),
        *([norm.norm for norm in of_heads] or [Norm(), Norm()]),
        *([norms[1].norm, norms[3].norm] if len(norms) == 4 else [Norm(), Norm()]),
        *products,
        mlps[0].mlp,
        d,
    )
    return FusedLayer(made, [*norms, *of_heads, *mlps, *weights], trial.asked, turns, layer.forward)


# Direct forward pass through a model of standard decoder layers: embedding, native layers, norm, output layer.
#
# transformers' own loop looks up settings by name, makes unneeded masks and records outputs, which takes as long as the
# layers of a small model. As for fused layers, probe rows decide: if both ways do not give the same bits, as in a model
# that scales its embeddings or logits, the model's own loop is used.


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
    return found if is_fixed and all(_gives_same_logits(lm, found, pos) for pos in (TRIAL, (lm.limit - 1,))) else None


def _gives_same_logits(lm: LM, straight: DirectForward, positions: Sequence[int]) -> bool:
    """True if it gives the model's logits to the bit: for random tokens, for all rows and for some."""
    pos = [p % lm.limit for p in positions]
    ids = torch.randint(0, lm.vocab, (len(pos),), generator=torch.Generator().manual_seed(0)).tolist()
    return all(
        torch.equal(call(lm.model, ids, pos, want, its_pass=RecordingPass()), straight(ids, pos, want, RecordingPass()))
        for want in (None, [len(pos) - 1])
    )
