"""Experts on the kernels for GPUs: numbers of their weights, bits of a row that others do not change, and no host."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli.engine.hf.fused_experts import NAME, serve_experts_
from kvcli.engine.hf.model_probe import relative_rms
from kvcli.kernels import triton_support
from kvcli.kernels.linear_quantized import Codes
from kvcli.kernels.moe_linear import ExpertTensors
from kvcli.kernels.moe_linear.tensor import Experts
from tests.families import build

pytest.importorskip("triton")
import_module("tests.kernels.interpreted")  # before anything that is fused
fused = import_module("kvcli.kernels.moe_linear.fused")
torch.set_num_threads(1)

E, TOP, BF16 = 5, 2, torch.bfloat16
# kind, inputs, hidden numbers between: groups of 64 and of 32, and steps of 16
KINDS = [("turned", 48, 32), ("int4", 128, 64)]
SLOW = [("plain", 48, 32), ("int8", 48, 32), ("int4", 96, 32)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise * torch.linspace(0.2, 2.0, shape[0]).view(-1, *[1] * (len(shape) - 1))


def made(kind: str, n: int, k: int, seed: int) -> tuple[ExpertTensors, Tensor, Tensor]:
    """Weights of experts, the same in float64 [E, N, K], and a bias [E, N]."""
    w, bias = (numbers(E, n, k, seed=seed) / k**0.5).to(BF16), numbers(E, n, seed=seed + 1).to(BF16)
    if kind in ("plain", "turned"):
        is_turned = kind == "turned"
        data = w.transpose(1, 2).contiguous() if is_turned else w
        return ExpertTensors("plain", n, k, data, None, 0, is_turned, bias), w.double(), bias
    codes = Codes.of(w, 8 if kind == "int8" else 4, native=False)
    found = codes.tensors()
    assert found is not None
    found.bias = bias
    return found, codes.plain().double(), bias


def gate(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return silu(left) * right


@pytest.mark.parametrize(
    ("kind", "k", "inner"), [*KINDS, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_a_row_gets_what_its_experts_give_and_the_same_bits_alone(kind: str, k: int, inner: int) -> None:
    up, w_up, b_up = made(kind, 2 * inner, k, 1)
    down, w_down, b_down = made(kind, k, inner, 3)
    x, weights = numbers(9, k, seed=5).to(BF16), torch.rand(9, TOP)
    ids = torch.tensor([[0, 3], [3, 1], [3, 0], [1, 3], [3, 4], [4, 3], [0, 1], [3, 0], [1, 4]])  # nobody is sent to 2

    found = fused.experts(x, ids, weights, up, down, gate)

    want = torch.zeros(9, k, dtype=torch.float64)
    for row in range(9):
        for at in range(TOP):
            e = int(ids[row, at])
            h = gate(x[row].double() @ w_up[e].T + b_up[e].double())
            want[row] += weights[row, at].double() * (h @ w_down[e].T + b_down[e].double())
    assert (found.double() - want).norm() < 8e-3 * want.norm()
    for some in ([4], [8, 3, 1, 0, 2]):
        assert torch.equal(fused.experts(x[some], ids[some], weights[some], up, down, gate), found[some])


@pytest.mark.parametrize("n", [11, 550])
def test_pairs_are_listed_by_counting_as_a_sort_lists_them(n: int) -> None:
    """In one program, and in two."""
    ids = torch.tensor([4, 1, 4, 0, 4, 1, 6, 6, 4, 0, 4]).repeat(n // 11)
    order, table = fused.lists(ids, 7)
    assert order.tolist() == sorted(range(n), key=lambda i: (int(ids[i]), i))
    counts = ids.bincount()
    used, last = counts.nonzero()[:, 0], counts.cumsum(0)
    assert table[3, 0] == len(used) == 4
    assert table[:3, :4].tolist() == [t.tolist() for t in (used, (last - counts)[used], last[used])]


class NoHost(TorchDispatchMode):
    """Refuses what waits for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "unique")), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "bits"), [pytest.param("qwen3_moe", 0, marks=pytest.mark.slow), ("qwen3_moe", 4), ("gpt_oss", 0)]
)
def test_a_model_says_the_same_and_never_asks_the_host(family: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "why_not", lambda *_: "")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32}
    models = [build(family, BF16, **sizes) for _ in range(2)]
    if bits:
        for model in models:
            for module in model.modules():
                for name in ("gate_up_proj", "down_proj"):
                    if (old := module._parameters.get(name)) is not None:
                        codes = Codes.of(old.detach(), 4, native=False)
                        fresh = Experts(codes, old.shape, old.dtype, True) if model is models[0] else codes.plain()
                        setattr(module, name, torch.nn.Parameter(fresh.to(BF16), requires_grad=False))
    ours = models[0]
    n = serve_experts_(ours)
    assert n == len(ours.model.layers)
    ids = torch.randint(1, 90, (1, 7), generator=torch.Generator().manual_seed(0))
    hidden = numbers(7, 64, seed=2).to(BF16)
    experts, theirs = (next(m for m in model.modules() if type(m).__name__.endswith("Experts")) for model in models)
    assert experts.config._experts_implementation == NAME
    sent, weights = torch.randint(0, 4, (7, 2), generator=torch.Generator().manual_seed(1)), torch.rand(7, 2)
    with torch.inference_mode():
        with NoHost():
            found = experts(hidden, sent, weights.to(BF16))
        want = theirs(hidden, sent, weights.to(BF16))
        torch.testing.assert_close(found.float(), want.float(), rtol=0.03, atol=0.03 * float(want.abs().max()))
        logits = [model(ids).logits[0].double() for model in models]
    assert relative_rms(*logits, 3) < 0.05, "of most rows: rounding may send some to another expert"
