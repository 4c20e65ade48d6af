"""Weights of experts in other forms: the numbers of transformers' grouped product, rows of their own, memory once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers.pytorch_utils import Conv1D

from kvcli.engine.hf.model_probe import is_batch_variant
from kvcli.engine.loading.open_lm import install_kernels
from kvcli.kernels import linear_quantized
from kvcli.kernels import moe_linear as grouped
from kvcli.kernels import native as built
from kvcli.kernels.linear import NativeWeight
from kvcli.kernels.linear.experts import Panels, lay_out_experts_
from kvcli.kernels.linear_quantized import Bits, Codes, quantize_experts_
from kvcli.kernels.moe_linear import ExpertWeights, reference, tensor
from kvcli.kernels.moe_linear.tensor import Experts
from kvcli.kernels.rms_norm import norm_
from tests import make
from tests.families import build

natively = pytest.mark.skipif(not built.levels(), reason=built.why_not())
E, N, K = 5, 48, 96
WIDE = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
ENDS = [3, 3, 4, 10, 11]
# of the largest result: what it costs to round sums, and digits of rows in bf16
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}


def weights(dtype: torch.dtype) -> Tensor:
    """Experts and rows of different sizes, so that a scale on the wrong one shows."""
    noise = torch.randn(E, N, K, generator=torch.Generator().manual_seed(0))
    return (noise * torch.linspace(0.1, 3.0, E * N).view(E, N, 1)).to(dtype)


def rows(m: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("way", ["native", "torch", "plain"])
def test_quantized_experts_are_the_weights_that_their_codes_stand_for(
    way: str, bits: Bits, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    if way == "native" and not linear_quantized.serves(dtype):
        pytest.skip(built.why_not())
    if way == "torch":
        monkeypatch.setattr(linear_quantized, "serves", lambda dtype: False)
    plain = Codes.of(weights(dtype), bits, native=False)
    codes = plain if way == "plain" else plain.native()
    x = rows(13, dtype)  # two more than are sent anywhere
    want = reference.moe_linear(x.float(), plain.plain(), ENDS)
    found = grouped.moe_linear(x, codes, N, ENDS)
    torch.testing.assert_close(found.float(), want, rtol=0, atol=WITHIN[dtype] * float(want.abs().max()))
    if way != "plain":
        assert torch.equal(grouped.moe_linear(x, Codes.of(weights(dtype), bits), N, ENDS), found)
        with pytest.raises(TypeError, match="can only be multiplied"):
            codes.plain()


@natively
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_what_a_row_gives_does_not_depend_on_who_is_sent_where(bits: Bits, dtype: torch.dtype):
    form = Codes.of(weights(dtype), bits) if bits else Panels.of(weights(dtype))
    x = rows(70, dtype)
    drawn = torch.randint(E, (70,), generator=torch.Generator().manual_seed(2)).sort().values
    for sent in (drawn, torch.full((70,), 2)):
        together = grouped.moe_linear(x, form, N, [int((sent <= e).sum()) for e in range(E)])
        for some in (slice(1), slice(2), slice(40, 47), slice(33), slice(69, 70)):
            few = grouped.moe_linear(x[some], form, N, [int((sent[some] <= e).sum()) for e in range(E)])
            assert torch.equal(few, together[some])


def test_bytes_are_a_share_of_sixteen_bits_and_counted_once():
    wide = torch.randn(3, 64, 512).bfloat16()
    for bits, most in ((8, 0.53), (4, 0.30)):
        form = Codes.of(wide, bits)  # type: ignore[arg-type]
        made = nn.Parameter(Experts(form, wide.shape, wide.dtype, True), requires_grad=False)
        assert made.untyped_storage().nbytes() == form.memory.nbytes <= most * wide.nbytes
        assert (made.shape, made.dtype, made.numel()) == (wide.shape, wide.dtype, wide.numel())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_quantized_models_say_what_their_codes_say(name: str):
    """Weights that are codes already lose nothing, so that the plain model is the reference."""
    model, whole = (build(name, **WIDE) for _ in range(2))
    for module, plain in zip(model.modules(), whole.modules(), strict=True):
        for at, weight, turned in grouped.weights_of(module):
            assert isinstance(turned, bool)
            codes = Codes.of(weight if turned else weight.transpose(1, 2), 4, native=False).plain()
            getattr(plain, at).copy_(codes if turned else codes.transpose(1, 2))
    seen = list[Tensor]()
    swap = quantize_experts_(model, 4, seen.append)
    assert (swap.packed, len(seen), swap.kept) == (3 * 2 * 5, 6, {})
    assert swap.weights == sum(t.numel() for t in seen)
    ids = torch.randint(1, 97, (1, 19), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=1e-3, atol=1e-3)


def test_experts_that_stay_say_why():
    model = build("qwen3_moe", hidden_size=56, moe_intermediate_size=32)
    why = {"56 inputs are not a multiple of 32": 15, "56 outputs are not a multiple of 16": 15}
    assert (quantize_experts_(model, 4).packed, quantize_experts_(model, 4).kept) == (0, why)
    model.set_experts_implementation("eager")
    assert quantize_experts_(model, 8).kept == {"experts are multiplied by eager, not in groups": 30}

    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.conv = nn.Parameter(torch.zeros(3, 64, 64)), nn.Conv1d(4, 4, 3)

    assert quantize_experts_(Old(), 8).kept == {"their module does not say how it multiplies experts": 3}


@natively
@pytest.mark.parametrize("is_turned", [True, False])
def test_groups_are_products_of_their_own(is_turned: bool):
    w = torch.randn(5, 48, 32).bfloat16()
    packed = Experts(Panels.of(w if is_turned else w.transpose(1, 2)), w.shape, w.dtype, is_turned)
    k = 32 if is_turned else 48
    x, ends = torch.randn(11, k).bfloat16(), torch.tensor([3, 3, 4, 10, 11], dtype=torch.int32)

    def product(weight: Tensor) -> Tensor:
        return grouped_mm(x, weight.transpose(-2, -1) if is_turned else weight, offs=ends)

    torch.testing.assert_close(product(packed), product(w), rtol=2e-2, atol=2e-2)
    assert torch.equal(packed.detach() + 0, w)
    assert packed.untyped_storage().nbytes() == 5 * 64 * k * 2


@natively
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_model_of_experts_says_the_same(name: str):
    model = build(name)
    ids = torch.randint(1, 97, (1, 19), generator=torch.Generator().manual_seed(0))
    before, seen = model(ids).logits, list[Tensor]()
    assert lay_out_experts_(model, seen.append) == len(seen) == 9  # three layers: up, down, router
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-3, atol=1e-3)


@natively
def test_rows_are_routed_and_multiplied_on_their_own():
    model = build("qwen3_moe")
    lay_out_experts_(model)
    experts, rows = model.model.layers[0].mlp, torch.randn(1, 70, 48, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = experts(rows)
        for m in (1, 2, 7, 33):
            assert torch.equal(experts(rows[:, :m]), whole[:, :m])


@natively
def test_weights_that_are_more_than_multiplied_by_rows_stay():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 8))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight * 2)

    class Router(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight).softmax(-1)

    root = nn.ModuleList([Scaled(), Conv1D(8, 8), nn.Linear(8, 8), nn.Embedding(5, 8), Router()])
    assert lay_out_experts_(root) == 1
    assert [isinstance(m.weight, NativeWeight) for m in root] == [False, False, False, False, True]


@natively
def test_a_module_that_refuses_rows_stays_and_the_model_loads():
    class Picky(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(shape)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            assert x.dim() == 9, "only these"
            return x

    model = nn.Sequential(Picky(4, 64), Picky(64))
    drawn = torch.get_rng_state()
    assert (lay_out_experts_(model), norm_(model)) == (0, 0)
    assert torch.equal(torch.get_rng_state(), drawn)  # nor does a trial move anybody's random numbers


@natively
@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_a_sum_in_an_order_that_goes_by_the_number_of_rows_is_found(quant: str, monkeypatch: pytest.MonkeyPatch):
    def halves(x: Tensor, form: ExpertWeights, n: int, ends: Sequence[int]) -> Tensor:
        low = x.clone()
        low[:, x.shape[1] // 2 :] = 0
        several = torch.tensor([b - a > 1 for a, b in pairwise([0, *ends]) for _ in range(a, b)]).unsqueeze(1)
        parts = [grouped.moe_linear(part, form, n, ends) for part in (low, x - low)]
        return torch.where(several, parts[0] + parts[1], grouped.moe_linear(x, form, n, ends))

    lm = make.model("qwen3_moe", **WIDE, quant=quant)
    install_kernels(lm)
    assert lm.is_row_invariant
    monkeypatch.setattr(tensor, "moe_linear", halves)
    assert is_batch_variant(lm)
