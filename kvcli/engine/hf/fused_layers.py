"""Fuse norms, MLPs and whole decoder layers around their attention into native ones, or into few launches on a GPU.

A module is replaced by its behavior, not by its name: probe rows run through both, and it is unchanged if they differ.
Native norms and layers must agree to the bit; in an MLP e^x may round the other way. On a GPU sums are added in another
order, so a few numbers may be rounded differently. Of MLPs and layers that are alike but for their weights, two are
tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvcli.engine.hf.cache_shim import RunningPass, active_pass, call
from kvcli.engine.hf.direct_forward import DirectForward, FusedLayer, LayerCalls, RopeTable
from kvcli.engine.hf.model_probe import kinds, reduced_model
from kvcli.kernels.decoder_layer import Layer, after, before
from kvcli.kernels.decoder_layer.gpu import GpuLayer
from kvcli.kernels.gated_mlp import FusedMlp, NativeMlp, mlp_, product_of, type_of
from kvcli.kernels.invariant_activations import make_activations_invariant_
from kvcli.kernels.linear_epilogue import Heads
from kvcli.kernels.linear_epilogue.module import merged, share_
from kvcli.kernels.module_probe import first_and_last
from kvcli.kernels.rms_norm import FusedNorm, NativeNorm, Norm, norm_

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import AttentionParams

TRIAL = (0, 1, 2, 5, 26, 27, 131)  # positions of the probe rows


def fuse_(lm: LM, layers: Sequence[nn.Module]) -> str:
    """Replace modules with ours, in a model whose linear layers are. Return a description; "" = none replaced."""
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
        # one by one, because each is a copy of weights until all agree
        tried = ((_fused(layers[i], trials[i], turns), trials[i]) for i in first_and_last(group))
        if all(fused is not None and _is_same(fused, trial) for fused, trial in tried):
            for i in group:
                fused = _fused(layers[i], replace(first, asked=replace(first.asked, layer=i)), turns)
                assert fused is not None
                fused.settle()
                layers[i].forward = fused
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
    """True if the fused layer passes the same tensors to attention and has the same output, to the bit on a CPU."""
    listener = RecordingPass()
    with active_pass(listener):
        gave = fused(trial.hidden, **trial.kwargs)
    (asked,) = listener.asked
    pairs = [*zip(asked.made, trial.asked.made, strict=True), (gave, trial.gave)]
    same = torch.equal if fused.is_native else _nearly_equal
    return all(
        isinstance(theirs, Tensor) and theirs.dtype == ours.dtype and theirs.shape == ours.shape and same(ours, theirs)
        for ours, theirs in pairs
    )


def _nearly_equal(ours: Tensor, theirs: Tensor) -> bool:
    """True if the difference is that of a few numbers rounded differently."""
    theirs = theirs.float()
    return bool((ours.float() - theirs).norm() <= torch.finfo(ours.dtype).eps / 2 * theirs.norm())


def _fused(layer: nn.Module, trial: _Trial, turns: bool) -> FusedLayer | None:
    """Return the fused layer, if the layer is a standard decoder layer; None if it has other modules."""
    parts = [vars(child).get("forward") for child in layer.children()]
    norms = [part for part in parts if isinstance(part, NativeNorm | FusedNorm)]
    mlps = [part for part in parts if isinstance(part, NativeMlp | FusedMlp)]
    asks = [child for child in layer.children() if getattr(child, "layer_idx", None) == trial.asked.layer]
    if len(norms) not in (2, 4) or (len(mlps), len(asks)) != (1, 1) or trial.asked.sink is not None:
        return None
    of_heads = [
        part for child in asks[0].children() if isinstance(part := vars(child).get("forward"), NativeNorm | FusedNorm)
    ]
    linears: list[Any] = [child for child in asks[0].children() if type_of(child) is not None]
    q, k, v = trial.asked.made
    e, d = trial.hidden.shape[2], q.shape[2]
    inside = q.shape[0] * d
    shapes = [(inside, e), (k.shape[0] * d, e), (v.shape[0] * d, e), (e, inside)]
    if [(linear.out_features, linear.in_features) for linear in linears] != shapes or e != mlps[0].n:
        return None
    if {len(norm.weight) for norm in norms} != {e} or [len(norm.weight) for norm in of_heads] not in ([], [d, d]):
        return None
    if {*map(type_of, linears), *(mlp.dtype for mlp in mlps)} != {trial.hidden.dtype}:
        return None
    cos, _ = trial.kwargs.get("position_embeddings") or (None, None)
    if turns and not (isinstance(cos, Tensor) and cos.dtype == trial.hidden.dtype and cos.shape[-1] <= d):
        return None
    made = _calls(norms, of_heads, linears, mlps[0], q.shape[0], d)
    return None if made is None else FusedLayer(trial.asked.layer, made, trial.asked.params, turns, layer.forward)


def _calls(
    norms: Any, of_heads: Any, linears: Sequence[nn.Module], mlp: Any, n_query: int, d: int
) -> LayerCalls | None:
    """Return what computes a layer of these modules, all of one device; None if its projections cannot be merged."""
    ends = [norms[0], norms[len(norms) // 2]]
    of_outputs = [norms[1], norms[3]] if len(norms) == 4 else []
    if isinstance(mlp, NativeMlp):
        products, weights = zip(*map(product_of, linears), strict=True)
        empty = [Norm(), Norm()]
        each = [norm.norm for norm in ends], [n.norm for n in of_heads] or empty, [n.norm for n in of_outputs] or empty
        layer = Layer(*chain(*each), *products, mlp.mlp, d)
        keeps = [*norms, *of_heads, mlp, *weights]
        return LayerCalls(partial(before, layer), partial(after, layer), mlp.dtype, keeps, is_native=True)
    qkv, o = merged(linears[:3]), merged(linears[3:])
    if qkv is None or o is None or len({n.norm.form for n in of_heads}) > 1:
        return None
    of_attention, of_mlp = [n.norm for n in of_outputs] or (None, None)
    heads = Heads(n_query, d, *(n.norm for n in of_heads))
    on_gpu = GpuLayer(ends[0].norm, ends[1].norm, of_attention, of_mlp, qkv, heads, o, mlp)
    settle = partial(share_, linears[:3], qkv)
    return LayerCalls(on_gpu.before, on_gpu.after, mlp.dtype, [], is_native=False, settle=settle)


def direct_forward_of(lm: LM, layers: Iterable[nn.Module]) -> DirectForward | None:
    """Return the direct forward pass of a model whose layers are all fused; None if its own loop computes anything
    else."""
    every = list(layers)
    inside = {id(module) for layer in every for module in layer.modules()}
    ways = [way for layer in every if isinstance(way := vars(layer).get("forward"), FusedLayer)]
    outside = [module for module in lm.model.modules() if id(module) not in inside]
    norms = [way for module in outside if isinstance(way := vars(module).get("forward"), NativeNorm | FusedNorm)]
    tables = [module for module in outside if hasattr(module, "inv_freq")]
    embedding, head = lm.model.get_input_embeddings(), lm.model.get_output_embeddings()
    if not ways or len(ways) < len(every) or len(norms) != 1 or len(tables) > 1:
        return None
    turns = RopeTable(tables[0], torch.empty(0, dtype=lm.dtype, device=lm.device)) if tables else None
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
