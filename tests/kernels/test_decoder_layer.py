"""Norms, MLPs and layers around their attention: PyTorch's numbers, and the same bits whoever else is in the pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcli.kernels import linear_quantized, native
from kvcli.kernels.decoder_layer import Layer, after, before
from kvcli.kernels.decoder_layer import reference as by_parts
from kvcli.kernels.gated_mlp import ACTIVATIONS, Mlp, Product, gated_mlp, product_of
from kvcli.kernels.gated_mlp import reference as mlp_reference
from kvcli.kernels.linear import NativeLinear, NativeWeight, linear
from kvcli.kernels.linear_quantized import PackedLinear
from kvcli.kernels.rms_norm import FORMS, Norm, norm_of, reference, rms_norm, trial_rows

pytestmark = pytest.mark.skipif(not native.levels(), reason=native.why_not() or "unknown")
LEVELS = native.levels()
NUMBERS = [torch.float32, torch.bfloat16]
BITS = [0, 8, 4]  # of the weights; 0 = those of the numbers
E, INSIDE, HEADS, KV, D = 96, 160, 4, 2, 24

torch.set_num_threads(1)


@pytest.fixture(params=[1, 2, 5], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    functions = native.native()
    assert functions is not None
    functions.use_threads(request.param)
    yield
    functions.use_threads(1)


@dataclass
class Parts:
    """Weights of a layer, and what the native calls are told of them."""

    linears: dict[str, nn.Module]
    norms: dict[str, tuple[Tensor, Norm]]
    mlp: Mlp
    layer: Layer
    level: str

    def product(self, name: str) -> Callable[[Tensor], Tensor]:
        of = self.linears[name]
        if isinstance(of, NativeLinear):
            return lambda x: linear(x, of.packed, of.bias, of.out_features, level=self.level)
        assert isinstance(of, PackedLinear)

        def product(x: Tensor) -> Tensor:
            y = linear_quantized.linear(x, of.out_features, of.format, of.data, of.scale, level=self.level)
            return y if of.bias is None else y.add_(of.bias)

        return product

    def norm(self, name: str) -> Callable[[Tensor], Tensor]:
        return lambda x: reference.rms_norm(x, self.norms[name][0], 1e-5, FORMS[0])


def layer_of(weight: Tensor, bias: Tensor | None, bits: Any) -> nn.Module:
    if not bits:
        return NativeLinear(NativeWeight.of(weight), bias)
    plain = nn.Linear(*weight.shape[::-1], bias is not None)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return PackedLinear.of(plain, bits)


def parts(dtype: torch.dtype, level: str, act: str = "silu", bits: int = 0) -> Parts:
    noise = torch.Generator().manual_seed(3)
    shapes = {
        "q": (HEADS * D, E),
        "k": (KV * D, E),
        "v": (KV * D, E),
        "o": (E, HEADS * D),
        "gate": (INSIDE, E),
        "up": (INSIDE, E),
        "down": (E, INSIDE),
    }
    linears = {}
    for name, (n, k) in shapes.items():
        bias = torch.randn(n, generator=noise).to(dtype) if name in "qkv" else None
        linears[name] = layer_of((torch.randn(n, k, generator=noise) * k**-0.5).to(dtype), bias, bits)
    norms = {}
    for name, h in {"first": E, "second": E, "of_q": D, "of_k": D, "of_attention": E, "of_mlp": E}.items():
        weight = (1 + 0.3 * torch.randn(h, generator=noise)).to(dtype)
        norms[name] = weight, norm_of(weight, 1e-5, FORMS[0])
    made: dict[str, Product] = {name: product_of(of)[0] for name, of in linears.items()}
    mlp = Mlp(made["gate"], made["up"], made["down"], ACTIVATIONS.index(act), dtype == torch.float32)
    layer = Layer(*(norm for _, norm in norms.values()), *(made[name] for name in "qkvo"), mlp, D)
    return Parts(linears, norms, mlp, layer, level)


def rows(n: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_a_norm_is_pytorchs_to_the_bit(level: str, form: str, dtype: torch.dtype):
    for h in (16, 24, 80, 96, 128, 1000, 1024, 2304, 4099, 16384):
        weight = (1 + 0.3 * torch.randn(h, generator=torch.Generator().manual_seed(1))).to(dtype)
        x = trial_rows(weight)
        wanted = reference.rms_norm(x, weight, 1e-6, form)
        assert torch.equal(rms_norm(x, norm_of(weight, 1e-6, form), level=level), wanted), h


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_an_activation_is_a_rounding_off_at_most(level: str, act: str, dtype: torch.dtype):
    n = 64
    eye = layer_of(torch.eye(n, dtype=dtype), None, 0)
    one = layer_of(torch.zeros(n, n, dtype=dtype), torch.ones(n, dtype=dtype), 0)
    made = [product_of(of)[0] for of in (eye, one, eye)]
    x = torch.cat([torch.linspace(-40, 40, 1000 * n), torch.linspace(-2e-3, 2e-3, 100 * n)]).view(-1, n).to(dtype)
    ours = gated_mlp(x, Mlp(*made, ACTIVATIONS.index(act), dtype == torch.float32), level=level)
    exact = mlp_reference.ACTIVATIONS[act](x.double())
    rounding = 2**-8 if dtype == torch.bfloat16 else 3e-7
    assert bool(((ours - exact).abs() <= 1e-6 + rounding * exact.abs()).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_an_mlp_is_its_products_and_its_activation(level: str, act: str, dtype: torch.dtype):
    given, x = parts(dtype, level, act), rows(65, E, dtype)
    inside = mlp_reference.ACTIVATIONS[act](given.product("gate")(x)) * given.product("up")(x)
    wanted = given.product("down")(inside)
    ours = gated_mlp(x, given.mlp, level=level)
    assert (ours - wanted).float().norm() <= (2e-3 if dtype == torch.bfloat16 else 1e-6) * wanted.float().norm()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("turning", [0, 10, D])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_a_layer_is_its_parts_to_the_bit(level: str, turning: int, bits: int, dtype: torch.dtype):
    given, x = parts(dtype, level, bits=bits), rows(9, E, dtype)
    cos, sin = (rows(9, turning, dtype), rows(9, turning, dtype).flip(0)) if turning else (None, None)
    still = torch.zeros(9, 0, dtype=dtype)
    made = before(given.layer, x, cos, sin, level=level)
    wanted = by_parts.before(
        x,
        given.norm("first"),
        *(given.product(name) for name in "qkv"),
        *(given.norm(name) for name in ("of_q", "of_k")),
        still if cos is None else cos,
        still if sin is None else sin,
        D,
    )
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
    attended = rows(9, HEADS * D, dtype).view(9, HEADS, D)
    ours = after(given.layer, x, attended, level=level)
    norms = [given.norm(name) for name in ("of_attention", "second", "of_mlp")]
    mlp = lambda normed: gated_mlp(normed, given.mlp, level=level)  # noqa: E731
    assert torch.equal(ours, by_parts.after(x, attended, given.product("o"), *norms[:2], mlp, norms[2]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_a_row_does_not_know_its_neighbours(level: str, bits: int, dtype: torch.dtype):
    given, x = parts(dtype, level, "gelu_tanh", bits), rows(64, E, dtype)
    attended, cos = rows(64, HEADS * D, dtype).view(64, HEADS, D), rows(64, D, dtype)
    norm = given.norms["first"][1]

    def all_of(index: Tensor) -> list[Tensor]:
        some, turns = x[index], cos[index]
        made = before(given.layer, some, turns, turns.flip(1), level=level)
        return [
            rms_norm(some, norm, level=level),
            gated_mlp(some, given.mlp, level=level),
            *(heads.transpose(0, 1) for heads in made),
            after(given.layer, some, attended[index], level=level),
        ]

    whole, draw = all_of(torch.arange(64)), random.Random(5)
    for m in range(1, 65):
        index = torch.tensor(draw.sample(range(64), m))
        assert all(torch.equal(part, every[index]) for part, every in zip(all_of(index), whole, strict=True)), m


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_a_prompt_is_computed_in_blocks_of_rows_and_says_the_same(level: str, bits: int, dtype: torch.dtype):
    n, edge = 1100, 512  # as many at a time as in native/c/linear.c
    given, x, cos = parts(dtype, level, "silu", bits), rows(n, E, dtype), rows(n, D, dtype)
    attended = rows(n, HEADS * D, dtype).view(n, HEADS, D)

    def all_of(at: slice) -> list[Tensor]:
        made = before(given.layer, x[at], cos[at], cos[at].flip(1), level=level)
        still = before(given.layer, x[at], None, None, level=level)
        heads = [each.transpose(0, 1) for each in (*made, *still)]
        return [*heads, gated_mlp(x[at], given.mlp, level=level), after(given.layer, x[at], attended[at], level=level)]

    whole = all_of(slice(None))
    for at in (slice(0, 1), slice(edge - 1, edge + 1), slice(2 * edge - 3, n), slice(n - 1, n)):
        assert all(torch.equal(part, every[at]) for part, every in zip(all_of(at), whole, strict=True)), at
