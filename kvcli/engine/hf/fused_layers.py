"""Native norms, MLPs and whole decoder layers around their attention.

A module is replaced by its behavior, not by its name: probe rows run through both, and it is unchanged if they differ.
Norms and layers must agree to the bit; in an MLP e^x may round the other way. Of MLPs and layers that are alike but for
their weights, two are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from kvcli.engine.engine import call
from kvcli.engine.hf.cache_shim import active_pass, current
from kvcli.engine.hf.reduced_model import kinds, reduced_model
from kvcli.kernels.decoder_layer import Layer, after, before
from kvcli.kernels.gated_mlp.module import NativeMlp, mlp_
from kvcli.kernels.gated_mlp.product import product_of, type_of
from kvcli.kernels.invariant_activations import make_activations_invariant_
from kvcli.kernels.module_probe import first_and_last
from kvcli.kernels.rms_norm import Norm
from kvcli.kernels.rms_norm.module import NativeNorm, norm_

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

    def __call__(self, hidden_states: Tensor, *args: Any, **told: Any) -> Any:
        """Run the layer: hidden_states [1, N, E] -> hidden states after it [1, N, E]."""
        its_pass = current()
        if its_pass is None or hidden_states.shape[0] != 1 or hidden_states.dtype != self._dtype:
            own: Any = self._own()
            return own(hidden_states, *args, **told)
        cos, sin = (table[0] for table in told["position_embeddings"]) if self._turns else (None, None)
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
    told: dict[str, Any]
    asked: AttentionInputs
    gave: Any


def _trials(lm: LM, layers: Sequence[nn.Module]) -> dict[int, _Trial]:
    """Run random tokens and return a test case for each layer to be tested."""
    ids = torch.randint(0, lm.vocab, (len(TRIAL),), generator=torch.Generator().manual_seed(0)).tolist()
    pos = [p % lm.limit for p in TRIAL]
    listener, seen = RecordingPass(), list[tuple[Tensor, dict[str, Any], Any]]()

    def note(_: nn.Module, args: tuple[Any, ...], told: dict[str, Any], gave: Any) -> None:
        seen.append((args[0] if args else told["hidden_states"], told, gave))

    with reduced_model(lm, layers) as tried:
        hooks = [layers[i].register_forward_hook(note, with_kwargs=True) for i in tried]
        try:
            call(lm.model, ids, pos, [0], its_pass=listener)
        finally:
            for hook in hooks:
                hook.remove()
    found = zip(seen, listener.asked, strict=True)
    return {asked.layer: _Trial(hidden, told, asked, gave) for (hidden, told, gave), asked in found}


def _is_same(fused: FusedLayer, trial: _Trial) -> bool:
    """True if the fused layer passes the same tensors to attention and has the same output, to the bit."""
    listener = RecordingPass()
    with active_pass(listener):
        gave = fused(trial.hidden, **trial.told)
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
    cos, _ = trial.told.get("position_embeddings") or (None, None)
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
