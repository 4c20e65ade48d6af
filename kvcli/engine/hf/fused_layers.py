"""Fuse norms, MLPs and whole decoder layers around their attention into native ones.

A module is replaced by its behavior, not by its name: probe rows run through both, and it is unchanged if they differ.
Norms and layers must agree to the bit; in an MLP e^x may round the other way. Of MLPs and layers that are alike but for
their weights, two are tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvcli.engine.hf.cache_shim import RunningPass, active_pass, call
from kvcli.engine.hf.direct_forward import DirectForward, FusedLayer, RopeTable
from kvcli.engine.hf.model_probe import kinds, reduced_model
from kvcli.kernels.decoder_layer import Layer
from kvcli.kernels.gated_mlp import NativeMlp, mlp_, product_of, type_of
from kvcli.kernels.invariant_activations import make_activations_invariant_
from kvcli.kernels.module_probe import first_and_last
from kvcli.kernels.rms_norm import NativeNorm, Norm, norm_

if TYPE_CHECKING:
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


# Tests of fused layers.


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The arguments that a layer passed to its attention."""

    layer: int
    made: tuple[Tensor, Tensor, Tensor]  # q, k, v
    params: AttentionParams
    sink: Tensor | None


class RecordingPass(RunningPass):
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
    keeps = [*norms, *of_heads, *mlps, *weights]
    return FusedLayer(trial.asked.layer, made, trial.asked.params, turns, layer.forward, keeps)


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
