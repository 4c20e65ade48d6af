"""Products with what follows them in one launch: numbers of the reference, and the bits that a row has alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.kernels.decoder_layer import reference as layer
from kvcli.kernels.gated_mlp.reference import ACTIVATIONS
from kvcli.kernels.linear_epilogue import Heads, MergedLinear
from kvcli.kernels.linear_quantized import reference as rounding
from kvcli.kernels.linear_skinny import Weight, pack4, pack8, plain
from kvcli.kernels.linear_skinny import reference as skinny_reference
from kvcli.kernels.rms_norm.reference import RMS, rms_norm

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before anything that is fused
fused, skinny = (import_module(f"kvcli.kernels.{op}.fused") for op in ("linear_epilogue", "linear_skinny"))
torch.set_num_threads(1)

K = 128
Run = Callable[[Tensor, MergedLinear], Any]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(n: int, kind: str, dtype: torch.dtype, *, biased: bool) -> MergedLinear:
    """Of two weights in one."""
    w = (noise(n, K) / 6).to(dtype)
    packed = {
        "plain": plain,
        "int4": lambda w: pack4(*rounding.round4(w, 64), 64),
        "int8": lambda w: pack8(*rounding.round8(w)),
    }
    weight = Weight.merged([packed[kind](each) for each in (w[:64], w[64:])])
    assert weight is not None
    return MergedLinear(weight, noise(n, seed=2).to(dtype) if biased else None)


def turning(m: int, r: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.arange(m).unsqueeze(1) * 0.3 ** torch.arange(r // 2)
    return tuple(torch.cat((t, t), 1).to(dtype) for t in (angles.cos(), angles.sin()))  # type: ignore[return-value]


def norms(d: int, form: str, dtype: torch.dtype) -> dict[str, RMS]:
    return {name: RMS(noise(d, seed=i).to(dtype), 1e-6, form) for i, name in enumerate(("of_q", "of_k"))}


def _heads(d: int, r: int, form: str = "") -> tuple[Run, Run]:
    def of(dtype: torch.dtype) -> Heads:
        return Heads(2, d, **norms(d, form, dtype)) if form else Heads(2, d)

    def tables(x: Tensor) -> tuple[Any, Any]:
        return turning(len(x), r, x.dtype) if r else (None, None)

    def theirs(x: Tensor, p: MergedLinear) -> list[Tensor]:
        outputs = skinny_reference.linear_skinny(x, p.weight, p.bias)
        n_kv = (outputs.shape[1] - 2 * d) // 2
        parts = outputs.split([2 * d, n_kv, n_kv], 1)
        ops = [(lambda t: t) if by is None else partial(_normed, by) for by in (of(x.dtype).of_q, of(x.dtype).of_k)]
        cos, sin = tables(x) if r else turning(len(x), d, x.dtype)
        if not r:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        q, k, v = layer.before(x, lambda x: x, *(lambda _, y=y: y for y in parts), *ops, cos, sin, d)
        return [q.transpose(0, 1), torch.cat((k, v)).transpose(0, 1)]

    return lambda x, p: fused.heads(x, p, of(x.dtype), *tables(x)), theirs


def _normed(by: RMS, x: Tensor) -> Tensor:
    return rms_norm(x, by.weight, by.eps, by.form)


def _gated(act: str) -> tuple[Run, Run]:
    def theirs(x: Tensor, p: MergedLinear) -> list[Tensor]:
        gate, up = skinny_reference.linear_skinny(x, p.weight, p.bias).chunk(2, 1)
        return [ACTIVATIONS[act](gate) * up]

    return lambda x, p: [fused.gated(x, p, act)], theirs


# by name: outputs, ours, the reference
CASES: dict[str, tuple[int, Run, Run]] = {
    **{act: (384, *_gated(act)) for act in ("silu", "gelu", "gelu_tanh")},
    "heads of 64": (256, *_heads(64, 64)),
    "heads of 48, in part": (192, *_heads(48, 32, "round first")),
    "heads of 16, normed": (96, *_heads(16, 16, "one more")),
    "heads as they are": (192, *_heads(48, 0)),
}
OFTEN = {("silu", 2), ("heads of 48, in part", 1), ("heads of 16, normed", 0)}
FORMS = [("plain", torch.bfloat16, 1), ("int4", torch.bfloat16, 2), ("int8", torch.float16, 2)]


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "sk"),
    [
        pytest.param(name, *form, id=f"{name}, {form[0]}", marks=[] if (name, j) in OFTEN else pytest.mark.slow)
        for name in CASES
        for j, form in enumerate(FORMS)
    ],
)
def test_an_epilogue_is_what_its_reference_computes(
    name: str, kind: str, dtype: torch.dtype, sk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, and so many that torch multiplies; nothing is left of who has arrived."""
    monkeypatch.setattr(skinny, "stretches", lambda *_: sk)
    n, ours, theirs = CASES[name]
    p, x = product(n, kind, dtype, biased=sk == 2), noise(5, K, seed=1).to(dtype)
    for rows in (x, x.repeat(13, 1)) if kind == "plain" else (x,):
        for got, want in zip(ours(rows, p), theirs(rows, p), strict=True):
            assert got.isfinite().all()
            assert (got.float() - want.float()).norm() <= 1.5 * torch.finfo(dtype).eps * want.float().norm()
    assert not p.weight.arrivals.any()


@pytest.mark.parametrize("name", [pytest.param("silu", marks=pytest.mark.slow), "heads of 16, normed"])
def test_a_row_has_the_bits_that_it_has_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "stretches", lambda *_: 2)
    n, ours, _ = CASES[name]
    p, x = product(n, "int4", torch.bfloat16, biased=True), noise(1, K, seed=1).repeat(19, 1).bfloat16()
    x[1:18] = noise(17, K, seed=3).bfloat16()
    one, many = ours(x[:1], p), ours(x, p)
    for alone, among in zip(one, many, strict=True):
        assert torch.equal(alone[0], among[0])
