"""Activations in whole vectors: the module's own numbers, the same for a row alone and among others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvcli.kernels.invariant_activations import PIECE, make_activations_invariant_

ACTS = {"gelu": nn.GELU(), "tanh": nn.GELU("tanh"), "silu": nn.SiLU(), "sigmoid": nn.Sigmoid()}


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 56, 64, PIECE // 3])
def test_a_row_is_the_same_alone_and_among_others(name: str, dtype: torch.dtype, width: int) -> None:
    x = torch.randn(1, 7, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    root = nn.Sequential(ACTS[name])
    want = root(x)
    assert make_activations_invariant_(root) == 1
    try:
        together = root(x)
        torch.testing.assert_close(together, want)
        for i in range(7):
            assert torch.equal(root(x[:, i : i + 1]), together[:, i : i + 1])
        assert torch.equal(root(x.transpose(1, 2)), together.transpose(1, 2)), "however it lies in memory"
        assert root(x[:, :0]).shape == (1, 0, width)
    finally:
        del ACTS[name].forward


def test_what_is_no_function_of_single_numbers_stays() -> None:
    others = [
        nn.Softmax(-1),
        nn.Identity(),
        nn.Dropout(0.0),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.Linear(7, 7),
    ]
    assert make_activations_invariant_(nn.Sequential(*others)) == 0


class Gated(nn.Module):
    """As experts that compute their gate themselves."""

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., ::2] * torch.sigmoid(x[..., 1::2])


@pytest.mark.parametrize("width", [2, 112, 128, 2 * PIECE])
def test_a_gate_of_experts_is_the_same_alone_and_among_others(width: int) -> None:
    x, root = torch.randn(7, width, generator=torch.Generator().manual_seed(0)), Gated()
    want = root._apply_gate(x)
    assert make_activations_invariant_(root) == 1
    assert make_activations_invariant_(root) == 0
    together = root._apply_gate(x)
    torch.testing.assert_close(together, want)
    for i in range(7):
        assert torch.equal(root._apply_gate(x[i : i + 1]), together[i : i + 1])
    assert root._apply_gate(x[:0]).shape == (0, width // 2)
