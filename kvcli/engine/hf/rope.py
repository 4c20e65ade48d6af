"""Rotary embedding of each layer as numbers, found by probing the model: for keys that are stored without rotation, or
moved to other positions.

transformers keeps frequencies in a module, but which layer uses which, and how channels pair up, is in each family's
code. So each table is compared with the keys of one token at several positions, as the layers compute them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from kvcli.engine.hf.cache_shim import RunningPass, call
from kvcli.errors import BadModel
from kvcli.kernels.rope import Rotary, rotate, unrotate

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import AttentionParams

# positions of one test pass; another one has far positions, where a table that depends on length differs
NEAR = (0, 1, 5, 26)
# relative error of a rotated key: keys are rounded to the model's dtype, and a wrong table is off by about 1
_WITHIN = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.04}


@dataclass
class _KeyRecorder(RunningPass):
    """A stand-in for a forward pass that records the keys of each layer. Attention outputs zeros, so that a row's
    position affects only its own keys."""

    keys: list[Tensor] = field(default_factory=list)  # per layer [K, N, D]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        self.keys.append(k)
        return q.new_zeros(*q.shape[:2], v.shape[2])


def rotaries(lm: LM) -> tuple[Rotary | None, ...]:
    """Return the rotary embedding of each layer's keys, for any length of text; None = no rotation.

    Raises BadModel if no fixed table describes it: dynamic NTK, longrope that changes tables on the way, and models
    without rotary embedding.
    """
    if lm.rotaries is None:
        lm.rotaries = _found(lm)
    return lm.rotaries


def _found(lm: LM) -> tuple[Rotary | None, ...]:
    try_ = ["--set reuse.method=none", "--set context.on_overflow=error", "--set kv_format.rope=after"]
    lm.recurrent_layers.refuse(lm.info.id, "recurrent states cannot move to other positions", try_)
    if any(of.rank for of in lm.shapes):
        _refuse(lm, "it stores latents, of which only a part is rotated")
    tables = list(_tables(lm))
    far = (0, 131, lm.limit // 2, lm.limit - 1)
    passes = [torch.tensor(sorted({p for p in at if p < lm.limit}), device=lm.device) for at in (NEAR, far)]
    recorded = [(pos, _keys(lm, pos)) for pos in passes]
    found = []
    for layer in range(lm.n_layers):
        keys = [(pos, of_layer[layer]) for pos, of_layer in recorded]
        fit = [rotary for rotary in tables if 2 * len(rotary.inv_freq) <= keys[0][1].shape[2]]
        off = [max(_off(rotary, pos, k) for pos, k in keys) for rotary in (None, *fit)]
        best = min(range(len(off)), key=off.__getitem__)
        if not off[best] <= _WITHIN.get(lm.dtype, 0.04):
            _refuse(lm, f"layer {layer} rotates its keys by no fixed table", [f"relative error {off[best]:.2g}"])
        found.append(None if best == 0 else fit[best - 1])
    return tuple(found)


def _tables(lm: LM) -> Iterator[Rotary]:
    """Yield every table in the model, with both ways to pair channels."""
    is_any = False
    for module in lm.model.modules():
        for name, inv_freq in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
                continue
            kind = name.removesuffix("inv_freq")  # kind of layer, if one module serves several
            types = getattr(module, "rope_type", "")
            rope = str(types.get(kind.removesuffix("_"), "") if isinstance(types, dict) else types)
            if "dynamic" in rope:
                _refuse(lm, f'its rotary embedding is "{rope}", whose frequencies depend on the length of the text')
            scaling = float(getattr(module, f"{kind}attention_scaling", 1.0))
            is_any = True
            for interleaved in (False, True):
                yield Rotary(inv_freq.clone(), scaling, interleaved)
    if not is_any:
        _refuse(lm, "it has no rotary embedding")


def _keys(lm: LM, pos: Tensor) -> list[Tensor]:
    """Return the keys [K, N, D] of one token at these positions, in each layer."""
    recorder = _KeyRecorder()
    call(lm.model, [lm.vocab // 2] * pos.shape[0], pos.tolist(), [0], its_pass=recorder)
    return recorder.keys


def _off(rotary: Rotary | None, pos: Tensor, k: Tensor) -> float:
    """Return the relative error of keys [K, N, D], if each were the first key rotated to its position."""
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    first = k[:, :1] if rotary is None else unrotate(k[:, :1], pos[:1], rotary)
    wanted = first.expand_as(k) if rotary is None else rotate(first.expand_as(k), pos, rotary)
    return float((wanted - k).norm() / k.norm().clamp_min(1e-30))


def _refuse(lm: LM, why: str, lines: Sequence[str] = ()) -> NoReturn:
    raise BadModel(
        f"keys of {lm.info.id} ({lm.info.family}) cannot be rotated to other positions: {why}",
        code="model_unsupported",
        lines=lines,
        try_=["--set reuse.method=none", "--set kv_format.rope=after"],
    )
