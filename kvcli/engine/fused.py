"""What stands between products and attention made native: norms, MLPs, and whole decoder layers around their attention.

A module is replaced by what it does, not by its name: trial rows go through both, and it stays where they differ. Norms
and layers must agree to the bit; in an MLP e^x may be rounded to the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from kvcli.engine.engine import call
from kvcli.kernels.decoder_layer import Layer, after, before
from kvcli.kernels.gated_mlp.module import NativeMlp, mlp_
from kvcli.kernels.gated_mlp.product import product_of, type_of
from kvcli.kernels.rms_norm import Norm
from kvcli.kernels.rms_norm.module import NativeNorm, norm_

if TYPE_CHECKING:
    from kvcli.engine.lm import LM
    from kvcli.kv.slots import Sight

_POSITIONS = (0, 1, 2, 5, 26, 27, 131)  # of the trial rows


def fuse_(lm: LM, layers: Iterable[nn.Module]) -> str:
    """Make native what can be, in a model whose linear layers are; says what that is, "" = nothing."""
    norms, mlps = norm_(lm.model), mlp_(lm.model)
    done = 0
    for layer, trial in zip(layers, _trials(lm, layers) if mlps else (), strict=False):
        for turns in (True, False):
            fused = _fused(layer, trial, lm.head_dim, turns)
            if fused is not None and _is_same(fused, trial):
                layer.forward = fused
                done += 1
                break
    found = {"norms": norms, "MLPs": mlps, "whole layers": done}
    return ", ".join(f"{n} {what}" for what, n in found.items() if n)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a layer handed to its attention."""

    layer: int
    made: tuple[Tensor, Tensor, Tensor]  # q, k, v
    sight: Sight
    sink: Tensor | None


class Fused:
    """One layer in two calls. Holds its weights and no module: a module that held itself would outlive its model."""

    def __init__(
        self, layer: Layer, keeps: Sequence[object], asked: Asked, turns: bool, own: Callable[..., Any]
    ) -> None:
        """`keeps`: what holds the weights that `layer` points to; `own`: the module's forward, for what is no pass."""
        self.layer, self._keeps, self._turns = layer, keeps, turns
        self._index, self._sight = asked.layer, asked.sight
        self._dtype = torch.float32 if layer.mlp.is_wide else torch.bfloat16
        self._own = WeakMethod(own)

    def __call__(self, hidden_states: Tensor, *args: Any, **told: Any) -> Any:
        """hidden_states [1, N, E] -> the same of the next layer."""
        if told.get("kvcli_pass") is None or hidden_states.shape[0] != 1 or hidden_states.dtype != self._dtype:
            own: Any = self._own()
            return own(hidden_states, *args, **told)
        x = hidden_states[0]
        cos, sin = (table[0] for table in told["position_embeddings"]) if self._turns else (None, None)
        q, k, v = before(self.layer, x, cos, sin)
        out: Tensor = told["kvcli_pass"].attend(self._index, q, k, v, self._sight, None)
        return after(self.layer, x, out.transpose(0, 1).to(x.dtype)).unsqueeze(0)


# ---- trials ----


class _Listener:
    """Travels in place of a pass. A row attends to itself."""

    prunes = False

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sight: Sight, sink: Tensor | None) -> Tensor:
        self.asked.append(Asked(layer, (q.clone(), k.clone(), v.clone()), sight, sink))
        return q


@dataclass(frozen=True, slots=True)
class _Trial:
    """What came into a layer, what it was told, asked and gave."""

    hidden: Tensor  # [1, N, E]
    told: dict[str, Any]
    asked: Asked
    gave: Any


def _trials(lm: LM, layers: Iterable[nn.Module]) -> list[_Trial]:
    """One of each layer, from a pass of random tokens."""
    ids = torch.randint(0, lm.vocab, (len(_POSITIONS),), generator=torch.Generator().manual_seed(0)).tolist()
    pos = [p % lm.limit for p in _POSITIONS]
    listener, seen = _Listener(), list[tuple[Tensor, dict[str, Any], Any]]()

    def note(_: nn.Module, args: tuple[Any, ...], told: dict[str, Any], gave: Any) -> None:
        seen.append((args[0] if args else told["hidden_states"], told, gave))

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        call(lm.model, ids, pos, [0], kvcli_pass=listener)
    finally:
        for hook in hooks:
            hook.remove()
    pairs = zip(seen, listener.asked, strict=True)
    return [_Trial(hidden, told, asked, gave) for (hidden, told, gave), asked in pairs]


def _is_same(fused: Fused, trial: _Trial) -> bool:
    """Whether it hands the same to its attention and gives the same, to the bit."""
    listener = _Listener()
    gave = fused(trial.hidden, **{**trial.told, "kvcli_pass": listener})
    (asked,) = listener.asked
    pairs = [*zip(asked.made, trial.asked.made, strict=True), (gave, trial.gave)]
    return all(
        isinstance(theirs, Tensor) and theirs.dtype == ours.dtype and torch.equal(ours, theirs)
        for ours, theirs in pairs
    )


def _fused(layer: nn.Module, trial: _Trial, d: int, turns: bool) -> Fused | None:
    """The layer by its parts, were it of the common form; None where it has others."""
    parts = [vars(child).get("forward") for child in layer.children()]
    norms = [part for part in parts if isinstance(part, NativeNorm)]
    mlps = [part for part in parts if isinstance(part, NativeMlp)]
    asks = [child for child in layer.children() if getattr(child, "layer_idx", None) == trial.asked.layer]
    if len(norms) not in (2, 4) or (len(mlps), len(asks)) != (1, 1) or trial.asked.sink is not None:
        return None
    of_heads = [part for child in asks[0].children() if isinstance(part := vars(child).get("forward"), NativeNorm)]
    linears: list[Any] = [child for child in asks[0].children() if type_of(child) is not None]
    q, k, v = trial.asked.made
    e, inside = trial.hidden.shape[2], q.shape[0] * d
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
    return Fused(made, [*norms, *of_heads, *mlps, *weights], trial.asked, turns, layer.forward)
