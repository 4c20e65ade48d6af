"""Linear layers as a CPU likes them: the numbers of F.linear, for any row count; unsuitable weights left alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvcli.kernels.invariant_activations import multiplies
from kvcli.kernels.linear_blocked import BlockedLinear, block, block_, linear_blocked, reference, why_not
from kvcli.kernels.linear_quantized import quantize_


@pytest.fixture(params=["blocks", "widened"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a CPU with products of bf16 does, and what one without them does."""
    if request.param == "blocks" and not multiplies(torch.bfloat16):
        pytest.skip("this CPU has no bf16 kernels")
    for place in ("kvcli.kernels.linear_blocked", "kvcli.kernels.linear_blocked"):
        monkeypatch.setattr(f"{place}.multiplies", lambda dtype: request.param == "blocks")
    return str(request.param)


@pytest.mark.parametrize("rows", [(0,), (1,), (2,), (3,), (4,), (7,), (1, 1), (1, 67)])
@pytest.mark.parametrize(("out", "into"), [(1, 1), (3, 5), (64, 48), (131, 257)])
@pytest.mark.parametrize("biased", [False, True])
def test_blocked_equals_linear(rows: tuple[int, ...], out: int, into: int, biased: bool, form: str) -> None:
    g = torch.Generator().manual_seed(out)
    x, w, b = (torch.randn(s, generator=g).bfloat16() for s in ((*rows, into), (out, into), (out,)))
    bias = b if biased else None
    got = linear_blocked(x, block(w), bias)
    want = reference.linear_blocked(x.double(), w.double(), None if bias is None else bias.double())
    assert got.shape == want.shape
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=1e-2)


def test_a_model_is_swapped_layer_by_layer_and_a_tied_head_is_kept_once(form: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

    model = Tied().bfloat16()
    x = torch.randn(5, 8).bfloat16()
    want = model.body(x)
    assert block_(model) == (2 if form == "blocks" else 3)
    assert isinstance(model.body[0], BlockedLinear)
    if form == "blocks":
        assert type(model.head) is nn.Linear
    else:
        assert model.head.blocked.data_ptr() == model.embed.weight.data_ptr()
    torch.testing.assert_close(model.body(x), want, atol=2e-2, rtol=1e-2)
    assert block_(nn.Sequential(nn.Linear(4, 4))) == 0, "float32 gains nothing and stays"
    assert "float32" in why_not(torch.empty(2, 2))


def test_a_weight_is_widened_a_stretch_at_a_time(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=g).bfloat16() for s in ((9, 32), (50, 32), (50,)))
    whole = linear_blocked(x, block(w), b)
    monkeypatch.setattr("kvcli.kernels.linear_blocked.STRETCH", 7 * 32)
    torch.testing.assert_close(linear_blocked(x, block(w), b), whole, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("swap", [block_, lambda root: quantize_(root, 8)])
def test_replaced_layers_are_gone_before_the_next_ones_come(swap: Callable[[nn.Module], object]) -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16)) for _ in range(9))
    weights = [weakref.ref(m.weight) for m in model.modules() if type(m) is nn.Linear]
    alive: list[int] = []

    class Parent(nn.Sequential):
        """Looks around whenever a child is swapped."""

        def __setattr__(self, name: str, value: object) -> None:
            alive.append(sum(ref() is not None for ref in weights))
            super().__setattr__(name, value)

    for parent in model:
        parent.__class__ = Parent
    swap(model)
    assert alive == [9, 8, 7, 6, 5, 4, 3, 2, 1]
