"""Experts on native products: the numbers of transformers' grouped product, rows of their own, memory once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers.pytorch_utils import Conv1D

from kvcli.kernels import native as built
from kvcli.kernels.experts.tensor import Experts
from kvcli.kernels.linear.experts import Panels, lay_out_experts_
from kvcli.kernels.linear.module import NativeWeight
from kvcli.kernels.rms_norm.module import norm_
from tests.families import build

pytestmark = pytest.mark.skipif(not built.levels(), reason=built.why_not())


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


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_model_of_experts_says_the_same(name: str):
    model = build(name)
    ids = torch.randint(1, 97, (1, 19), generator=torch.Generator().manual_seed(0))
    before, seen = model(ids).logits, list[Tensor]()
    assert lay_out_experts_(model, seen.append) == len(seen) == 9  # three layers: up, down, router
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-3, atol=1e-3)


def test_rows_are_routed_and_multiplied_on_their_own():
    model = build("qwen3_moe")
    lay_out_experts_(model)
    experts, rows = model.model.layers[0].mlp, torch.randn(1, 70, 48, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = experts(rows)
        for m in (1, 2, 7, 33):
            assert torch.equal(experts(rows[:, :m]), whole[:, :m])


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
